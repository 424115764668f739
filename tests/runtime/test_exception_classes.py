"""Every exception class of `errors`, raised by a call of real ranks."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rank_processes import run_ranks
from test_agreement import lives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardweave
from shardweave import errors
from shardweave.errors import ShardweaveError
from shardweave.runtime.transports.shared_memory import allocator
from shardweave.runtime.transports.shared_memory.tensors import SharedPool

RANKS = 2


def redistribute(rows: int = 4, target: object = None) -> DTensor:
    mesh = DeviceMesh("cpu", list(range(RANKS)), _init_backend=False)
    x = DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], run_check=False)
    return shardweave.redistribute(x, [Replicate() if target is None else target])  # type: ignore[list-item]


def argument(rank: int) -> None:
    redistribute(target=Shard(2))


def layout_syntax(rank: int) -> None:
    shardweave.plan((RANKS,), (4, 3), "float32", "S0", "X")


def unsupported(rank: int) -> None:
    redistribute(target=Partial("product"))


def capacity(rank: int) -> None:
    dispatcher = shardweave.TokenDispatcher(
        num_experts=RANKS, top_k=1, hidden=4, max_tokens=4, dtype=torch.float32, capacity=2
    )
    dispatcher.dispatch(torch.ones(4, 4), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    dispatcher.check()


def transport(rank: int) -> None:
    """Memory that the system refuses, beyond a first segment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(allocator, "_SEGMENT_BYTES", 1 << 20):
        redistribute()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            redistribute(rows=200_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disagreement(rank: int) -> None:
    redistribute(rows=4 + rank)


def peer(rank: int) -> None:
    """Rank 1 fails within the call."""
    redistribute()
    if rank == 1:
        with mock.patch.object(SharedPool, "empty", side_effect=ValueError("no")), pytest.raises(ValueError):
            redistribute(rows=6)
    else:
        redistribute(rows=6)


def meeting_timeout(rank: int) -> None:
    """Rank 1 is late."""
    with mock.patch.dict(os.environ, SHARDWEAVE_TIMEOUT="1"):
        redistribute()
        time.sleep(2.5 * rank)
        redistribute()


RAISED_BY: dict[type[ShardweaveError], Callable[[int], None]] = {
    errors.ArgumentError: argument,
    errors.LayoutSyntaxError: layout_syntax,
    errors.UnsupportedError: unsupported,
    errors.CapacityError: capacity,
    errors.TransportError: transport,
    errors.DisagreementError: disagreement,
    errors.PeerError: peer,
    errors.MeetingTimeoutError: meeting_timeout,
}
"""The base class is never raised itself."""


def class_raised_by(rank: int, kind: type[ShardweaveError]) -> list[str]:
    try:
        RAISED_BY[kind](rank)
    except ShardweaveError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def classes_raised(rank: int) -> list[list[str]]:
    return lives(class_raised_by, [(kind,) for kind in RAISED_BY], rank)


@pytest.mark.plan
def test_table_has_every_class() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ShardweaveError)}
    assert classes - {ShardweaveError} == set(RAISED_BY)


@pytest.mark.multi
def test_every_class_is_raised_on_real_ranks() -> None:
    by_rank = run_ranks(classes_raised, RANKS, environment={"SHARDWEAVE_TIMEOUT": "40"})
    for i, kind in enumerate(RAISED_BY):
        raised = [results[i] for results in by_rank]
        assert [kind.__name__, True] in [[name, bool(text)] for name, text in raised], (kind, raised)
        if kind not in (errors.PeerError, errors.MeetingTimeoutError):  # those of the other rank
            assert {name for name, _ in raised} == {kind.__name__}, raised
