from __future__ import annotations

import math
import tracemalloc
from collections import defaultdict
from functools import lru_cache
from itertools import islice

import brute_force_oracle as oracle
import numpy as np
import pytest
from box_checks import (
    BOX_COLUMNS,
    assert_boxes_match_oracle,
    assert_matches_program_of_all,
)

from shardweave.errors import ArgumentError, LayoutSyntaxError, UnsupportedError
from shardweave.planner import (
    NVLINK_INFINIBAND,
    Exchange,
    Layout,
    Local,
    Mesh,
    Program,
    Shard,
    StridedShard,
    Topology,
    check_local_shape,
    plan,
)

pytestmark = pytest.mark.plan


@pytest.fixture(scope="module", params=oracle.PARAMETERS)
def case(request: pytest.FixtureRequest) -> oracle.Case:
    """Module scope, so that tests run case by case and every program is planned once."""
    return request.param


@lru_cache(maxsize=2)
def programs(case: oracle.Case, dtype: str = "float32") -> list[Program]:
    return [plan(case.mesh_shape, case.shape, dtype, *pair) for pair in case.pairs()]


def test_plan_without_partial_meets_bound_in_one_exchange(case: oracle.Case) -> None:
    for source, target in case.pairs(partial=False):
        program = plan(case.mesh_shape, case.shape, "float32", source, target)
        bound = [4 * n for n in oracle.bound_elements(case.mesh_shape, case.shape, source, target)]
        assert program.bytes_bound == bound, program.explain()
        assert program.bytes_received == bound, program.explain()
        assert program.exchanges == (1 if any(bound) else 0), program.explain()
        assert len(program.steps) <= 1
        assert all(step.reduce is None for step in program.steps)


@pytest.mark.parametrize(
    ("dtype", "every"),
    [("float32", 3), ("int64", 7)],
)
def test_plan_with_partial_bytes_match_oracle(case: oracle.Case, dtype: str, every: int) -> None:
    itemsize = {"float32": 4, "int64": 8}[dtype]
    for source, target in case.pairs(partial=True)[::every]:
        program = plan(case.mesh_shape, case.shape, dtype, source, target)
        steps = [
            oracle.step_elements(case.mesh_shape, case.shape, str(step.source), str(step.target), dtype == "float32")
            for step in program.steps
        ]
        expected = [itemsize * sum(column) for column in zip(*steps, strict=True)] or [0] * program.mesh.size
        assert program.bytes_received == expected, program.explain()
        assert program.bytes_bound is None
        assert len(program.steps) <= 2
        assert program.exchanges == sum(any(step) for step in steps), program.explain()
        if "P" not in source:
            assert program.exchanges <= 1


def cheapest_known(case: oracle.Case, source: str, target: str) -> int:
    """The elements that a rank receives at most on the best of two kinds of paths: direct, or reduce-scatter first."""
    a, b = oracle.read(source), oracle.read(target)
    reduced = [m for m in a.partial_dims if b.tokens[m] != a.tokens[m]]
    paths = [(source, target)]
    for dim in range(len(case.shape)):
        if case.shape[dim] > 1 and reduced:
            tokens = [f"S{dim}" if m in reduced else token for m, token in enumerate(a.tokens)]
            orders = a.orders | {dim: (*a.orders.get(dim, ()), *reduced)}
            odd = " ".join(f"{d}:{','.join(map(str, o))}" for d, o in sorted(orders.items()))
            paths.append((source, f"{' '.join(tokens)} @ {odd}", target))
    costs = []
    for path in paths:
        legs = zip(path, path[1:], strict=False)
        per_leg = np.array([oracle.step_elements(case.mesh_shape, case.shape, *leg, True) for leg in legs])
        costs.append(int(per_leg.sum(axis=0).max()))
    return min(costs)


@pytest.mark.parametrize("shape", [(32,), (32, 16), (16, 16, 16)], ids=str)
def test_plan_with_partial_near_fewest_bytes(shape: tuple[int, ...]) -> None:
    mesh_shape = (2, 4)
    case = oracle.Case(mesh_shape, shape, ("R", "P", "S0", "S1")[: 2 + min(len(shape), 2)])
    for source, target in case.pairs(partial=True):
        program = plan(mesh_shape, shape, "float32", source, target)
        # The planner counts whole shards, the part that a rank already holds included.
        assert max(program.bytes_received) <= 1.5 * 4 * cheapest_known(case, source, target), program.explain()


def test_plan_boxes_match_oracle(case: oracle.Case) -> None:
    for program in programs(case):
        assert_boxes_match_oracle(program)


