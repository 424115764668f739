"""Fingerprints sent with messages, as on backends without tags; tested on gloo without using its tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_agreement import misfit, outcome, sharded
from test_disagreement import dispatcher, fits, tokens
from test_process_group_on_devices import pairs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import shardweave
from shardweave.runtime.transports import select
from shardweave.runtime.transports.process_group import ProcessGroupTransport

pytestmark = pytest.mark.multi


def by_words() -> ProcessGroupTransport:
    """The transport of this process, with tags disabled."""
    transport = select.current_transports()._process_group("cpu")
    transport.has_tags = False
    return transport


def random_requests_by_words(rank: int, size: int, number: int, reduction: str) -> bool:
    by_words()
    pairs(rank, "cpu", size, number, reduction)
    return True


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@pytest.mark.parametrize("size", [2, 4])
def test_random_requests(size: int, reduction: str) -> None:
    assert all(run_ranks(random_requests_by_words, size, size, 12, reduction))


def swapped(rank: int) -> list[Any]:
    """Two bound requests of equal size, which rank 0 makes in a different order."""
    transport = by_words()
    mesh = DeviceMesh("cpu", [0, 1, 2])
    requests = [sharded(mesh, 9, 6, torch.float32), sharded(mesh, 9, 6, torch.int32, add=1000)]
    for x, whole in requests:
        assert _gathered(x).equal(whole)
    if rank == 0:
        requests.reverse()
    x, whole = requests[0]
    # The host learns of it later: received data is overwritten, this rank's own part is not.
    got = _gathered(x)
    others = [r for r in range(3) if r != rank]
    rows = torch.cat([got[3 * r : 3 * r + 3] for r in others])
    mine = got[3 * rank : 3 * rank + 3].equal(whole[3 * rank : 3 * rank + 3])
    poisoned = [bool((got[3 * r : 3 * r + 3].view(torch.uint8) == 255).all()) for r in others]
    right = [got[3 * r : 3 * r + 3].equal(whole[3 * r : 3 * r + 3]) for r in others]
    assert rows.shape == (6, 6)
    error = outcome(lambda: _gathered(requests[1][0]) is None)
    return [mine, [p or (r and 0 not in (rank, o)) for p, r, o in zip(poisoned, right, others, strict=True)],
            any(poisoned), error, type(transport.error).__name__]  # fmt: skip


def _gathered(x: Any) -> torch.Tensor:
    return shardweave.redistribute(x, [Replicate()], transport="process_group").to_local()


def test_calls_in_different_order_poison_outputs_and_raise_next() -> None:
    for mine, others, some, error, of_transport in run_ranks(swapped, 3, environment={"SHARDWEAVE_TIMEOUT": "20"}):
        assert mine and all(others) and some
        assert error.startswith("DisagreementError: ") and of_transport == "DisagreementError", error


def refused(rank: int) -> list[str]:
    by_words()
    mesh = DeviceMesh("cpu", [0, 1])
    results = []
    for step in range(4):
        x, whole = sharded(mesh, 8, 6, torch.float32, add=100 * step)
        given = misfit(x) if rank == 0 and step == 1 else x

        def call(given: Any = given, whole: torch.Tensor = whole) -> bool:
            got = _gathered(given)
            return got.equal(whole) or bool((got[4 - 4 * rank : 8 - 4 * rank].view(torch.uint8) == 255).all())

        results.append(outcome(call))
        if step == 1 and rank == 0:
            # Peers wait for a message of this rank: they receive that of another call, and reject it.
            continue
    return results


def test_redistribute_refused_by_one_rank() -> None:
    messages = run_ranks(refused, 2, environment={"SHARDWEAVE_TIMEOUT": "5"})
    assert not any("wrong" in steps for steps in messages), messages
    assert messages[0][1].startswith("ArgumentError") and any(s.startswith("DisagreementError") for s in messages[1]), (
        messages
    )


def dispatched(rank: int) -> bool:
    by_words()
    for chunk_capacity in (None, 8):
        d = dispatcher("process_group", chunk_capacity=chunk_capacity)
        for _ in range(3):
            fits(d, rank)
        x, ids, weights = tokens(rank)
        x.requires_grad_()
        routed = d.dispatch(x, ids, weights)
        d.combine(routed.x, routed).sum().backward()
        assert x.grad is not None and bool((x.grad == 2).all())
    return True


def test_token_dispatch() -> None:
    assert all(run_ranks(dispatched, 4))


def dispatched_in_a_group(rank: int) -> bool:
    """Two groups of the same ranks, of which each dispatcher uses its own; a redistribution on another one between."""
    transport, batch = by_words(), dist.batch_isend_irecv
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    pair = [0, 2] if rank in (0, 2) else [1, 3]
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])][pair == [1, 3] :: 2]
    dispatchers = [
        dispatcher("process_group", group_or_mesh=group, chunk_capacity=c)
        for group, c in zip(groups, (None, 8), strict=True)
    ]
    dispatchers.append(dispatcher("process_group"))
    used: list[Any] = []

    def noting(operations: list[dist.P2POp]) -> list[dist.Work]:
        used.extend(operation.group for operation in operations)
        return batch(operations)

    dist.batch_isend_irecv = noting
    for d, group in zip(dispatchers, (*groups, dist.group.WORLD), strict=True):
        x, whole = sharded(mesh, 8, 6, torch.float32)
        assert _gathered(x).equal(whole)
        used.clear()
        fits(d, rank)
        assert used and all(one is group for one in used)
    return transport.error is None


def test_token_dispatch_uses_its_own_group() -> None:
    assert all(run_ranks(dispatched_in_a_group, 4))
