"""What is kept between calls: results never share memory, whatever is kept or dropped in between."""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import DisagreementError, TransportError
from shardweave.runtime.transports.shared_memory import receive_buffers
from shardweave.runtime.transports.shared_memory.allocator import Allocator, Piece
from shardweave.runtime.transports.shared_memory.receive_buffers import ReceiveBuffers
from shardweave.runtime.transports.shared_memory.segments import PrivateSegment, Segment

MIB = 1 << 20


@pytest.mark.plan
def test_receive_buffers_drop_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_buffers, "MOST_KEPT", 100)
    allocator = Allocator("shardweave-test", PrivateSegment, 2000)
    kept, buffer = ReceiveBuffers(allocator), torch.empty(0)
    for fingerprint in (1, 2, 3):
        kept.keep(fingerprint, buffer, fingerprint, [fingerprint], 30, 40)
    assert allocator.ready == 2 * 30
    assert kept.take(1) is None
    assert kept.take(3) == (buffer, 3, [3], 30, 40) and kept.take(3) is None
    assert allocator.ready == 2 * 30
    kept.let_go(30, 40)
    kept.keep(4, buffer, 4, [4], 30, 60)
    assert kept.take(2) == (buffer, 2, [2], 30, 40)
    kept.keep(2, buffer, 2, [2], 30, 40, counted=True)
    assert allocator.ready == 2 * 30
    kept.keep(5, buffer, 5, [5], 30, 1)  # the longest unused is now 4
    assert kept.take(4) is None and kept.take(2) is not None and kept.take(5) is not None
    kept.let_go(30, 40)
    kept.let_go(30, 1)
    kept.keep(6, buffer, 6, [6], 30, 101)
    assert kept.take(6) is None
    assert allocator.ready == 0 and kept.have_room(1000) and not kept.have_room(1001)


NEW_SEGMENTS = pytest.mark.parametrize(
    "new_segment",
    [lambda nbytes: Segment("shardweave-test", nbytes, False), PrivateSegment],
    ids=["shared", "private"],
)


class Pool:
    """An allocator whose pieces are taken, written in part, and given back."""

    def __init__(self, new_segment: Callable[[int], Any], limit: int) -> None:
        self.allocator = Allocator("shardweave-test", new_segment, limit)

    def take(self, nbytes: int, written: int) -> Piece:
        piece = self.allocator.take(self.allocator.idle(nbytes), nbytes)
        ctypes.memset(piece.address, 1, written)
        return piece

    def use(self, nbytes: int, written: int) -> int:
        """The address of a piece that was taken, of which the first bytes were written, and given back."""
        piece = self.take(nbytes, written)
        self.allocator.give_back(piece)
        return piece.address

    def resident(self) -> int:
        return sum(segment.resident(0, segment.nbytes) for segment in self.allocator.segments)


