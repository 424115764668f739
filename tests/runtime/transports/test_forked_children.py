"""Forked children of a rank: their calls are refused, the rank and its peers go on, and groups of their own work."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import current_process, get_context

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_agreement import environment_of, lives, misfit, outcome, sharded
from test_threads import TRANSPORTS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from variants import crossed

import shardweave
from shardweave.runtime.transports.shared_memory.segments import Segment


def in_child(calls: list[Callable[[], bool]]) -> list[str]:
    """The outcomes of calls in a forked child of this process."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            for call in calls:
                os.write(theirs, f"{outcome(call)}\n".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(mine) as lines:
        results = lines.read().splitlines()
    os.waitpid(child, 0)
    return results


def forked(rank: int, transport: str) -> list[str]:
    """A child of rank 1 uses a pending result, calls, is refused an argument, dispatches and starts a dispatch."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    x, whole = sharded(mesh, 8, 6, torch.float32)
    dispatcher = shardweave.TokenDispatcher(
        num_experts=3, top_k=1, hidden=4, max_tokens=2, dtype=torch.float32, transport=transport
    )
    tokens = torch.ones(2, 4), torch.tensor([[0], [2]]), torch.full((2, 1), 3.0)
    pending = shardweave.redistribute(x, [Replicate()], transport=transport, async_op=True)

    def right(columns: int = 6) -> bool:
        given, want = sharded(mesh, 8, columns, torch.float32)
        return shardweave.redistribute(given, [Replicate()], transport=transport).to_local().equal(want)

    def used() -> bool:
        return bool((pending.to_local() + 0).equal(whole))

    def dispatched() -> bool:
        routed = dispatcher.dispatch(*tokens)
        return bool((dispatcher.combine(routed.x, routed) == 3).all())

    def refused() -> bool:
        return shardweave.redistribute(misfit(x), [Replicate()], transport=transport).shape == x.shape

    def started() -> bool:
        return dispatcher.dispatch_start(*tokens).finish() is None

    results = in_child([used, right, lambda: right(5), refused, dispatched, started]) if rank == 1 else []
    return [*results, *(outcome(call) for call in (used, right, lambda: right(5), dispatched))]


def own_group(rank: int) -> list[str]:
    """A child of a process that has named segments makes a group, of itself, and leaves no names."""
    first = Segment("test", 4096, named=True)
    context = get_context("fork")
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may not have children
    child = context.Process(target=_named_segments)
    child.start()
    child.join(60)
    left = [name for name in os.listdir("/dev/shm") if f"-{child.pid}-" in name]
    return [str(child.exitcode), str(left), str(os.path.exists(first.key.path))]


def _named_segments() -> None:
    _kept.extend(Segment("test", 4096, named=True) for _ in range(2))


_kept: list[Segment] = []


def lives_of_forked(rank: int, transport: str) -> list[list[str]]:
    return lives(forked, [(transport,)], rank)


@pytest.mark.multi
@crossed("transport", TRANSPORTS, gate=lambda transport: transport in ("shared_memory", "process_group"))
def test_calls_of_forked_child_are_refused(transport: str) -> None:
    """No peer notices: the group works afterwards."""
    by_rank = run_ranks(lives_of_forked, 3, transport, environment=environment_of(transport))
    for rank, (results,) in enumerate(by_rank):
        assert results[-4:] == ["right"] * 4, results
        assert len(results) == 4 + 6 * (rank == 1)
    refused = by_rank[1][0][:6]
    assert all("TransportError: rank 1: process" in text and "forked child" in text for text in refused), refused


@pytest.mark.multi
def test_forked_child_leaves_no_named_segments() -> None:
    assert run_ranks(own_group, 1) == [["0", "[]", "True"]]
