"""How much shared memory a process keeps that no tensor uses, and how it is asked to give that back."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ArgumentError
from ..environment import requested_pool_limit
from ..process_group_cache import forget_dead_groups
from .shared_allocator import DEFAULT_LIMIT, allocators

_asked: int | None = None  # by `set_pool_limit`


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of shared memory that this process has for redistributions on the `shared_memory` and `hierarchical`
    transports.

    Attributes:
        allocated: under tensors that are alive, in whole pages, rounded up by an eighth at most.
        ready: under buffers that are kept for peers between calls.
        free: that no tensor uses, and that the next calls find ready.
        limit: of `ready` and `free` together, at the moment.
    """

    allocated: int
    ready: int
    free: int
    limit: int

    @property
    def reserved(self) -> int:
        """All of it: `allocated`, `ready` and `free`."""
        return self.allocated + self.ready + self.free


def pool_limit() -> int | None:
    """Bytes that were asked for; None: DEFAULT_LIMIT, or as much as is in use, if that is more.

    Raises:
        ArgumentError: SHARDWEAVE_POOL_LIMIT is no number of bytes.
    """
    return requested_pool_limit() if _asked is None else _asked


def set_pool_limit(nbytes: int | None) -> None:
    """Set how much shared memory this process keeps that is under no tensor, for the next calls.

    Outputs of redistributions on the `shared_memory` and `hierarchical` transports lie in memory that all ranks of a
    machine map. When the last tensor on such memory dies, it is kept for the next outputs, of any size, as long as the
    limit allows; beyond it, the least recently used goes back to the system. Buffers that ranks keep for each other's
    next call count, up to half of the limit; those that are kept already stay until their redistribution runs again.

    Args:
        nbytes: 0 keeps nothing: each call waits for the system to clear its memory, which takes about as long as the
            copy itself. None: what `SHARDWEAVE_POOL_LIMIT` says; without it 96 MiB, or as much as is under tensors, if
            that is more.

    Raises:
        ArgumentError: `nbytes`, or SHARDWEAVE_POOL_LIMIT, is no number of bytes.
    """
    global _asked
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
        raise ArgumentError(f"nbytes: {nbytes!r}; allowed: a whole number of bytes, or None")
    limit = requested_pool_limit() if nbytes is None else nbytes
    _asked = nbytes
    for allocator in list(allocators):
        allocator.set_limit(limit)


def empty_cache() -> None:
    """Give back to the system all shared memory of this process that is under no tensor and not kept for peers, and
    what is left of process groups that have been destroyed.

    Not collective. The next calls take memory anew, which costs time once. `pool_memory` says what there is.
    """
    forget_dead_groups()
    for allocator in list(allocators):
        allocator.trim(0)


def pool_memory() -> PoolMemory:
    """How much shared memory this process has at the moment: a `PoolMemory`, in bytes."""
    found = list(allocators)
    for allocator in found:
        allocator.settle()
    allocated, ready = sum(a.allocated for a in found), sum(a.ready for a in found)
    limit = pool_limit()
    return PoolMemory(
        allocated=allocated - ready,
        ready=ready,
        free=sum(a.free for a in found),
        limit=max(DEFAULT_LIMIT, allocated + ready) if limit is None else limit,
    )
