"""Ranks that synchronise on the device inside nodes and send across nodes: real processes on pretended nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import OWN_GPUS, end_ranks, run_ranks
from test_faults import die_or_wait, disagree
from test_hierarchical import NODES, PRETENDED, SOON, Counted, digests
from test_redistribute_meshes import batches, on_nodes, to_other_meshes
from test_symmetric import DIRECTIONS, made, many_rounds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardweave
from shardweave.errors import ArgumentError
from shardweave.runtime.transports.hierarchical import HierarchicalSymmetricMemoryTransport
from shardweave.runtime.transports.select import current_transports
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.multi
SYMMETRIC = {**PRETENDED, "SHARDWEAVE_TRANSPORT": "symmetric_memory"}


def directed(rank: int, direction: str, function: Any, *args: Any) -> Any:
    """Runs `function` with ranks of a node that push, or pull."""
    transport, _ = current_transports().choose((0, 1), torch.device("cpu"), "symmetric_memory")
    assert isinstance(transport, SymmetricMemoryTransport)
    transport.windows.direction = direction  # type: ignore[assignment]
    value = function(rank, *args)
    assert transport.error is None
    return value


@pytest.mark.parametrize(
    ("ranks", "count", "direction"),
    [
        (4, 24, "push"),
        *(pytest.param(*of, marks=pytest.mark.long) for of in ((4, 24, "pull"), (5, 12, "push"), (3, 16, "pull"))),
    ],
)
def test_random_redistributions_give_the_bits_of_shared_memory(ranks: int, count: int, direction: str) -> None:
    arguments = ranks, "symmetric_memory", 100 * ranks, count
    results = run_ranks(directed, ranks, direction, digests, *arguments, environment=SYMMETRIC)
    assert results == run_ranks(digests, ranks, ranks, "shared_memory", 100 * ranks, count)


@pytest.mark.parametrize("function, most", [(to_other_meshes, 100), (on_nodes, 72)], ids=["meshes", "topologies"])
@pytest.mark.long
def test_other_meshes_and_topologies(function: Callable, most: int) -> None:
    assert min(run_ranks(function, 4, "symmetric_memory", environment=SYMMETRIC)) == most


def test_batches() -> None:
    assert run_ranks(batches, 4, "symmetric_memory", environment=SYMMETRIC) == [270] * 4


def crossing(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(63.0).view(7, 9)
    options = (Replicate(), Shard(0), Shard(1), Partial())
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(rank, monkeypatch)
        for a, b, c in ((a, b, c) for a in options for b in options[:3] for c in options[:3]):
            x = made(whole, mesh, [Replicate() if a.is_partial() else a, b], {}, "cpu")
            x = type(x).from_local(x.to_local(), mesh, [a, b], run_check=False, shape=x.shape, stride=x.stride())
            y = shardweave.redistribute(x, [c, Shard(0)], topology=NODES)
            times = 2 if a.is_partial() else 1
            wanted = made(times * whole, mesh, [c, Shard(0)], {}, "cpu")
            assert y.to_local().equal(wanted.to_local()), (a, b, c)
        # Bytes inside a node bypass torch (`Counted` checks the ranks).
        assert counted.sent > 0
    text = shardweave.explain(made(whole, mesh, [Shard(0), Shard(1)], {}, "cpu"), [Shard(1), Shard(0)])
    assert (
        "on transport hierarchical symmetric_memory: requested" in text
        and "by push and send: ranks of a node write" in text
    )
    assert shardweave.stats().transports[0, 1, 2, 3] == "hierarchical symmetric_memory: requested"


def test_bytes_inside_node_bypass_torch() -> None:
    run_ranks(crossing, 4, environment=SYMMETRIC)


def prepared(rank: int, transport: str | None) -> None:
    """After `prepare` and `prepare_redistribute`, a first call binds nothing."""
    bound: list[str] = []

    class Bound(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            bound.extend([text for text in [record.getMessage()] if text.startswith("bound ")])

    logging.getLogger("shardweave").setLevel(logging.DEBUG)
    logging.getLogger("shardweave").addHandler(Bound())
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(63.0).view(7, 9)
    pairs = [
        (made(whole, mesh, [Shard(0), Shard(1)], {}, "cpu"), [Shard(1), Shard(0)]),
        (made(whole, mesh, [Replicate(), Shard(1)], {}, "cpu"), [Shard(0), Replicate()]),
    ]
    shardweave.prepare(mesh, 1 << 12, transport=transport)
    shardweave.prepare(mesh, 1 << 12, transport=transport)
    for x, placements in pairs:
        shardweave.prepare_redistribute(x, placements, transport=transport)
        shardweave.prepare_redistribute(x, placements, forward_dtype=torch.bfloat16, transport=transport)
    with pytest.raises(ArgumentError, match="forward_dtype: 'half'; allowed: a torch.dtype, or None"):
        shardweave.prepare_redistribute(*pairs[0], forward_dtype="half")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dtensor: Tensor; allowed: a DTensor"):
        shardweave.prepare_redistribute(whole, [Shard(0)])  # type: ignore[arg-type]
    before = list(bound)
    assert before
    for x, placements in pairs:
        for dtype in (None, torch.bfloat16):
            y = shardweave.redistribute(x, placements, forward_dtype=dtype, transport=transport)
            assert y.to_local().equal(made(whole.to(dtype), mesh, placements, {}, "cpu").to_local())
    assert bound == before


@pytest.mark.parametrize("transport", [None, "process_group", "symmetric_memory"])
@pytest.mark.parametrize("nodes", [{}, PRETENDED])
def test_first_call_after_prepare_binds_nothing(nodes: dict[str, str], transport: str | None) -> None:
    run_ranks(prepared, 4, transport, environment=nodes)


def begun_and_waited_for(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    inside = mesh["inside"]
    whole = torch.arange(63.0).view(7, 9)
    x, near = made(whole, mesh, [Shard(0), Shard(1)], {}, "cpu"), made(whole, inside, [Shard(0)], {}, "cpu")
    for turn in range(6):
        begun = [
            (shardweave.redistribute(x, [Shard(1), Replicate()], async_op=True), mesh, [Shard(1), Replicate()]),
            (shardweave.redistribute(near, [Shard(1)], async_op=True), inside, [Shard(1)]),
            (shardweave.redistribute(x, [Replicate(), Shard(0)], async_op=True), mesh, [Replicate(), Shard(0)]),
        ]
        for y, where, placements in begun if turn % 2 else reversed(begun):
            assert y.to_local().equal(made(whole, where, placements, {}, "cpu").to_local())


def test_async_result_waits_on_first_use() -> None:
    run_ranks(begun_and_waited_for, 4, environment=SYMMETRIC)


def test_dead_rank_is_named() -> None:
    environment = {**SYMMETRIC, "SHARDWEAVE_TIMEOUT": "3"}
    ends = end_ranks(die_or_wait, 4, "killed", "symmetric_memory", environment=environment, timeout=50)
    others = [end for r, end in enumerate(ends) if r != 1]
    assert {end.error for end in others} <= {"PeerError", "MeetingTimeoutError"}
    assert any("rank 1" in end.message for end in others)


def test_different_requests_raise() -> None:
    ends = end_ranks(disagree, 4, "symmetric_memory", environment={**SOON, **SYMMETRIC}, timeout=60)
    assert "DisagreementError" in {end.error for end in ends}, ends
    assert {end.error for end in ends} <= {"DisagreementError", "PeerError", "MeetingTimeoutError"}, ends


def on_cpus(direction: str) -> None:
    arguments = "cpu", direction, 10, HierarchicalSymmetricMemoryTransport
    run_ranks(many_rounds, 4, *arguments, environment=SYMMETRIC)


def on_gpus(direction: str) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; 4 are needed")
    arguments = "cuda", direction, 40, HierarchicalSymmetricMemoryTransport
    run_ranks(many_rounds, 4, *arguments, environment={**SYMMETRIC, **OWN_GPUS}, timeout=300)


@pytest.mark.parametrize("run", [on_cpus, pytest.param(on_gpus, marks=pytest.mark.multigpu)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_rounds_of_two_nodes(direction: str, run: Any) -> None:
    run(direction)
