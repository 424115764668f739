"""Random redistributions, forward and backward: any mesh, shape, strides, dtype, layouts and orders; exact values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from test_simulate import oracle, poison  # noqa: F401
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from variants import crossed

import shardweave
from shardweave.errors import UnsupportedError
from shardweave.planner import Link, Topology

SLOW = Link(latency_us=50, gigabytes_per_s=1, one_sided=False, message_us=10)
TOPOLOGIES = [None, None, shardweave.NVLINK_NODE, replaced(shardweave.NVLINK_INFINIBAND, node_size=2, network=SLOW)]
DTYPES = {
    # Partial ops of a source and a target, for which the results of `values` are exact.
    "float64": ("P", "Pavg", "Pmax", "Pmin"),
    "float32": ("P", "Pavg", "Pmax", "Pmin"),
    "complex64": ("P", "Pavg"),
    "bfloat16": ("Pmax", "Pmin"),
    "float16": ("Pmax", "Pmin"),
    "int64": ("P", "Pmax", "Pmin"),
    "int32": ("P", "Pmax", "Pmin"),
    "uint8": (),
    "bool": (),
    "float8_e4m3fn": (),
}
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))


@dataclass(frozen=True)
class Case:
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: str
    target: str
    topology: Topology | None
    seed: int

    def whole(self) -> torch.Tensor:
        """The contributions of all ranks, float64 or complex128 [*mesh or 1, *shape]: multiples of all divisors."""
        shape = oracle.contribution_shape(self.mesh, self.shape, self.source)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(-3, 4, shape, generator=generator).double()
        if self.dtype == "bool":
            return (drawn > 0).double()
        if self.dtype in ("uint8", "float8_e4m3fn"):
            return drawn.abs()
        divided = {"P", "Pavg"} & {*self.target.split()} or "Pavg" in self.source
        exact = drawn * (math.prod(self.mesh) ** 2 if divided else 1)
        return torch.complex(exact, exact.flip(0)) if self.dtype == "complex64" else exact


def mesh_of(random: Random) -> tuple[int, ...]:
    """A mesh of 1 to 4 dims and at most 16 ranks, with dims of size 1 among them."""
    results: list[int] = []
    for _ in range(random.randint(1, 4)):
        results.append(random.randint(1, min(5, 16 // math.prod(results))))
    return tuple(results)


def layout(random: Random, mesh_dims: int, shards: list[str], ops: list[str], strided: bool) -> str:
    tokens = [random.choice(["R", *shards, *shards, *ops]) for _ in range(mesh_dims)]
    if strided:
        tokens = [f"{t}//{random.choice((2, 3))}" if t[0] == "S" and random.random() < 0.5 else t for t in tokens]
    text = " ".join(tokens)
    orders = {d: random.sample(order, len(order)) for d, order in oracle.read(text).orders.items()}
    kept = {int(t[1]) for t in tokens if "/" in t}
    odd = [f"{d}:{','.join(map(str, o))}" for d, o in sorted(orders.items()) if d not in kept and o != sorted(o)]
    return f"{text} @ {' '.join(odd)}" if odd else text


def drawn(seed: int, mesh: tuple[int, ...] | None = None) -> Case:
    """A random case; with `mesh`, one that DTensors can represent, with targets that torch placements can represent."""
    random = Random(seed)
    real = mesh is not None
    if mesh is None:
        mesh = mesh_of(random)
    shape = tuple(random.choice((0, 1, 2, 3, 5, 7, 8, 12, random.randint(0, 17))) for _ in range(random.randint(0, 3)))
    dtype = random.choice([*DTYPES, *["float64"] * 4])
    shards = [f"S{d}" for d in range(len(shape))]
    allowed = DTYPES[dtype]
    ops = [random.choice(allowed)] if allowed and random.random() < 0.5 else []
    if ops and ops[0] in ("P", "Pavg"):
        ops = [op for op in ("P", "Pavg") if op in allowed]
    strided = random.random() < 0.2
    source = layout(random, len(mesh), shards, ops, strided)
    target = layout(random, len(mesh), shards, ops if random.random() < 0.3 else [], strided and not real)
    return Case(mesh, shape, dtype, source, target, random.choice(TOPOLOGIES), seed)


def with_strides(x: torch.Tensor, random: Random) -> torch.Tensor:
    """The same values with other strides: permuted, with gaps, or with an offset."""
    if x.dim() == 0 or random.random() < 0.4:
        return x.clone()
    dims = random.sample(range(x.dim()), x.dim())
    back = sorted(range(x.dim()), key=lambda d: dims[d])
    gaps = [random.choice((1, 1, 2)) for _ in dims]
    room = torch.zeros([n * g + 1 for n, g in zip(x.permute(dims).shape, gaps, strict=True)], dtype=torch.uint8)
    room = room.repeat_interleave(x.element_size(), -1).contiguous().view(x.dtype)
    view = room[tuple(slice(1, 1 + n * g, g) for n, g in zip(x.permute(dims).shape, gaps, strict=True))].permute(back)
    view.copy_(x)
    return view


def replicated(text: str) -> str:
    """The layout of a gradient: replicated along mesh dims where values are partial."""
    head, at, tail = text.partition("@")
    return " ".join("R" if t.startswith("P") else t for t in head.split()) + (f" {at}{tail}" if at else "")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a.to(b.dtype) == b).all())


def check_in_process(case: Case) -> None:
    """Forward on every kind of transport, and the redistribution of a gradient, against slices of the whole."""
    random, dtype = Random(case.seed), getattr(torch, case.dtype)
    contributed = case.whole()
    one_sided = random.random() < 0.5
    options: dict[str, Any] = {"one_sided": one_sided}
    if not one_sided:
        options["backend"] = random.choice([None, "gloo", "nccl"])
        options["reduction"] = random.choice(["ordered", "fast"])
        options["node_size"] = random.choice([None, 2, 3])
    whole = oracle.whole_of(case.mesh, case.source, contributed)
    variants = [(case.source, case.target, contributed, whole)]
    back = case.whole().sum(tuple(range(len(case.mesh)))) if "P" in case.source else whole
    one = [1] * len(case.mesh)
    variants.append((replicated(case.target), replicated(case.source), back.reshape(*one, *case.shape), back))
    for source, target, given, value in variants:
        program = shardweave.plan(case.mesh, case.shape, dtype, source, target, topology=case.topology)
        locals_ = [with_strides(x.to(dtype), random) for x in oracle.local_shards(case.mesh, case.shape, source, given)]
        with under_a_mode(case.seed):
            outs = shardweave.simulate(program, locals_, **options)
        outs = [x.to(given.dtype) for x in outs]
        lead = value.reshape(*one, *case.shape)
        want = oracle.local_shards(case.mesh, case.shape, target, lead)
        for rank, (got, expected) in enumerate(zip(oracle.assembled(case.mesh, target, outs), want, strict=True)):
            assert same(got, expected), f"{case}\n{options}\n{program.explain()}\nrank {rank}: {got}, not {expected}"


@contextmanager
def under_a_mode(seed: int) -> Iterator[None]:
    """None, or one that may see no operator of a simulated program."""
    modes: tuple[Callable[[], Any], ...] = (
        nullcontext,
        partial(FlopCounterMode, display=False),
        MemTracker,
        lambda: create_selective_checkpoint_contexts(lambda *_, **__: pytest.fail("a policy was asked"))[0],
        NoOperator,
    )
    mode = modes[seed % len(modes)]()
    with mode:
        yield
    if isinstance(mode, FlopCounterMode):
        assert mode.get_total_flops() == 0


class NoOperator(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(function)


def placements_of(text: str) -> tuple[Any, ...]:
    ops = {"P": "sum", "Pavg": "avg", "Pmax": "max", "Pmin": "min"}
    results: list[Any] = []
    for fingerprint in oracle.read(text).tokens:
        if fingerprint.startswith("S"):
            dim, _, split = fingerprint[1:].partition("//")
            results.append(_StridedShard(int(dim), split_factor=int(split)) if split else Shard(int(dim)))
        else:
            results.append(Replicate() if fingerprint == "R" else Partial(ops[fingerprint]))
    return tuple(results)


def spec_of(case: Case, mesh: DeviceMesh, text: str, dtype: torch.dtype) -> DTensorSpec:
    size = torch.Size(case.shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), dtype)
    orders = tuple(ShardOrderEntry(d, tuple(o)) for d, o in sorted(oracle.read(text).orders.items()))
    return DTensorSpec(mesh, placements_of(text), meta, orders, use_strided_shard_as_shard_order=False)


def check_on_a_rank(case: Case, mesh: DeviceMesh, position: int, transport: str) -> None:
    """Forward, and for floats backward twice, of y ↦ Σ w y², with whole numbers in float64."""
    random, dtype = Random(f"{case.seed} {position}"), getattr(torch, case.dtype)
    contributed = case.whole()
    whole = oracle.whole_of(case.mesh, case.source, contributed)
    lead = whole.reshape(*[1] * len(case.mesh), *case.shape)
    shards = oracle.local_shards(case.mesh, case.shape, case.source, contributed)
    mine = with_strides(shards[position].to(dtype), random)
    source = spec_of(case, mesh, case.source, dtype)
    differentiable = dtype == torch.float64 and "P" not in case.target and "Pm" not in case.source
    x = DTensor(mine, source, requires_grad=differentiable)
    orders = dict(oracle.read(case.target).orders)
    y = shardweave.redistribute(
        x, placements_of(case.target), shard_order=orders, transport=transport, topology=case.topology
    )
    got = y._local_tensor.detach().to(contributed.dtype)
    if "P" not in case.target:
        want = oracle.local_shards(case.mesh, case.shape, case.target, lead)[position]
        assert same(got, want), f"{case}\nrank {position}: {got}, not {want}"
    if not differentiable:
        return
    # Gradients are computed on local tensors, because DTensor's ops lose shard orders.
    for times in (2.0, 4.0):
        seed = DTensor(times * y._local_tensor.detach(), y._spec, requires_grad=False)
        (gradient,) = torch.autograd.grad(y, x, seed, retain_graph=True)
        back = replicated(case.source).partition("@")[0].strip()
        want = oracle.local_shards(case.mesh, case.shape, back, times * lead)[position]
        assert gradient._spec.placements == placements_of(back)
        assert same(gradient._local_tensor, want), f"{case}\nrank {position}: gradient {gradient}, not {want}"
    cotangent = DTensor(y._local_tensor.detach().clone(), y._spec, requires_grad=True)
    (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    again = DTensor(gradient._local_tensor.detach(), gradient._spec, requires_grad=False)
    (twice,) = torch.autograd.grad(gradient, cotangent, again)
    want = oracle.local_shards(case.mesh, case.shape, replicated(case.target).partition("@")[0].strip(), lead)[position]
    assert same(twice._local_tensor, want), f"{case}\nrank {position}: second gradient {twice}, not {want}"


def ascending(random: Random, ranks: Iterable[int], shape: tuple[int, ...]) -> list[int]:
    """A random order of ranks that ascends along each mesh dim."""
    cells = list(product(*map(range, shape)))
    order: dict[tuple[int, ...], int] = {}
    for rank in sorted(ranks):
        free = [c for c in cells if c not in order]
        next_ones = [c for c in free if not any(o != c and all(map(int.__le__, o, c)) for o in free)]
        order[random.choice(next_ones)] = rank
    return [order[c] for c in cells]


def descending_dims(order: list[int], shape: tuple[int, ...]) -> set[int]:
    """The mesh dims with a line of ranks that torch's process group sorts."""
    table = torch.tensor(order).view(shape)
    return {m for m in range(len(shape)) if not table.equal(table.sort(m).values)}


