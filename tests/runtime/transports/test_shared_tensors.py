"""The shared pool in one process: allocated, kept and returned pages against simple models."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, TransportError
from shardweave.runtime.transports.shared_memory import allocator as allocators
from shardweave.runtime.transports.shared_memory import memory_pressure, pool_controls
from shardweave.runtime.transports.shared_memory.allocator import DEFAULT_LIMIT, block_size
from shardweave.runtime.transports.shared_memory.shared_pool import SharedPool

pytestmark = pytest.mark.plan

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(autouse=True)
def limit_as_before() -> Iterator[None]:
    yield
    pool_controls._limit = None


def made(limit: int | None = None, named: bool = False) -> SharedPool:
    pool_controls._limit = limit
    return SharedPool("shardweave-test", named)


def pages(pool: SharedPool) -> int:
    """Bytes that the system has allocated to the pool's segments."""
    return sum(os.fstat(segment._descriptor).st_blocks * 512 for segment in pool.segments)


def mapped(pool: SharedPool) -> int:
    return sum(segment.nbytes for segment in pool.segments)


def whole_pages(tensor: torch.Tensor) -> int:
    return max(PAGE, block_size(tensor.nbytes))


def check_apart(live: list[torch.Tensor]) -> None:
    """Checks that tensors do not overlap and are aligned for their size."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in live if t.nbytes)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(t.data_ptr() % (PAGE if t.nbytes > PAGE else 64) == 0 for t in live if t.nbytes)


LIMITS = [0, 100_000, MIB, None]


# Each limit with one kind of segments.
@crossed("limit, named", LIMITS, [False, True], ids=str, gate=lambda limit, named: LIMITS.index(limit) % 2 == named)
def test_random_sizes_do_not_overlap_and_stay_within_limit(limit: int | None, named: bool) -> None:
    pool, generator = made(limit, named), random.Random(f"{limit} {named}")
    live: list[tuple[torch.Tensor, int]] = []
    most_alive = 0
    for step in range(300):
        size = generator.choice([0, 1, 63, 100, 2048, 4096, 4097, 70_000, 300_000, MIB])
        size += generator.randrange(size // 2 + 1)
        tensor = pool.empty((size,), torch.uint8).fill_(step % 251)
        live.append((tensor, step % 251))
        while sum(t.nbytes for t, _ in live) > 3 * MIB or (live and generator.random() < 0.45):
            gone, _ = live.pop(generator.randrange(len(live)))
            gone.fill_(252)  # who still reads there sees it
            del gone
        alive = sum(whole_pages(t) for t, _ in live)
        del tensor
        most_alive = max(most_alive, alive)
        share = max(DEFAULT_LIMIT, alive) if limit is None else limit
        assert pages(pool) <= alive + share, step
        if step % 25 == 0:
            check_apart([t for t, _ in live])
            assert all(bool((t == value).all()) for t, value in live), step
            outputs = shardweave.memory.pool_memory()
            assert outputs.allocated <= alive and pages(pool) <= outputs.reserved
            assert all(pool.place(t)[0] < len(pool.segments) and pool.holds(t) for t, _ in live if t.nbytes)
    assert mapped(pool) <= 4 * (most_alive + (DEFAULT_LIMIT if limit is None else limit)) + 64 * MIB
    live.clear()
    pool.allocator.trim(0)
    assert pages(pool) == 0 == pool.allocator.allocated == pool.allocator.free


def test_set_pool_limit_applies_at_once() -> None:
    pool = made()
    pool.empty((4 * MIB,), torch.uint8).fill_(1)
    pool.empty((MIB,), torch.uint8).fill_(1)
    held = pool.empty((2 * MIB,), torch.uint8).fill_(3)
    shardweave.memory.set_pool_limit(2 * MIB)
    assert pages(pool) <= 4 * MIB and shardweave.memory.pool_memory().limit == 2 * MIB
    shardweave.memory.set_pool_limit(0)
    assert pages(pool) == 2 * MIB
    shardweave.memory.set_pool_limit(5 * MIB)
    assert shardweave.memory.pool_memory().limit == 5 * MIB == SharedPool("shardweave-test", False).allocator.limit
    pool.empty((5 * MIB,), torch.uint8).fill_(1)
    assert pages(pool) == 7 * MIB
    shardweave.memory.empty_cache()
    assert pages(pool) == 2 * MIB and bool((held == 3).all())


@pytest.mark.parametrize("nbytes", [-1, 1.5, "1", True])
def test_set_pool_limit_rejects_invalid_arguments(nbytes: object) -> None:
    with pytest.raises(ArgumentError, match="nbytes: .*; allowed: a whole number of bytes, or None"):
        shardweave.memory.set_pool_limit(nbytes)  # type: ignore[arg-type]


def test_blocks_freed_by_other_threads_and_gc() -> None:
    pool, errors = made(MIB), []
    generator = random.Random(5)
    handed: list[torch.Tensor] = []
    done = threading.Event()

    def let_go() -> None:
        while not done.is_set() or handed:
            with suppress(IndexError):
                tensor = handed.pop()
                value = int(tensor[0]) if len(tensor) else 0
                if not bool((tensor == value).all()):
                    errors.append(value)
                tensor.fill_(255)

    threads = [threading.Thread(target=let_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(800):
        tensor = pool.empty((generator.choice([10, 5000, 200_000]),), torch.uint8).fill_(step % 250)
        if step % 3:
            handed.append(tensor)
        else:
            cycle: list[object] = [tensor]
            cycle.append(cycle)  # goes when the collector finds it, within some later call
            del cycle
        del tensor
    done.set()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not errors
    assert pool.allocator.allocated == 0 and not pool.allocator.returned and pages(pool) <= MIB


def test_forked_child_does_not_free_parent_memory() -> None:
    pool = made(0)
    tensors = [pool.empty((MIB,), torch.uint8).fill_(i) for i in range(4)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tensors.clear()
            shardweave.memory.empty_cache()
            try:
                pool.empty((MIB,), torch.uint8)
            except TransportError:
                del pool
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pages(pool) == 4 * MIB and all(bool((t == i).all()) for i, t in enumerate(tensors))


def test_pages_are_returned_under_memory_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = made(64 * MIB)
    pool.empty((32 * MIB,), torch.uint8).fill_(1)
    monkeypatch.setattr(allocators, "is_short_of_memory", lambda nbytes: False)
    held = [pool.empty((48 * MIB,), torch.uint8)]
    assert pages(pool) == 32 * MIB
    monkeypatch.setattr(allocators, "is_short_of_memory", lambda nbytes: nbytes == 56 * MIB)
    held.append(pool.empty((56 * MIB,), torch.uint8))
    assert pages(pool) == 0


def test_out_of_shared_memory_retries_then_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = made(64 * MIB, named=True)
    pool.empty((MIB,), torch.uint8).fill_(1)
    reserve, room = os.posix_fallocate, 2 * MIB

    def limited(descriptor: int, offset: int, nbytes: int) -> None:
        if os.fstat(descriptor).st_blocks * 512 + nbytes > room:
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    held = pool.empty((2 * MIB,), torch.uint8)  # for which what is free goes back
    assert pages(pool) == 2 * MIB
    with pytest.raises(TransportError, match=r"1048576 bytes of shared memory in /dev/shm: .*No space left"):
        pool.empty((MIB,), torch.uint8)
    del held
    assert pool.empty((MIB,), torch.uint8).fill_(1).numel() == MIB


def test_memory_pressure_of_machine_and_container(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1600 kB\nMemFree: 3 kB\nMemAvailable: 500 kB\n")
    monkeypatch.setattr(memory_pressure, "_MEMINFO", str(meminfo))
    monkeypatch.setattr(memory_pressure, "_CGROUPS", str(tmp_path))
    short = memory_pressure.is_short_of_memory
    assert short(401 << 10) and not short(400 << 10)
    (tmp_path / "memory.max").write_text("max\n")
    assert not short(400 << 10)
    (tmp_path / "memory.max").write_text(f"{320 << 10}\n")
    (tmp_path / "memory.current").write_text(f"{300 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 10}\n")
    assert short(101 << 10) and not short(100 << 10)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")  # none
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(f"{1 << 61}\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 0\n")
    assert short(101 << 10) and not short(100 << 10)
    monkeypatch.setattr(memory_pressure, "_MEMINFO", str(tmp_path / "missing"))
    assert short(101 << 10) and not short(100 << 10)


@pytest.mark.long
def test_tensors_that_outlive_modules_at_exit() -> None:
    code = """
import sys, torch
from shardweave.runtime.transports.shared_memory.shared_pool import SharedPool
torch.kept = [SharedPool("shardweave-test", False).empty((3,), torch.float32) for _ in range(2)]
torch.modules = list(sys.modules.values())  # the interpreter sets the names in modules that are alive to None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
