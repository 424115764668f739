"""What is kept between calls: results never share memory, whatever is kept or dropped in between."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from itertools import product

import pytest
import torch
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import DisagreementError

MIB = 1 << 20


def many_calls(rank: int, calls: int, limit: int | None) -> int:
    """A random sequence of repeated requests of several groups and sizes, each call with new values."""
    shardweave.memory.set_pool_limit(limit)
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
@pytest.mark.parametrize("limit", [None, 0])
def test_results_do_not_change_later(limit: int | None) -> None:
    assert run_ranks(many_calls, 4, 150, limit) == [150 + math.ceil(150 / 7)] * 4


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