def test_plan_steps_connect_source_and_target(case: oracle.Case) -> None:
    for (source, target), program in zip(case.pairs(), programs(case), strict=True):
        assert (program.source, program.target) == (Layout.parse(source), Layout.parse(target))
        layouts = [program.source.without_size_one(case.mesh_shape)]
        for step in program.steps:
            assert step.source == layouts[-1]
            layouts.append(step.target)
            received = sum(step.boxes.elements_received(rank) for rank in program.ranks)
            assert isinstance(step, Exchange if received else Local), program.explain()
        assert layouts[-1] == program.target.without_size_one(case.mesh_shape)
        assert program.is_identity == (len(layouts) == 1)


# One rank for each pair, varying over pairs. Steps through the pairs that are coprime to the number of layouts reach
# every target.
def test_plan_of_one_rank_matches_plan_of_all(case: oracle.Case) -> None:
    size = math.prod(case.mesh_shape)
    pairs = enumerate(zip(case.pairs(), programs(case), strict=True))
    for number, ((source, target), whole) in islice(pairs, 0, None, 7):
        # The number of layouts may be a multiple of the size: add the number of the source.
        rank = (number + number // size) % size
        alone = plan(case.mesh_shape, case.shape, "float32", source, target, rank=rank)
        assert alone.ranks == (rank,)
        assert_matches_program_of_all(alone, whole)


def test_peak_bytes_include_intermediates(case: oracle.Case) -> None:
    for program in programs(case):
        for rank, peak in zip(program.ranks, program.peak_bytes, strict=True):
            source, target = (program.local_bytes(layout, rank) for layout in (program.source, program.target))
            if program.is_identity:
                assert peak == source
            elif len(program.steps) == 1 and program.steps[0].reduce is None:
                assert peak == source + target
            else:
                between = max(program.local_bytes(step.target, rank) for step in program.steps)
                assert source + between <= peak
                after = [program.local_bytes(step.target, rank) for step in program.steps]
                terms = [step.reduce.contributors if step.reduce else 1 for step in program.steps]
                assert peak <= source + sum(after) + sum(n * m for n, m in zip(after, terms, strict=True))


def test_program_json_round_trip(case: oracle.Case) -> None:
    for program in programs(case)[::7]:
        text = program.to_json()
        again = Program.from_json(text)
        assert again.to_json() == text
        assert (again.mesh, again.source, again.target, again.digest) == (
            program.mesh,
            program.source,
            program.target,
            program.digest,
        )
        assert again.explain() == program.explain()
        for a, b in zip(again.steps, program.steps, strict=True):
            assert type(a) is type(b) and (a.reduce, a.fill, type(a.fill)) == (b.reduce, b.fill, type(b.fill))
            for name in BOX_COLUMNS:
                left, right = getattr(a.boxes, name), getattr(b.boxes, name)
                assert (
                    left.dtype == right.dtype == np.int64 and left.shape == right.shape and np.array_equal(left, right)
                )


# Load


def loads(program: Program) -> dict[tuple, list[int]]:
    """For each set of equal holders, the elements that each of them sends to other ranks."""
    places = oracle.coordinates(program.mesh.shape)
    step = program.steps[0]
    assert isinstance(step, Exchange)
    replicas = [m for m in step.group if str(step.source.placements[m]) == "R"]
    served: dict[int, int] = defaultdict(int)
    for receiver, sender, n in zip(step.boxes.receiver, step.boxes.sender[:, 0], step.boxes.elements, strict=True):
        served[int(sender)] += int(n) if sender != receiver else 0
    groups: dict[tuple, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        groups[tuple(c for m, c in enumerate(place) if m not in replicas)].append(served[rank])
    return groups


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "source", "target"),
    [
        ((2, 4), (64,), "R S0", "S0 R"),
        ((2, 4), (64, 64), "R S0", "S0 S1"),
        ((2, 4), (64, 64), "R S0", "S1 R"),
        ((2, 4), (64, 64), "S0 R", "R S0"),
        ((4, 4), (64, 64), "R S0", "S0 R"),
        ((4, 4), (64, 64), "R S0", "S0 S1"),
        ((4, 4), (64, 64), "R S0", "R S1"),
        ((2, 2, 2), (64, 64), "R R S0", "S0 R R"),
        ((2, 2, 2), (64, 64), "R S0 R", "S0 R R"),
    ],
    ids=str,
)
def test_plan_balances_equal_holders(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str
) -> None:
    program = plan(mesh_shape, shape, "float32", source, target)
    box = int(program.steps[0].boxes.elements.max())
    for served in loads(program).values():
        boxes = sum(served) / box
        assert max(served) <= math.ceil(boxes / len(served)) * box, (program.explain(), served)


# Pairs on which torch receives many times the bound


