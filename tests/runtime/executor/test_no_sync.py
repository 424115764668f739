"""No call synchronises the host with the device: programs of every kind under a guard that raises on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_processes import run_ranks
from sync_guard import SyncGuard, SyncRefused
from test_simulate import integers, oracle
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from variants import crossed

import shardweave
from shardweave.errors import TransportError
from shardweave.planner import Mesh
from shardweave.runtime.dtensor import drop_in
from shardweave.runtime.executor import copies
from shardweave.runtime.executor.call import Call

signal = import_module("shardweave.kernels.signal")  # the package has the function by this name
window_use = import_module("shardweave.kernels.window_use")

# The guard


FORBIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.view(-1)[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: memoryview(__import__("numpy").asarray(x)),
    "cpu": lambda x: x.cpu(),
    "to device": lambda x: x.to("cpu"),
    "to device by name": lambda x: x.to(device=torch.device("cpu")),
    "to another's device": lambda x: x.to(torch.empty(0)),
    "to device and dtype": lambda x: x.to("cpu", torch.float64),
    "bool": lambda x: bool((x == x).all()),
    "if": lambda x: 1 if x.sum() else 0,
    "int": lambda x: int(x.view(-1)[0]),
    "float": lambda x: float(x.view(-1)[0]),
    "index": lambda x: [0, 0][x.view(-1)[:1].long().mul(0).squeeze()],
    "contains": lambda x: 3 in x,
    "repr": lambda x: repr(x),
    "format": lambda x: f"{x.sum():.1f}",
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x),
    "index by mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.clone().view(-1).__setitem__(x.view(-1) == x.view(-1), x.view(-1)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.ones(3, dtype=torch.int64)),
    "repeat_interleave by a tensor": lambda x: x.view(-1).repeat_interleave(torch.ones(x.numel(), dtype=torch.int64)),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: x.allclose(x),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.view(-1).long().abs().bincount(),
    "tensor of tensors": lambda x: torch.tensor([x.view(-1)[0], x.view(-1)[1]]),
    "tensor of numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "tensor of a number": lambda x: torch.tensor(1.0, device=x.device),
    "as_tensor of numbers": lambda x: torch.as_tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "asarray of numbers": lambda x: torch.asarray([1.0], device=x.device),
    "index by a list": lambda x: x[[0, 1]],
}
ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "copies": lambda x: torch.empty_like(x).copy_(x),
    "casts": lambda x: x.to(torch.bfloat16).float(),
    "views": lambda x: x.as_strided((2,), (1,), x.storage_offset()).view(torch.uint8)[1:],
    "arithmetic": lambda x: torch.add(x, x, out=torch.empty_like(x)).div_(3),
    "shapes": lambda x: (x.shape, x.stride(), x.data_ptr(), x.numel(), len(x), x.dtype, x.device, x.is_contiguous()),
    "one value by mask": lambda x: x.clone().__setitem__(x > 0, 0.0),
}


@pytest.mark.plan
@pytest.mark.parametrize("name", FORBIDDEN)
def test_guard_refuses_sync(name: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    FORBIDDEN[name](x)  # is valid but for the guard
    with pytest.raises(SyncRefused), SyncGuard():
        FORBIDDEN[name](x)


@pytest.mark.plan
@pytest.mark.parametrize("name", ALLOWED)
def test_guard_allows(name: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    with SyncGuard():
        ALLOWED[name](x)


@pytest.mark.plan
def test_guard_raises_again_after_caught_error() -> None:
    with pytest.raises(SyncRefused), SyncGuard():
        try:
            torch.ones(1).item()
        except Exception:
            pass


@pytest.mark.plan
@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_guard_sees_operations_of_program(name: str, one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = copies.Copies.__call__

    def planted(self: copies.Copies, sources: Any, targets: Any, key: Any = None) -> None:
        FORBIDDEN[name](torch.arange(6.0).view(2, 3))
        call(self, sources, targets, key)

    monkeypatch.setattr(copies.Copies, "__call__", planted)
    program = shardweave.plan((2, 2), (4, 6), "float32", "S0 S1", "S1 S0")
    with pytest.raises(SyncRefused), SyncGuard():
        shardweave.simulate(program, [torch.zeros(2, 3)] * 4, one_sided=one_sided)


# Simulated programs: each call binds again, so that planning, binding and running are all under the guard


KINDS: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((2, 2), "S0 S1", "S1 S0"),  # one exchange among all
    ((2, 2), "S0 R", "S1 R"),  # all-to-all
    ((2, 2), "S0 S0", "R R"),  # all-gather
    ((2, 2), "S1 S0", "S0 R"),
    ((2, 2), "S0 S0", "S0 S0 @ 0:1,0"),  # another order
    ((2, 2), "S0/2 R", "S1 S0"),  # strided index sets
    ((2, 2), "R R", "S0 S1"),  # local
    ((2, 2), "P S0", "S0 S0"),  # reduce-scatter
    ((2, 2), "P P", "R R"),  # all-reduce: exchange, reduce, gather
    ((2, 2), "Pavg S1", "R S1"),
    ((2, 2), "Pmax R", "R S0"),
    ((2, 2), "R S0", "P S0"),  # to partial
    ((2, 2), "S0 R", "Pavg S1"),
    ((2, 2), "S0 S1", "S0 S1"),  # nothing to do
    ((2, 4), "S0 P", "R S1"),
    ((3, 2), "P S1", "S1 R"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
TRANSPORTS: tuple[dict[str, Any], ...] = (
    {},
    {"one_sided": False},
    {"one_sided": False, "backend": "gloo"},
    {"one_sided": False, "backend": "nccl"},
    {"one_sided": False, "backend": "gloo", "reduction": "fast"},
    {"one_sided": False, "backend": "nccl", "reduction": "fast"},
    {"one_sided": False, "backend": "gloo", "node_size": 2},
    {"one_sided": False, "node_size": 3},
)
WRITES = ("copy_", "fill_", "add", "div", "maximum", "bitwise_or")


def carries(dtype: torch.dtype, *layouts: str) -> bool:
    """Whether the dtype supports the reductions of the layouts."""
    if any("avg" in layout for layout in layouts):
        return dtype.is_floating_point
    return not (dtype.is_complex and any(op in layout for layout in layouts for op in ("max", "min")))


@pytest.mark.plan
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda w: " ".join(map(str, w.values())) or "one-sided")
@crossed("shape", [(8, 6), (7, 5), (1, 3), (0, 4)], ids=str, gate=lambda shape: shape in ((7, 5), (0, 4)))
def test_simulated_programs_do_not_sync(shape: tuple[int, ...], transport: dict[str, Any]) -> None:
    ran = 0
    for number, (mesh, source, target) in enumerate(KINDS):
        for dtype in DTYPES if shape == (7, 5) else DTYPES[number % len(DTYPES) :][:1]:
            if not carries(dtype, source, target):
                continue
            contributed = integers(oracle.contribution_shape(mesh, shape, source), source + target, 0, 1, 1)
            locals_ = [x.to(dtype) for x in oracle.local_shards(mesh, shape, source, contributed)]
            expected = shardweave.simulate(shardweave.plan(mesh, shape, dtype, source, target), locals_, **transport)
            with SyncGuard() as guard:
                program = shardweave.plan(mesh, shape, dtype, source, target)
                results = shardweave.simulate(program, locals_, **transport)
            assert all(raw(a).equal(raw(b)) for a, b in zip(results, expected, strict=True))
            moves = not program.is_identity and math.prod(shape) > 0
            assert not moves or any(guard.seen[name] for name in WRITES), guard.seen
            ran += moves
    assert ran > 10 or 0 in shape


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


NO_PROCESS_GROUPS = pytest.mark.parametrize(
    "transport",
    [{}, {"one_sided": False}, {"one_sided": False, "node_size": 2}],
    ids=["one-sided", "two-sided", "both"],
)


@pytest.mark.plan
@NO_PROCESS_GROUPS
def test_scalars_strides_and_lazy_views_do_not_sync(transport: dict[str, Any]) -> None:
    scalar = shardweave.plan((2, 2), (), "float32", "P Pavg", "R R")
    columns = shardweave.plan((2,), (6, 4), "float32", "S0", "S1")
    lazy = shardweave.plan((2,), (6, 4), "complex64", "P", "S1")
    scalars, given = [torch.tensor(1.0)] * 4, [torch.ones(4, 3).mT] * 2
    views = [torch.ones(6, 4, dtype=torch.complex64).conj()] * 2
    with SyncGuard() as guard:
        shardweave.simulate(scalar, scalars, **transport)
        shardweave.simulate(columns, given, **transport)
        shardweave.simulate(lazy, views, **transport)
    assert guard.seen["copy_"] and guard.seen["add"]


@pytest.mark.plan
@NO_PROCESS_GROUPS
def test_batches_and_cross_mesh_programs_do_not_sync(transport: dict[str, Any]) -> None:
    here, there = Mesh((2, 2)), Mesh((3,), ranks=(1, 4, 6))
    x = integers((7, 5), "x").float()
    crossing = shardweave.plan(here, (7, 5), "float32", "S0 S1", "S0", target_mesh=there)
    cut = oracle.local_shards((2, 2), (7, 5), "S0 S1", x.view(1, 1, 7, 5))
    batch = shardweave.plan_batch(
        [
            (here, (7, 5), "float32", "S0 S1", "S0", there),
            (here, (7, 5), "float32", "S0 S1", "R S0"),
            (here, (7, 5), "bfloat16", "P S1", "S0 S1"),
        ]
    )
    terms = oracle.local_shards((2, 2), (7, 5), "P S1", x.expand(2, 1, 7, 5))
    outside = [torch.empty(0, 0)] * 2
    given = [*cut, *outside]
    with SyncGuard() as guard:
        (*_, last) = shardweave.simulate(crossing, given, **transport)
        outs = shardweave.simulate(batch, [given, cut, [t.bfloat16() for t in terms]], **transport)
    assert guard.seen["copy_"] and guard.seen["add"]
    assert last.equal(x[6:]) and outs[0][-1].equal(x[6:]) and outs[1][0].equal(x[:4])


# Real processes


ASKED: tuple[tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]], ...] = (
    ((Shard(0), Shard(1)), (Shard(1), Shard(0)), {}),
    ((Shard(0), Replicate()), (Shard(1), Replicate()), {}),
    ((Shard(0), Shard(0)), (Replicate(), Replicate()), {}),
    ((Replicate(), Replicate()), (Shard(0), Shard(1)), {}),
    ((Shard(0), Shard(0)), (Shard(0), Shard(0)), {"shard_order": {0: (1, 0)}}),
    ((_StridedShard(0, split_factor=2), Replicate()), (Shard(1), Shard(0)), {}),
    ((Partial(), Shard(0)), (Shard(0), Shard(0)), {}),
    ((Partial("avg"), Partial()), (Replicate(), Replicate()), {}),
    ((Partial("max"), Replicate()), (Replicate(), Shard(0)), {}),
    ((Shard(0), Replicate()), (Partial("avg"), Shard(1)), {}),
    ((Replicate(), Shard(0)), (Partial(), Shard(0)), {}),
    ((Partial(), Shard(1)), (Shard(0), Shard(1)), {"forward_dtype": torch.bfloat16}),
    ((Shard(0), Shard(1)), (Replicate(), Shard(1)), {"async_op": True}),
    ((Partial(), Replicate()), (Shard(0), Replicate()), {"reduction": "fast"}),
    ((Partial(), Replicate()), (Replicate(), Replicate()), {"reduction": "fast"}),
)


def dtensor(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Any, ...]) -> DTensor:
    """Ones, whose local shapes are torch's own."""
    kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
    local = torch.ones(shape)
    for size, at, p in zip(mesh.shape, mesh.get_coordinate() or (), kept, strict=True):
        if isinstance(p, Shard | _StridedShard):
            parts = [t.chunk(size, p.dim) for t in local.chunk(getattr(p, "split_factor", 1), p.dim)]
            empty = local.narrow(p.dim, 0, 0)
            local = torch.cat([t[at] if at < len(t) else empty for t in parts], p.dim)
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape),
                              stride=(shape[1], 1))  # fmt: skip


