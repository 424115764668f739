"""Memory of this process alone that keeps its pages between calls: fresh pages cost more than copying into them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .tensors import SharedPool

_pools: dict[int, SharedPool] = {}
"""By process: a forked one may not use its parent's."""


def pooled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on the CPU. `set_pool_limit` and `pool_memory` count its memory.

    Raises:
        TransportError: there is not enough memory.
    """
    if not hasattr(os, "memfd_create"):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools[os.getpid()] = SharedPool("shardweave-private", named=False)
    return pool.empty(shape, dtype)