@pytest.mark.parametrize("mesh_shape", [(4, 4), (2, 8)], ids=str)
@pytest.mark.parametrize(
    ("source", "target", "mebibytes"),
    [
        ("S0 S1", "S1 S0", 16),
        ("R S0", "S0 S0", 16),
        ("S0 S0", "S0 S0 @ 0:1,0", 16),
        ("S0 S0", "R S0", {(4, 4): 64, (2, 8): 32}),
        ("P S0", "S0 S0", {(4, 4): 64, (2, 8): 32}),
        ("P P", "R R", 480),
    ],
)
def test_plan_bytes_of_known_pairs(
    mesh_shape: tuple[int, ...], source: str, target: str, mebibytes: int | dict
) -> None:
    program = plan(mesh_shape, (8192, 8192), "float32", source, target)
    received = max(program.bytes_received) / 2**20
    expected = mebibytes if isinstance(mebibytes, int) else mebibytes[mesh_shape]
    assert received <= expected and received == pytest.approx(expected, rel=0.3), program.explain()
    assert program.exchanges == (2 if source == "P P" else 1)


# Arguments


def test_plan_argument_types() -> None:
    a = plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0")
    b = plan(Mesh((2, 2)), [8, 6], "float32", Layout.parse("S0 S1"), Layout.parse("S1 S0"))
    assert a.to_json() == b.to_json()
    for given in ("S0/2 S0", Layout((StridedShard(0, 2), Shard(0)))):
        assert plan((2, 2), (8,), "float32", given, "R R").source == Layout.parse("S0 S0 @ 0:1,0")


def test_plan_uses_positions_on_mesh_with_ranks() -> None:
    plain = plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0")
    other = plan(Mesh((2, 2), ranks=(7, 5, 3, 1)), (8, 6), "float32", "S0 S1", "S1 S0")
    assert np.array_equal(plain.steps[0].boxes.sender, other.steps[0].boxes.sender)
    assert plain.digest != other.digest