REAL = {
    4: [(4,), (2, 2), (2, 1, 2), (1, 4), (3,)],
    5: [(5,), (1, 5), (2, 2), (3,)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (5,)],
}


def real_meshes(random: Random, ranks: int) -> list[tuple[tuple[int, ...], list[int], DeviceMesh]]:
    """Per shape, a mesh that ascends along every dim and one in any order; smaller meshes on any of the ranks."""
    meshes = []
    for shape in REAL[ranks]:
        chosen = random.sample(range(ranks), math.prod(shape))
        for order in (ascending(random, chosen, shape), chosen):
            meshes.append((shape, order, DeviceMesh("cpu", torch.tensor(order).view(shape))))
    return meshes


def many_on_ranks(rank: int, ranks: int, transport: str, first: int, count: int) -> int:
    """Shards along mesh dims whose ranks do not ascend are refused."""
    meshes = real_meshes(Random(first), ranks)
    for seed in range(first, first + count):
        shape, order, mesh = meshes[seed % len(meshes)]
        if rank not in order:
            continue
        case = drawn(seed, shape)
        cut = {m for text in (case.source, case.target) for m, t in enumerate(oracle.read(text).tokens) if t[0] == "S"}
        try:
            check_on_a_rank(case, mesh, order.index(rank), transport)
            redistribute_forward = True
        except UnsupportedError as error:
            assert "whose ranks do not ascend" in str(error)
            redistribute_forward = False
        assert redistribute_forward != bool(cut & descending_dims(order, shape)) or (
            redistribute_forward and case.source == case.target
        ), case
    return count


