"""Memory of this process alone that keeps its pages between calls: fresh pages cost more than copying into them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from ....kernels import host_empty
from .segments import PrivateSegment
from .shared_pool import Pool

_LEAST_POOLED = 1 << 16
"""Bytes of a tensor; what is smaller comes from memory that torch's allocator keeps anyway."""
_pools: dict[int, Pool[PrivateSegment]] = {}
"""By process: a forked one may not use its parent's."""


def pooled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on the CPU. `set_pool_limit` and `pool_memory` count the memory of large ones.

    Raises:
        TransportError: there is not enough memory.
    """
    if math.prod(shape) * dtype.itemsize < _LEAST_POOLED:
        return host_empty(shape, dtype)
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools[os.getpid()] = Pool("shardweave-private", PrivateSegment)
    return pool.empty(shape, dtype)