@contextmanager
def control_words_of(guard: SyncGuard) -> Iterator[None]:
    """Signals between CPUs read and write control words, which a kernel does on a GPU. Only these, and the poisoning of
    outputs, are not guarded in the symmetric-memory transport."""
    references = [(signal, "signal_cpu"), (window_use, "wait_cpu"), (window_use, "end_use_cpu")]
    with ExitStack() as patches:
        for module, name in references:
            patches.enter_context(patch.object(module, name, partial(_lifted, guard, getattr(module, name))))
        yield


def _lifted(guard: SyncGuard, function: Callable[..., Any], *args: Any) -> Any:
    with guard.lifted():
        return function(*args)


def under_the_guard(rank: int, transport: str, name: str) -> dict[str, int]:
    mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    seen: dict[str, int] = {}
    for known in (mesh, other):
        # Reads the mesh's ranks, which torch keeps in a CPU tensor.
        shardweave.redistribute_cost(known, (), "float32", *[[Replicate()] * known.ndim] * 2)
    for shape in ((8, 6), (7, 5)):
        given = [(dtensor(mesh, shape, source), target, options) for source, target, options in ASKED]
        batch = [dtensor(mesh, shape, source) for source, *_ in ASKED[:7]]
        targets = [target for _, target, _ in ASKED[:7]]

        def every_kind(given: Any = given, batch: Any = batch, targets: Any = targets) -> None:
            for x, target, options in given:
                y = shardweave.redistribute(x, target, transport=transport, **options)
                if options.get("async_op"):
                    y._local_tensor.wait()
            shardweave.redistribute_batch(batch, targets, transport=transport)
            shardweave.redistribute(given[0][0], [Shard(0)], device_mesh=other, transport=transport)

        if transport == "symmetric_memory":
            every_kind()  # windows are made when programs are bound, and what ranks share is written then
        with SyncGuard() as guard, control_words_of(guard):
            for _ in range(3):  # cold, and twice warm
                every_kind()
        for operator, number in guard.seen.items():
            seen[operator] = seen.get(operator, 0) + number
    # With nodes, programs of a single rank use another transport.
    assert name in shardweave.stats().calls and shardweave.stats().calls.keys() <= {transport, name}
    return seen


