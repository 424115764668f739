from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import brute_force_oracle as oracle
import pytest
import torch

import shardweave
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh, Program, Topology

pytestmark = pytest.mark.plan


CASES = pytest.mark.parametrize("case", oracle.PARAMETERS)
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
"""Of 100, the part of all pairs of layouts that the long tests have."""


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fills memory from torch.empty with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def integers(shape: Sequence[int], seed: str, low: int = -8, high: int = 8, times: int = 36) -> torch.Tensor:
    """float64 whole numbers whose sums, and divisions by 2, 3, 4, 6 and 8, are exact in float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randint(low, high + 1, tuple(shape), generator=generator).double() * times


def may_alias(source: str, target: str) -> bool:
    """Whether torch aliases as well: nothing to do, or replicated values that become unchanged contributions."""
    pairs = zip(oracle.read(source).tokens, oracle.read(target).tokens, strict=True)
    return source == target or all(a == b or (a == "R" and b in ("Pavg", "Pmax", "Pmin")) for a, b in pairs)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def carried_out(
    program: Program,
    locals_: list[torch.Tensor],
    source: str,
    target: str,
    one_sided: bool = True,
    backend: str | None = None,
    reduction: str = "ordered",
) -> list[torch.Tensor]:
    """The outputs, after checks that hold for every call: shapes, new contiguous memory, unchanged inputs."""
    before = [x.clone() for x in locals_]
    outs = shardweave.simulate(program, locals_, one_sided=one_sided, backend=backend, reduction=reduction)
    assert len(outs) == program.mesh.size
    for rank, (out, x) in enumerate(zip(outs, locals_, strict=True)):
        assert out.dtype == x.dtype
        assert tuple(out.shape) == program.local_shape(program.target, rank)
        if not (program.is_identity or may_alias(source, target)):
            assert out.is_contiguous(), program.explain()
            assert not any(shares_memory(out, given) for given in locals_), program.explain()
            assert not any(shares_memory(out, other) for other in outs[:rank]), program.explain()
    for x, kept in zip(locals_, before, strict=True):
        assert x.view(torch.uint8).equal(kept.view(torch.uint8)) if x.dim() else x.equal(kept)
    return outs


def prove(
    mesh: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, source: str, target: str,
    contributed: torch.Tensor, one_sided: bool = True, topology: Topology | None = None, backend: str | None = None,
    reduction: str = "ordered",
) -> None:  # fmt: skip
    """Run a pair on exact contributions (in a wide dtype) and compare every element with the sliced whole."""
    program = shardweave.plan(mesh, shape, dtype, source, target, topology=topology)
    locals_ = [x.to(dtype) for x in oracle.local_shards(mesh, shape, source, contributed)]
    whole = oracle.whole_of(mesh, source, contributed)
    outs = [
        x.to(contributed.dtype) for x in carried_out(program, locals_, source, target, one_sided, backend, reduction)
    ]
    expected = oracle.local_shards(mesh, shape, target, whole.reshape(*(1 for _ in mesh), *shape))
    for rank, (got, want) in enumerate(zip(oracle.assembled(mesh, target, outs), expected, strict=True)):
        assert got.equal(want), f"{program.explain()}\nrank {rank}: {got} instead of {want}"


@CASES
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(1, 13)[: PARTS * 12 // 100])]
)
def test_simulate_equals_slicing_the_whole(case: oracle.Case, first: int) -> None:  # type: ignore[name-defined]
    for source, target in case.pairs()[first::13]:
        contributed = integers(oracle.contribution_shape(case.mesh_shape, case.shape, source), source + target)
        prove(case.mesh_shape, case.shape, torch.float32, source, target, contributed)


# Steps through the pairs that are coprime to the number of layouts reach every target.
@CASES
@pytest.mark.parametrize(
    ("backend", "reduction", "every"),
    [
        ("gloo", "ordered", 37),
        ("nccl", "fast", 41),
        *(
            pytest.param(backend, reduction, max(7, 700 // PARTS), marks=pytest.mark.long)
            for backend, reduction in product((None, "gloo", "nccl"), ("ordered", "fast"))
            if backend or reduction == "ordered"
        ),
    ],
)
def test_simulate_two_sided_equals_slicing_the_whole(
    case: oracle.Case,  # type: ignore[name-defined]
    backend: str | None,
    reduction: str,
    every: int,
) -> None:
    offset = [None, "gloo", "nccl"].index(backend) + 3 * (reduction == "fast")
    for source, target in case.pairs()[offset::every]:
        contributed = integers(oracle.contribution_shape(case.mesh_shape, case.shape, source), source + target)
        prove(
            case.mesh_shape, case.shape, torch.float32, source, target, contributed,
            one_sided=False, backend=backend, reduction=reduction,
        )  # fmt: skip


@CASES
@pytest.mark.parametrize(
    ("every", "node_size"),
    [(67, 2), (71, 4), *(pytest.param(max(11, 1100 // PARTS), size, marks=pytest.mark.long) for size in (2, 4))],
)
def test_simulate_of_programs_over_nodes_equals_slicing_the_whole(
    case: oracle.Case,  # type: ignore[name-defined]
    every: int,
    node_size: int,
) -> None:
    slow = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
    topology = replace(shardweave.NVLINK_INFINIBAND, node_size=node_size, network=slow)
    for source, target in case.pairs()[::every]:
        contributed = integers(oracle.contribution_shape(case.mesh_shape, case.shape, source), source + target)
        prove(case.mesh_shape, case.shape, torch.float32, source, target, contributed, topology=topology)


# Ops


@pytest.mark.parametrize("target_op", ["", "avg", "max", "min"])
@pytest.mark.parametrize("source_op", ["", "avg", "max", "min", "prod"])
def test_simulate_partial_to_other_partial(source_op: str, target_op: str) -> None:
    for source, target in ((f"P{source_op} R", f"P{target_op} R"), (f"P{source_op} S0", f"S0 P{target_op}")):
        size = oracle.contribution_shape((2, 2), (5, 4), source)
        values = integers(size, source + target, -2, 2, 1) if source_op == "prod" else integers(size, source + target)
        prove((2, 2), (5, 4), torch.float32, source, target, values)


@pytest.mark.parametrize(
    ("dtype", "op", "values"),
    [
        (torch.float32, "", (3, 3)),
        (torch.bfloat16, "", (3, 3)),
        (torch.complex64, "", (3, 3)),
        (torch.int64, "", (6, 0)),
        (torch.uint8, "", (6, 0)),
        (torch.bool, "", (1, 0)),
        (torch.float32, "avg", (6, 6)),
        (torch.float32, "max", (6, 6)),
        (torch.int64, "min", (6, 6)),
        (torch.bool, "max", (1, 1)),
    ],
    ids=str,
)
def test_simulate_splits_replicated_values(dtype: torch.dtype, op: str, values: tuple[int, int]) -> None:
    program = shardweave.plan((2,), (5,), dtype, "R", f"P{op}")
    outs = shardweave.simulate(program, [torch.full((5,), 6).to(dtype)] * 2)
    assert all(out.equal(torch.full((5,), value).to(dtype)) for out, value in zip(outs, values, strict=True))


@pytest.mark.parametrize(
    ("dtype", "op", "own", "other"),
    [
        (torch.float32, "", 6, 0),
        (torch.float32, "avg", 12, 0),
        (torch.float32, "max", 6, -math.inf),
        (torch.float16, "min", 6, math.inf),
        (torch.float8_e4m3fn, "max", 6, -448),
        (torch.int8, "", 6, 0),
        (torch.int8, "max", 6, -128),
        (torch.int64, "max", 6, -(2**63)),
        (torch.int64, "min", 6, 2**63 - 1),
        (torch.uint8, "min", 6, 255),
        (torch.bool, "", 1, 0),
        (torch.bool, "min", 1, 1),
        (torch.complex64, "", 6, 0),
        (torch.complex64, "avg", 12, 0),
    ],
    ids=str,
)
def test_simulate_fills_other_ranks_with_identity(dtype: torch.dtype, op: str, own: float, other: float) -> None:
    program = shardweave.plan((2,), (5,), dtype, "S0", f"P{op}")
    assert program.bytes_received == [0, 0]
    outs = shardweave.simulate(program, [torch.full((n,), 6).to(dtype) for n in (3, 2)])
    first, second = (torch.full((n,), own).to(dtype) for n in (3, 2))
    rest = [torch.full((n,), other, dtype=dtype) for n in (2, 3)]
    assert outs[0].equal(torch.cat([first, rest[0]])) and outs[1].equal(torch.cat([rest[1], second]))


def test_simulate_keeps_infinities_under_max_and_min() -> None:
    x = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    for op, source in (("max", "S0"), ("min", "S0"), ("max", "R"), ("min", "R")):
        program = shardweave.plan((2,), (4,), torch.float32, source, f"P{op}")
        outs = shardweave.simulate(program, list(x.chunk(2)) if source == "S0" else [x, x])
        assert oracle.assembled((2,), f"P{op}", outs)[0].equal(x)


# Arithmetic


def random_pairs() -> list[tuple[tuple[int, ...], tuple[int, ...], str, str]]:
    """Half of all pairs with a partial source and a target without partial, on uneven shapes."""
    results = []
    for case in oracle.EXHAUSTIVE:
        if case.shape in ((7,), (7, 5), (5, 7, 3)):
            pairs = [(a, b) for a, b in case.pairs(partial=True) if "P" in a and "P" not in b]
            results += [(case.mesh_shape, case.shape, *pair) for pair in pairs[::2]]
    return results


def contributors_of(mesh: tuple[int, ...], source: str, contributed: torch.Tensor) -> list[torch.Tensor]:
    """The contributions in row-major order of their coordinates."""
    return list(contributed.reshape(-1, *contributed.shape[len(mesh) :]))


@pytest.mark.parametrize(
    ("dtype", "one_sided"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.float32, False)],
    ids=str,
)
def test_simulate_sums_floats_in_one_order_on_every_rank(dtype: torch.dtype, one_sided: bool) -> None:
    # Contributors in ascending order, in float32, rounded once: replicas, transports and paths agree bitwise.
    generator = torch.Generator().manual_seed(7)
    for mesh, shape, source, target in random_pairs()[:: 1 if dtype is torch.float32 and one_sided else 3]:
        size = oracle.contribution_shape(mesh, shape, source)
        contributed = torch.randn(size, generator=generator).to(dtype)
        program = shardweave.plan(mesh, shape, dtype, source, target)
        outs = carried_out(program, oracle.local_shards(mesh, shape, source, contributed), source, target, one_sided)
        parts = contributors_of(mesh, source, contributed)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        expected = oracle.local_shards(mesh, shape, target, total.to(dtype).view(*(1 for _ in mesh), *shape))
        for out, want in zip(outs, expected, strict=True):
            assert out.view(torch.uint8).equal(want.view(torch.uint8)), program.explain()


# Dtypes


DTYPES = [
    *((torch.float32, torch.float64), (torch.bfloat16, torch.float64), (torch.float16, torch.float64)),
    *((torch.float64, torch.float64), (torch.float8_e4m3fn, torch.float64), (torch.float8_e5m2, torch.float64)),
    *((torch.int64, torch.int64), (torch.int8, torch.int64), (torch.uint8, torch.int64), (torch.bool, torch.bool)),
    *((torch.complex64, torch.complex128), (torch.int32, torch.int64)),
]


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize(("dtype", "wide"), DTYPES, ids=str)
def test_simulate_every_dtype(dtype: torch.dtype, wide: torch.dtype, one_sided: bool) -> None:
    for mesh, shape in (((2, 2), (7, 5)), ((2, 4), (9, 6)), ((4,), (13,))):
        texts = list(oracle.layout_texts(len(mesh), ("R", "P", "S0", "S1")[: 2 + len(shape)]))
        pairs = [(a, b) for a in texts for b in texts]
        every = 1 if mesh == (4,) or (dtype is torch.int64 and mesh == (2, 2) and one_sided) else 13
        for source, target in pairs[:: every if one_sided else 29 if len(mesh) > 1 else 2]:
            low = 0 if dtype in (torch.uint8, torch.bool) else -2
            size = oracle.contribution_shape(mesh, shape, source)
            values = integers(size, source + target, low, 1 if dtype is torch.bool else 2, 1)
            if dtype.is_complex:
                values = torch.complex(values, integers(size, target + source, -2, 2, 1))
            # Eight bits hold few numbers: a float8_e5m2 total beyond 8 need not be exact.
            if dtype is torch.float8_e5m2:
                values = values.clamp(-1, 1)
            prove(mesh, shape, dtype, source, target, values.to(wide), one_sided)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_simulate_max_min_every_dtype(dtype: torch.dtype, op: str) -> None:
    wide = torch.bool if dtype is torch.bool else torch.int64 if not dtype.is_floating_point else torch.float64
    for source, target in (
        (f"P{op} R", "R S0"),
        (f"P{op} P{op}", "S0 S1"),
        ("S0 R", f"P{op} S1"),
        ("R S1", f"S0 P{op}"),
    ):
        if op == "prod" and f"P{op}" in target:
            continue
        low = 0 if dtype is torch.bool else -1
        values = integers(oracle.contribution_shape((2, 4), (5, 6), source), source + target, low, 1, 1)
        prove((2, 4), (5, 6), dtype, source, target, values.to(wide))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_simulate_moves_unsigned_integers(dtype: torch.dtype) -> None:
    for source, target in (("S0 S1", "S1 S0"), ("R S0", "S0 R"), ("S0 S0", "S0 S0 @ 0:1,0"), ("S0 R", "P R")):
        size = oracle.contribution_shape((2, 2), (5, 7), source)
        contributed = integers(size, source + target, 0, 50, 1).long()
        program = shardweave.plan((2, 2), (5, 7), dtype, source, target)
        outs = shardweave.simulate(
            program, [x.to(dtype) for x in oracle.local_shards((2, 2), (5, 7), source, contributed)]
        )
        got = oracle.assembled((2, 2), target, [out.long() for out in outs])
        want = oracle.local_shards((2, 2), (5, 7), target, contributed)
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))


# Memory


def test_simulate_expanded_inputs() -> None:
    program = shardweave.plan((2, 2), (6, 4), torch.float32, "P S0", "S0 S1")
    outs = shardweave.simulate(program, [torch.tensor(float(r)).expand(3, 4) for r in range(4)])
    top, bottom = torch.full((3, 2), 2.0), torch.full((3, 2), 4.0)
    assert all(out.equal(want) for out, want in zip(outs, (top, top, bottom, bottom), strict=True))


@pytest.mark.parametrize(("source", "target"), [("S0 R", "S0 R"), ("P P", "P P"), ("R R", "R R"), ("S0 S0", "S0 S0")])
def test_simulate_returns_the_inputs_of_an_identity(source: str, target: str) -> None:
    program = shardweave.plan((2, 2), (8, 3), torch.float32, source, target)
    locals_ = oracle.local_shards((2, 2), (8, 3), source, integers(
        oracle.contribution_shape((2, 2), (8, 3), source), source).float())  # fmt: skip
    assert program.is_identity
    assert all(out is x for out, x in zip(shardweave.simulate(program, locals_), locals_, strict=True))


@pytest.mark.parametrize(
    ("source", "target"), [("R R", "S0 R"), ("R R", "P R"), ("S0 R", "P R"), ("S0 S1", "S0 R"), ("P R", "R R")]
)
def test_simulate_returns_new_memory_even_without_exchange(source: str, target: str) -> None:
    # Row slices of a contiguous tensor could be views, but those would keep the whole tensor alive.
    locals_ = oracle.local_shards((2, 2), (8, 4), source, integers(
        oracle.contribution_shape((2, 2), (8, 4), source), source).float())  # fmt: skip
    outs = shardweave.simulate(shardweave.plan((2, 2), (8, 4), torch.float32, source, target), locals_)
    assert not any(shares_memory(out, x) for out in outs for x in locals_)
    assert all(out.untyped_storage().nbytes() == out.nbytes for out in outs)


# Meshes and arguments


def test_simulate_orders_outputs_by_mesh() -> None:
    x = torch.arange(24.0).view(4, 6)
    mesh = Mesh((2, 2), ranks=(9, 4, 6, 1))
    locals_ = [x[:2, :3], x[:2, 3:], x[2:, :3], x[2:, 3:]]
    for one_sided in (True, False):
        outs = shardweave.simulate(
            shardweave.plan(mesh, (4, 6), "float32", "S0 S1", "S1 S0"), locals_, one_sided=one_sided
        )
        assert all(
            out.equal(x[2 * j : 2 * j + 2, 3 * i : 3 * i + 3])
            for (i, j), out in zip(oracle.coordinates((2, 2)), outs, strict=True)
        )


@pytest.mark.parametrize(
    ("locals_", "parts"),
    [
        ([torch.zeros(4, 3)], ["locals_", "1 tensors", "2 ranks"]),
        ([torch.zeros(4, 3)] * 3, ["locals_", "3 tensors", "2 ranks"]),
        ([torch.zeros(4, 3), torch.zeros(4, 3)], ["locals_[1]", "position 1", "(4, 3)", "S0", "(7, 3)", "only (3, 3)"]),
        ([torch.zeros(4, 3), torch.zeros(9)], ["locals_[1]", "(9,)", "only (3, 3)"]),
        ([torch.zeros(4, 3), torch.zeros(3, 3).half()], ["locals_[1]", "float16", "float32"]),
        ([torch.zeros(4, 3), torch.zeros(3, 3, device="meta")], ["locals_[1]", "meta", "memory"]),
        ([torch.zeros(4, 3), 5], ["locals_[1]", "5", "strided tensor"]),
        (None, ["locals_", "NoneType", "list of tensors"]),
    ],
    ids=range(8),
)
def test_simulate_rejects_invalid_inputs(locals_: Any, parts: list[str]) -> None:
    program = shardweave.plan((2,), (7, 3), torch.float32, "S0", "S1")
    with pytest.raises(ArgumentError) as error:
        shardweave.simulate(program, locals_)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize(("source", "target"), [("R", "S0"), ("P", "R"), ("S0", "R"), ("P", "S0"), ("R", "P")])
def test_simulate_lazy_views_and_autograd_leaves(source: str, target: str, one_sided: bool) -> None:
    program = shardweave.plan((2,), (4, 3), torch.complex64, source, target)
    shape = program.local_shape(program.source, 0)
    plain = [torch.randn(shape, dtype=torch.complex64) for _ in range(2)]
    expected = shardweave.simulate(program, [x.conj().resolve_conj() for x in plain], one_sided=one_sided)
    for given in ([x.conj() for x in plain], [x.conj().resolve_conj().requires_grad_() for x in plain]):
        results = shardweave.simulate(program, given, one_sided=one_sided)
        assert all(a.equal(b) and not a.requires_grad for a, b in zip(results, expected, strict=True))


def test_simulate_rejects_program_of_one_rank() -> None:
    program = shardweave.plan((2,), (4,), torch.float32, "S0", "R", rank=1)
    with pytest.raises(ArgumentError, match=r"program: it is rank 1's alone; allowed: one of all ranks"):
        shardweave.simulate(program, [torch.zeros(2)])
