"""User controls of the shared-memory pool: its limit, its usage, and the release of free memory."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import ArgumentError
from ...process_group_cache import forget_dead_groups
from .allocator import DEFAULT_LIMIT, allocators

_limit: int | None = None  # by `set_pool_limit`


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of shared memory of this process on the `shared_memory` and `hierarchical` transports, and of memory of its
    own for CPU tensors on `process_group`.

    Attributes:
        allocated: in use by tensors, in whole pages, rounded up by at most an eighth.
        ready: in use by receive buffers that are kept between calls.
        free: pages that are not in use, and kept for the next calls. Pages that were never written do not count.
        limit: the current limit of `ready` and `free` together.
    """

    allocated: int
    ready: int
    free: int
    limit: int

    @property
    def reserved(self) -> int:
        """The sum of `allocated`, `ready` and `free`."""
        return self.allocated + self.ready + self.free


def pool_limit() -> int | None:
    """The limit in bytes, from `set_pool_limit`; None means DEFAULT_LIMIT or the bytes in use, whichever is larger."""
    return _limit


def set_pool_limit(nbytes: int | None) -> None:
    """Set how much shared memory this process keeps that no tensor uses.

    Outputs of redistributions on the `shared_memory` and `hierarchical` transports are in memory that all ranks of a
    machine map, those of 64 KiB and more on `process_group` in memory of this process alone; buffers of messages are in
    both. When the last tensor on such memory dies, the memory is kept for later tensors of any size, up to this limit;
    beyond it, the least recently used memory is returned to the system. Receive buffers that ranks keep for each
    other's next call count, up to half of the limit; those that are kept already stay until their redistribution runs
    again.

    Args:
        nbytes: the limit in bytes. With 0, each call waits for the system to clear its memory, which takes about as
            long as the copy itself. None, the default: 256 MiB or the bytes in use by tensors, whichever is larger.

    Raises:
        ArgumentError: `nbytes` is not a number of bytes.
    """
    global _limit
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
        raise ArgumentError(f"nbytes: {nbytes!r}; allowed: a whole number of bytes, or None")
    _limit = nbytes
    for allocator in list(allocators):
        allocator.set_limit(nbytes)


def empty_cache() -> None:
    """Return to the system all shared memory of this process that is neither in use by tensors nor kept as receive
    buffers, and all that is left of destroyed process groups.

    Not collective. The next calls allocate memory again, which takes time once. See `pool_memory` for the amounts.
    """
    forget_dead_groups()
    for allocator in list(allocators):
        allocator.trim(0)


def pool_memory() -> PoolMemory:
    """The shared memory that this process has now, as a `PoolMemory` in bytes."""
    current = list(allocators)
    for allocator in current:
        allocator.settle()
    allocated, ready = sum(a.allocated for a in current), sum(a.ready for a in current)
    limit = pool_limit()
    return PoolMemory(
        allocated=allocated - ready,
        ready=ready,
        free=sum(a.free_pages() for a in current),
        limit=max(DEFAULT_LIMIT, allocated + ready) if limit is None else limit,
    )