def check_through_torch(seed: int, shape: tuple[int, ...], order: list[int], mesh: DeviceMesh, transport: str) -> bool:
    """Redistribute DTensors of torch's distribute_tensor by torch, under install() and by name; compare full tensors.

    Returns whether it was torch's, mesh dims whose ranks do not ascend being cut.
    """
    random = Random(f"{seed} through torch")
    size = [random.choice((0, 1, 2, 3, 5, 8, random.randint(1, 17))) for _ in range(random.randint(1, 3))]
    choices = [Replicate(), *map(Shard, range(len(size)))] * 2
    source = [random.choice([*choices, Partial()]) for _ in shape]
    target = [p if p.is_partial() and random.random() < 0.3 else random.choice(choices) for p in source]
    odd = any({source[m], target[m]} - {Replicate(), Partial()} for m in descending_dims(order, shape))
    if odd:  # torch drops rows of uneven shards there
        size = [mesh.size() * random.randint(1, 2) for _ in size]
    drawn_values = torch.randint(-9, 10, size, generator=torch.Generator().manual_seed(seed))
    x = drawn_values.to(random.choice((torch.float64, torch.int64)))
    shards = [Replicate() if p.is_partial() else p for p in source]

    def given() -> DTensor:
        local = distribute_tensor(x, mesh, shards).to_local()
        return DTensor.from_local(local, mesh, source, run_check=False, shape=x.shape, stride=x.stride())

    def locals_of(y: DTensor) -> list[torch.Tensor]:
        return [y.to_local(), y.full_tensor()]

    what = f"{seed}: {order} as {shape}, {size} {x.dtype}, {source} → {target}"
    stock = locals_of(given().redistribute(placements=target))
    shardweave.stats().delegations.clear()
    with shardweave.installed():
        results = locals_of(given().redistribute(placements=target))
    delegated = sum(shardweave.stats().delegations.values())
    assert all(map(same, results, stock)), f"{what}: {results}, not {stock}"
    if odd:
        if source == target:
            assert same(shardweave.redistribute(given(), target, transport=transport).to_local(), stock[0]), what
            return False
        assert delegated, what
        with pytest.raises(UnsupportedError, match="whose ranks do not ascend"):
            shardweave.redistribute(given(), target, transport=transport)
        return True
    summed = math.prod(mesh.size(m) for m, p in enumerate(source) if p.is_partial())
    assert same(stock[1], x * summed), what
    by_name = locals_of(shardweave.redistribute(given(), target, transport=transport))
    assert all(map(same, by_name, stock)), f"{what}: {by_name}, not {stock}"
    assert not delegated, what
    return False


