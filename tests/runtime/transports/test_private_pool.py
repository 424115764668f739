"""Memory of one process for CPU tensors on process groups: reused, returned to the system, and not shared by a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave
from shardweave.runtime.transports.shared_memory import pool_controls, private_pool
from shardweave.runtime.transports.shared_memory.private_pool import pooled

LEAST = private_pool._LEAST_POOLED


@pytest.fixture(autouse=True)
def new_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(private_pool, "_pools", {})
    yield
    pool_controls._limit = None


def test_pages_return_to_the_system() -> None:
    shardweave.memory.set_pool_limit(0)
    before = shardweave.memory.pool_memory()
    x = pooled((1 << 20,), torch.uint8).fill_(7)
    address = x.data_ptr()
    assert shardweave.memory.pool_memory().allocated - before.allocated == 1 << 20
    del x
    assert shardweave.memory.pool_memory().reserved == before.reserved
    again = pooled((1 << 20,), torch.uint8)
    assert again.data_ptr() == address and not again.any()  # fresh pages are zeros


def test_forked_process_has_memory_of_its_own() -> None:
    x = pooled((LEAST,), torch.uint8).fill_(1)
    child = os.fork()
    if not child:
        # By numpy: torch's threads are not in the child.
        x.numpy()[:] = 2
        mine = pooled((LEAST,), torch.uint8)
        mine.numpy()[:] = 3
        os._exit(0 if mine.data_ptr() != x.data_ptr() and (x.numpy() == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x == 1).all()


def repeated_outputs(rank: int) -> tuple[int, int]:
    """The number of addresses of the outputs of calls that follow each other, and the bytes that are kept."""
    x = distribute_tensor(torch.arange(1 << 16).view(256, 256), init_device_mesh("cpu", (2,)), [Shard(0)])
    addresses = set()
    for _ in range(5):
        y = shardweave.redistribute(x, [Replicate()], transport="process_group").to_local()
        assert torch.equal(y, torch.arange(1 << 16).view(256, 256))
        addresses.add(y.data_ptr())
        del y
    return len(addresses), shardweave.memory.pool_memory().free


@pytest.mark.multi
def test_outputs_on_process_groups_are_pooled() -> None:
    for addresses, kept in run_ranks(repeated_outputs, 2):
        assert addresses == 1 and kept >= 1 << 19
