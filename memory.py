"""The shared memory that redistributions and dispatchers keep for reuse."""

from __future__ import annotations

from shardweave.runtime.transports.shared_memory.pool_controls import (
    PoolMemory,
    empty_cache,
    pool_memory,
    set_pool_limit,
)

__all__ = ["PoolMemory", "empty_cache", "pool_memory", "set_pool_limit"]