def many_through_torch(rank: int, ranks: int, transport: str, first: int, count: int) -> tuple[int, int]:
    """The number of redistributions, and of those left to torch."""
    meshes, left = real_meshes(Random(first), ranks), 0
    for seed in range(first, first + count):
        shape, order, mesh = meshes[seed % len(meshes)]
        if rank in order:
            left += check_through_torch(seed, shape, order, mesh, transport)
    return count, left


@pytest.mark.plan
@crossed("first", range(0, 500, 100), gate=lambda first: first < 200)
def test_random_redistributions_in_process(first: int) -> None:
    for seed in range(first, first + 100):
        check_in_process(drawn(seed))


@pytest.mark.long
@pytest.mark.plan
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_random_redistributions_in_process_at_length(part: int) -> None:
    for seed in range(1000 + 500 * part, 1500 + 500 * part):
        check_in_process(drawn(seed))


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_random_redistributions_of_real_ranks(transport: str) -> None:
    assert run_ranks(many_on_ranks, 4, 4, transport, 0, 40) == [40] * 4


@pytest.mark.multi
@crossed("transport", ["shared_memory", "process_group"], gate=lambda transport: transport == "process_group")
def test_random_redistributions_of_torch_dtensors(transport: str) -> None:
    for count, left in run_ranks(
        many_through_torch, 4, 4, transport, 0, 30, environment={"SHARDWEAVE_TRANSPORT": transport}
    ):
        assert 0 < left < count


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.parametrize(("ranks", "transport"), [(4, "process_group"), (8, "shared_memory")])
def test_random_redistributions_of_real_ranks_at_length(ranks: int, transport: str) -> None:
    assert run_ranks(many_on_ranks, ranks, ranks, transport, 1000, 150, timeout=500) == [150] * ranks


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.parametrize(("ranks", "transport"), [(4, "process_group"), (8, "shared_memory")])
def test_random_redistributions_of_torch_dtensors_at_length(ranks: int, transport: str) -> None:
    environment = {"SHARDWEAVE_TRANSPORT": transport}
    for count, left in run_ranks(
        many_through_torch, ranks, ranks, transport, 1000, 150, environment=environment, timeout=500
    ):
        assert 0 < left < count