REAL_TRANSPORTS = [
    pytest.param("shared_memory", "shared_memory", 4, marks=pytest.mark.long, id="shared_memory"),
    pytest.param("process_group", "process_group", 4, id="process_group"),
    pytest.param("symmetric_memory", "symmetric_memory", 4, marks=pytest.mark.long, id="symmetric_memory"),
    pytest.param("hierarchical", "hierarchical", 2, marks=pytest.mark.long, id="hierarchical"),
    pytest.param("symmetric_memory", "hierarchical symmetric_memory", 2, id="hierarchical symmetric_memory"),
]


@pytest.mark.multi
@pytest.mark.parametrize(("transport", "name", "node_size"), REAL_TRANSPORTS)
def test_real_ranks_do_not_sync(transport: str, name: str, node_size: int) -> None:
    environment = {} if node_size == 4 else {"SHARDWEAVE_NODE_SIZE": str(node_size)}
    for seen in run_ranks(under_the_guard, 4, transport, name, environment=environment):
        # Two shapes, three calls, and more than one copy per request.
        assert seen["copy_"] > 100 and seen["add"] > 10, seen


def dropped_in_under_the_guard(rank: int) -> int:
    """Puts the guard around the execution only, because calls under dispatch modes are left to torch."""
    mesh, carried_out, seen = init_device_mesh("cpu", (2, 2)), drop_in.run_redistribution, []
    call = Call.__call__

    def guarded(*args: Any, **options: Any) -> torch.Tensor:
        with SyncGuard() as guard:
            results = carried_out(*args, **options)
        seen.append(guard.seen["copy_"])
        return results

    def repeated(self: Call, *args: Any) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            return call(self, *args)  # under the guard already
        with SyncGuard() as guard:
            results = call(self, *args)
        seen.append(guard.seen["copy_"])
        return results

    shardweave.redistribute_cost(mesh, (), "float32", *[[Replicate()] * 2] * 2)
    drop_in.run_redistribution = guarded
    Call.__call__ = repeated  # type: ignore[method-assign]
    with shardweave.installed():
        x = dtensor(mesh, (7, 5), (Shard(0), Shard(1))).requires_grad_()
        for _ in range(2):
            x.redistribute(placements=[Shard(1), Shard(0)]).to_local().sum().backward()
        x.redistribute(placements=[Replicate(), Shard(1)], async_op=True).to_local()
        (x + x.redistribute(placements=[Shard(1), Shard(0)])).to_local()  # implicit
    assert not shardweave.stats().delegations
    return len([number for number in seen if number])


@pytest.mark.multi
def test_redistribute_local_tensor_does_not_sync() -> None:
    assert min(run_ranks(dropped_in_under_the_guard, 4)) >= 6


def caught(rank: int, transport: str) -> str:
    """A program that reads a tensor value raises under the guard, on real ranks as well."""
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    shardweave.redistribute(x, [Shard(1)], transport=transport)

    def planted(call: Callable[..., None]) -> Callable[..., None]:
        def called(self: copies.Copies, sources: Any, *rest: Any, **named: Any) -> None:
            if rank == 0:
                sources[0].sum().item()
            call(self, sources, *rest, **named)

        return called

    try:
        with ExitStack() as patches:
            for name in ("__call__", "in_window"):
                patches.enter_context(patch.object(copies.Copies, name, planted(getattr(copies.Copies, name))))
            guard = patches.enter_context(SyncGuard())
            patches.enter_context(control_words_of(guard))
            shardweave.redistribute(x, [Shard(1)], transport=transport)
    except (SyncRefused, TransportError) as error:
        return type(error).__name__
    return "passed"


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "symmetric_memory"])
def test_guard_sees_operations_of_real_ranks(transport: str) -> None:
    assert run_ranks(caught, 2, transport) == ["SyncRefused", "PeerError"]