def test_digest_unique_per_request() -> None:
    requests: list[tuple] = [
        ((2, 2), (8, 6), "float32", "S0 S1", "S1 S0"),
        ((4,), (8, 6), "float32", "S0", "S1"),
        ((2, 2), (6, 8), "float32", "S0 S1", "S1 S0"),
        ((2, 2), (8, 6), "int32", "S0 S1", "S1 S0"),
        ((2, 2), (8, 6), "float32", "S1 S0", "S1 S0"),
        ((2, 2), (8, 6), "float32", "S0 S1", "S0 S0"),
        ((2, 2), (8, 6), "float32", "S0 S1", "S0 S0 @ 0:1,0"),
    ]
    digests = [plan(*request).digest for request in requests]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 2**63 for digest in digests)
    assert digests == [plan(*request).digest for request in requests]


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        (((2, 2), (8,), "float32", "S1 R", "R R"), ArgumentError, ["source", "mesh dim 0", "tensor dim 1", ": 0..0"]),
        (((2, 2), (8,), "float32", "R R", "R S3"), ArgumentError, ["target", "mesh dim 1", "tensor dim 3", ": 0..0"]),
        (((2, 2), (), "float32", "R R", "R S0"), ArgumentError, ["target", "mesh dim 1", "tensor dim 0", "no dims"]),
        (((2, 2), (8,), "float32", "R", "R R"), ArgumentError, ["source", "1 placements", "(2, 2)", "one each"]),
        (((2, 2), (8,), "float32", "R R", "R R R"), ArgumentError, ["target", "3 placements", "(2, 2)"]),
        (((2, 2), (8,), "float32", "S0 S0", "S0 S0 @ 0:0,0"), LayoutSyntaxError, ["repeats a mesh dim", "^"]),
        (((2, 2), 8, "float32", "S0 R", "R R"), ArgumentError, ["shape: 8; allowed: whole numbers"]),
        (("2,2", (8, 6), "float32", "S0 R", "R R"), ArgumentError, ["mesh: '2,2'; allowed: whole numbers"]),
        (((2, 2), (8, 6), "float32", None, "R R"), ArgumentError, ["source: None; allowed: a Layout or its text form"]),
        (((2, 2), (2**62, 8), "float32", "S0 R", "R R"), ArgumentError, ["has more than 2**58 elements"]),
        (((2, 2), (8,), "float32", "S0 Q", "R R"), LayoutSyntaxError, ["'Q'", "^"]),
        (((2, 2), (8,), "float99", "R R", "R R"), ArgumentError, ["dtype", "'float99'", "allowed", "bfloat16"]),
        (((2, 2), (8, -1), "float32", "R R", "R R"), ArgumentError, ["shape", "(8, -1)", "allowed: 0 and up"]),
        (((2, 0), (8,), "float32", "R R", "R R"), ArgumentError, ["mesh", "(2, 0)"]),
        (((2, 2), (8,), "float32", "R R", "R Pprod"), UnsupportedError, ["target", "mesh dim 1", "allowed: sum, avg"]),
        (((2, 2), (8,), "float32", "S0 R", "Pprod R"), UnsupportedError, ["target", "mesh dim 0", "product"]),
        (((2, 2), (8,), "float32", "P P", "P Pprod"), UnsupportedError, ["do not mix"]),
        (((2, 2), (8,), "int32", "Pavg R", "R R"), UnsupportedError, ["'avg'", "int32"]),
        (((2, 2), (8,), "complex64", "Pmax R", "R R"), UnsupportedError, ["'max'", "complex64", "sum and avg"]),
        (((2, 2), (8,), "float32", "Pmax Pmin", "R R"), UnsupportedError, ["['max', 'min']", "do not mix"]),
        (((2, 2), (8,), "float32", "S0/2 S0 @ 0:1,0", "R R"), LayoutSyntaxError, ["tensor dim 0", "strided", "^"]),
    ],
)  # fmt: skip
def test_plan_invalid_arguments(arguments: tuple, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        plan(*arguments)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("topology", [None, NVLINK_INFINIBAND], ids=["bytes", "nodes"])
@pytest.mark.parametrize(
    ("source", "target", "peers"),
    [
        ("S0 S0 S1", "R S0 R", 4096),
        ("S0 S0 S1", "S0 S1 S0", 256),
        ("P S0 S1", "S0 S0 S1", 64),
        ("R S0 R", "R S1 R", 256),
        ("S0 S0 R", "R R R", 4096),
        ("S0 R R", "P R R", 32),
        ("R S0 R", "R R P", 8192),
        ("P P R", "R R R", 4096),
    ],
)
def test_plan_of_one_rank_memory(source: str, target: str, peers: int, topology: Topology | None) -> None:
    tracemalloc.start()
    try:
        program = plan((16, 64, 64), (65537, 4097), "bfloat16", source, target, rank=12345, topology=topology)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6
    assert sum(len(step.boxes) for step in program.steps) <= peers


def test_plan_unchanged_partial_product() -> None:
    program = plan((2, 2), (8,), "float32", "Pprod R", "Pprod S0")
    assert program.bytes_received == [0] * 4 and program.exchanges == 0


def test_check_local_shape_message() -> None:
    program = plan((2, 2), (5, 6), "float32", "S0 S1", "R R")
    assert [program.local_shape(program.source, rank) for rank in range(4)] == [(3, 3), (3, 3), (2, 3), (2, 3)]
    check_local_shape(program, 2, (2, 3))
    with pytest.raises(ArgumentError) as error:
        check_local_shape(program, 2, (3, 3), "x")
    assert all(
        part in str(error.value) for part in ("x", "position 2", "(3, 3)", "S0 S1", "(5, 6)", "allows only (2, 3)")
    )


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e8m0fnu", "complex32"])
def test_plan_dtypes_without_reduction(dtype: str) -> None:
    assert plan((2, 2), (5, 7), dtype, "S0 S1", "S1 R").bytes_bound is not None
    for source, target in (("P R", "R R"), ("P S0", "S0 S0")):
        with pytest.raises(UnsupportedError, match=f"dtype: {dtype} can be moved but not reduced; allowed .*float32"):
            plan((2, 2), (5, 7), dtype, source, target)
    if dtype == "float8_e8m0fnu":
        with pytest.raises(UnsupportedError, match="cannot represent the identity of 'sum'"):
            plan((2, 2), (5, 7), dtype, "S0 R", "P R")


@pytest.mark.parametrize("shape", [(8, 4), (7, 3), (4096, 1024)], ids=str)
def test_plan_all_reduce_of_two_ranks_in_one_exchange(shape: tuple[int, ...]) -> None:
    program = plan((2,), shape, "float32", "P", "R")
    assert program.exchanges == 1
    assert program.bytes_received == [4 * math.prod(shape)] * 2
    assert plan((4,), shape, "float32", "P", "R").exchanges == 2, (
        "with more ranks a reduce-scatter first receives fewer bytes"
    )


@pytest.mark.parametrize(("target", "most"), [("S0//4096", 1), ("S0", 8), ("S0//8192", 8), ("R", 8)])
def test_plan_of_views_with_many_pieces_is_small(target: str, most: int) -> None:
    """A strided shard of a view may have thousands of runs; a box holds as many as are alike."""
    program = plan((4,), (1 << 20,), "uint8", "S0//4096", target, rank=1)
    assert sum(len(step.boxes) for step in program.steps) <= most