@pytest.mark.plan
@NEW_SEGMENTS
def test_pages_that_were_never_written_do_not_count(new_segment: Callable[[int], Any]) -> None:
    pool = Pool(new_segment, 8 * MIB)
    live = pool.take(100 * MIB, 100 * MIB)  # what is in use does not count
    address = pool.use(64 * MIB, 5 * MIB)
    assert pool.resident() == 105 * MIB and pool.allocator.free == 5 * MIB
    pool.allocator.give_back(live)
    assert pool.resident() == 5 * MIB, "a piece that exceeds the limit goes back"
    small = [pool.take(MIB // 4, MIB // 4) for _ in range(8)]
    for piece in small:
        pool.allocator.give_back(piece)
    assert pool.use(64 * MIB, 5 * MIB) == address, "it was kept"
    assert pool.resident() == pool.allocator.free_pages() == 7 * MIB
    assert pool.use(64 * MIB, 9 * MIB) == address
    assert pool.resident() == pool.allocator.free_pages() == 2 * MIB, "the others stay"
    pool.use(64 * MIB, 7 * MIB)
    assert 7 * MIB <= pool.resident() == pool.allocator.free_pages() <= 8 * MIB, "the least recently used went back"


@pytest.mark.plan
@NEW_SEGMENTS
def test_pieces_without_pages_go_if_nothing_may_be_kept(new_segment: Callable[[int], Any]) -> None:
    pool = Pool(new_segment, 8 * MIB)
    address = pool.use(64 * MIB, 0)
    pool.allocator.trim()
    assert pool.resident() == pool.allocator.free_pages() == 0
    assert pool.use(64 * MIB, 0) == address, "it was kept"
    pool.allocator.close()
    assert not pool.allocator.segments


@pytest.mark.plan
@NEW_SEGMENTS
def test_addresses_of_pieces_without_pages_are_used_again(new_segment: Callable[[int], Any]) -> None:
    mapped = []

    def limited(nbytes: int) -> Any:
        if sum(mapped) + nbytes > 256 * MIB:
            raise TransportError("no more addresses")
        mapped.append(nbytes)
        return new_segment(nbytes)

    pool = Pool(limited, 8 * MIB)
    for nbytes in (20, 28, 36, 52, 60, 72, 88, 104):  # of size classes that are not cut from each other
        pool.use(nbytes * MIB, MIB)
    assert len(mapped) > 1 and pool.resident() <= 8 * MIB


def many_calls(rank: int, most_kept: int | None, calls: int) -> int:
    """A random sequence of repeated requests of several groups and sizes, each call with new values."""
    if most_kept is not None:
        receive_buffers.MOST_KEPT = most_kept
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    coordinate = mesh.get_coordinate()
    row = mesh["b"]
    generator = random.Random(7)
    tokens = (Replicate(), Shard(0), Shard(1))
    pairs = [pair for pair in product(product(tokens, tokens), repeat=2) if pair[0] != pair[1]]
    requests = [(shape, *pair) for shape in ((6, 5), (129, 3)) for pair in generator.sample(pairs, 12)]
    requests += [((7, 3), (Partial(), Shard(0)), target) for target in product(tokens, tokens)]
    kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=5)
    done = 0

    def remember(y: DTensor, want: DTensor) -> None:
        nonlocal done
        kept.append((y.to_local(), want.to_local()))
        # Also results of earlier calls, to detect later calls that wrote into them.
        assert all(torch.equal(mine, theirs) for mine, theirs in kept), done
        done += 1

    for call in range(calls):
        shape, source, target = generator.choice(requests)
        whole = torch.arange(float(shape[0] * shape[1])).view(shape) + 1000 * call
        replicated = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        x = distribute_tensor(whole, mesh, [p if p.is_shard() else Replicate() for p in source], src_data_rank=None)
        if source[0].is_partial():
            parts = x.to_local() * (1.0 if coordinate[0] == 0 else 0.0)
            x = DTensor.from_local(parts, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())
        # Sources are read in place by their strides: the same request is bound again.
        if call % 5 == 0 and x.to_local().ndim == 2:
            strided = x.to_local().t().contiguous().t()
            x = DTensor.from_local(strided, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())
        remember(shardweave.redistribute(x, target), replicated.redistribute(mesh, target))
        if call % 7 == 0:
            mine = whole + coordinate[0]
            z = distribute_tensor(mine, row, [Shard(0)], src_data_rank=None)
            whole_row = DTensor.from_local(mine, row, [Replicate()], run_check=False)
            remember(shardweave.redistribute(z, [Shard(1)]), whole_row.redistribute(row, [Shard(1)]))
    return done


@pytest.mark.multi
@pytest.mark.parametrize(
    ("most_kept", "calls"),
    [(None, 150), (0, 150), *(pytest.param(kept, 300, marks=pytest.mark.long) for kept in (None, 2000, 0))],
)
def test_results_do_not_change_later(most_kept: int | None, calls: int) -> None:
    assert run_ranks(many_calls, 4, most_kept, calls) == [calls + math.ceil(calls / 7)] * 4


def disagree_later(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)], src_data_rank=None)
    outputs = [shardweave.redistribute(x, [Shard(1)]) for _ in range(5)]
    before = [y.to_local().clone() for y in outputs]
    try:
        shardweave.redistribute(x, [Replicate() if rank == 2 else Shard(1)])
    except DisagreementError:
        # Peers read this rank's request before it exits.
        time.sleep(0.5)
        assert all(torch.equal(y.to_local(), want) for y, want in zip(outputs, before, strict=True))
        raise
    raise AssertionError("no error was raised")


@pytest.mark.multi
def test_different_request_after_many_equal_ones_raises() -> None:
    ends = end_ranks(disagree_later, 4, environment={"SHARDWEAVE_TIMEOUT": "20"}, timeout=60)
    assert {end.error for end in ends} <= {"DisagreementError", "PeerError"}, ends
    assert ends[2].error == "DisagreementError" and "no tensor of yours was written" in ends[2].message
