"""Shared memory of real ranks: bounded by live tensors and the limit, and released with the process group."""

from __future__ import annotations

import gc
import os
import random
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.runtime.transports.shared_memory.allocator import allocators, block_size

pytestmark = pytest.mark.multi

MIB = 1 << 20
# How paths of shared memory begin. A clone, with its libraries, may lie in a folder of the same name.
OURS = ("/memfd:shardweave", "/dev/shm/shardweave")


def pool_pages() -> int:
    """Bytes that the system has allocated to the pools of this process."""
    descriptors = [segment._descriptor for allocator in list(allocators) for segment in allocator.segments]
    return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in descriptors)


def left() -> tuple[int, int, int]:
    """Descriptors and mappings of shardweave's shared memory in this process, including peers', and bytes mapped."""
    descriptors = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptors += os.readlink(f"/proc/self/fd/{number}").startswith(OURS)
    with open("/proc/self/maps") as file:
        lines = [line.split(maxsplit=5) for line in file]
    ranges = [fields[0].split("-") for fields in lines if fields[5:] and fields[5].startswith(OURS)]
    return descriptors, len(ranges), sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


def rows_of(mesh, rows: int, value: float) -> DTensor:
    whole = torch.full((rows, 1024), value)  # 4 KiB each
    whole[:, 0] = torch.arange(float(rows))
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def is_right(y: torch.Tensor, rows: int, value: float) -> bool:
    return y.shape[0] == rows and bool((y[:, 1:] == value).all()) and torch.equal(y[:, 0], torch.arange(float(rows)))


def gather_and_drop(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    shardweave.memory.set_pool_limit(96 * MIB)
    x = rows_of(mesh, 8192 * 4, 1.0)  # 128 MiB
    y = shardweave.redistribute(x, [Replicate()]).to_local()
    assert is_right(y, 8192 * 4, 1.0) and 128 * MIB <= pool_pages() <= 129 * MIB
    del y
    assert pool_pages() <= 1 * MIB, "more than the limit is a block that goes back"
    outcomes = shardweave.memory.pool_memory()
    assert outcomes.allocated == 0 and outcomes.reserved <= outcomes.limit == 96 * MIB
    y = shardweave.redistribute(rows_of(mesh, 8192, 2.0), [Replicate()]).to_local()
    del y
    assert 32 * MIB <= pool_pages() <= 33 * MIB, "within it the next call finds it"
    shardweave.memory.empty_cache()
    assert pool_pages() == shardweave.memory.pool_memory().ready == 0
    assert is_right(shardweave.redistribute(rows_of(mesh, 50, 3.0), [Replicate()]).to_local(), 50, 3.0)


def test_dropped_large_gather_returns_memory() -> None:
    run_ranks(gather_and_drop, 2, 2)


def random_lengths(rank: int, size: int, limit: int) -> tuple[int, int]:
    """The maximum of pages beyond live tensors, and the number of segments, of 240 steps."""
    shardweave.memory.set_pool_limit(limit)
    mesh, generator = init_device_mesh("cpu", (size,)), random.Random(11)
    most, kept, want = 0, None, (0, 0.0)
    for step in range(240):
        rows = generator.randrange(1, 512)  # 2 MiB at most
        y = shardweave.redistribute(rows_of(mesh, rows, float(step)), [Replicate()]).to_local()
        assert kept is None or is_right(kept, *want)
        if kept is not None:
            kept.fill_(-1)
        kept, want = y, (rows, float(step))
        del y
        most = max(most, pool_pages() - block_size(kept.nbytes))
        if step % 40 == 20:  # some come again
            for _ in range(4):
                shardweave.redistribute(rows_of(mesh, 100, 1.0), [Replicate()])
    assert is_right(kept, *want)
    return most, sum(len(allocator.segments) for allocator in allocators)


@pytest.mark.parametrize(
    ("kind", "size", "limit"),
    [
        ("anonymous", 2, 0),
        pytest.param("named", 5, MIB, marks=pytest.mark.long),
    ],
)
def test_random_lengths_stay_within_limit(kind: str, size: int, limit: int) -> None:
    environment = {"SHARDWEAVE_SEGMENTS": kind}
    for most, segments in run_ranks(random_lengths, size, size, limit, environment=environment):
        assert most <= limit and segments == 1


def group_anew(life: int, store: dist.Store, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(f"life {life}", store), rank=rank, world_size=size)
    # A rank must not exit, or end the group, while others still connect to it.
    store.set(f"life {life} joined/{rank}", "")
    store.wait([f"life {life} joined/{other}" for other in range(size)])


def many_lives(rank: int, size: int, transport: str, lives: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for life in range(lives):
        mesh = init_device_mesh("cpu", (size,))
        for _ in range(3):
            y = shardweave.redistribute(rows_of(mesh, 300, life + 1.0), [Replicate()], transport=transport).to_local()
        whole = DTensor.from_local(torch.ones(7, 3), mesh, [Partial()], run_check=False)
        assert bool((shardweave.redistribute(whole, [Shard(0)], transport=transport).to_local() == size).all())
        for _ in range(2):  # the last one is not awaited
            later = shardweave.redistribute(rows_of(mesh, 10, 1.0), [Replicate()], transport=transport, async_op=True)
        del later, whole
        assert is_right(y, 300, life + 1.0) and min(left()) > 0
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        if transport == "shared_memory":
            # Only the tensor's memory, rounded up, and the descriptors of its segment are left.
            assert pool_pages() <= block_size(y.nbytes) == shardweave.memory.pool_memory().reserved
            assert left()[0] <= 2 and is_right(y, 300, life + 1.0)
        del y, mesh
        assert left() == (0, 0, 0), life
        assert not [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]
        group_anew(life, store, rank, size)


@pytest.mark.parametrize(
    ("kind", "transport", "lives"),
    [
        ("anonymous", "shared_memory", 6),
        ("named", "shared_memory", 4),
        ("named", "symmetric_memory", 4),
        ("anonymous", "hierarchical", 3),
    ],
)
def test_destroyed_groups_release_memory(kind: str, transport: str, lives: int) -> None:
    environment = {"SHARDWEAVE_SEGMENTS": kind} | ({"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {})
    run_ranks(many_lives, 3, 3, transport, lives, environment=environment)


def held_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shardweave.redistribute(rows_of(mesh, 300, 1.0), [Replicate()])
    held = dist.group.WORLD, dist.distributed_c10d._get_default_store(), mesh
    dist.barrier()
    dist.destroy_process_group()
    assert left() == (0, 0, 0)
    group_anew(1, held[1], rank, 2)


def test_destroyed_group_is_released_while_referenced() -> None:
    run_ranks(held_group, 2)


def buffers_kept_ready(rank: int, size: int, limits: list[int | None]) -> list[int]:
    shardweave.memory.set_pool_limit(limits[rank])
    mesh = init_device_mesh("cpu", (size,))
    results = []
    for value in range(1, 6):
        x = rows_of(mesh, 64, float(value))
        y = shardweave.redistribute(x, [Replicate()]).to_local()
        assert is_right(y, 64, value)
        results.append(shardweave.memory.pool_memory().ready)
        dist.barrier()
    shardweave.redistribute(rows_of(mesh, 512, 1.0), [Replicate()])
    shardweave.redistribute(rows_of(mesh, 512, 1.0), [Replicate()])
    assert shardweave.memory.pool_memory().ready <= results[-1], "what is large is not kept"
    shardweave.memory.set_pool_limit(0)
    shardweave.redistribute(rows_of(mesh, 64, 1.0), [Replicate()])
    assert shardweave.memory.pool_memory().ready == 0 and pool_pages() <= block_size(y.nbytes)
    return results


@pytest.mark.parametrize(
    ("limits", "ready"),
    [
        ([None] * 4, [0] + [256 << 10] * 4),
        ([None, None, 300 << 10, None], [0] * 5),  # half of the least has no room
        ([MIB, None, 512 << 10], [0] + [256 << 10] * 4),
        ([0, 0], [0] * 5),
    ],
)
def test_receive_buffers_kept_after_repeated_call(limits: list[int | None], ready: list[int]) -> None:
    assert run_ranks(buffers_kept_ready, len(limits), len(limits), limits) == [ready] * len(limits)
