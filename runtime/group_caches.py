"""What is kept for the default process group, and forgotten when another takes its place."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

_Cache = TypeVar("_Cache", bound=dict)
_caches: list[dict] = []
_group: object = None


def kept_with_group(cache: _Cache) -> _Cache:
    """`cache` itself, to be emptied when the group changes: what it holds would keep the old group alive."""
    _caches.append(cache)
    return cache


def forget_dead_groups() -> None:
    """Empty the caches if the default process group is not the one that they were filled for."""
    global _group
    group = dist.distributed_c10d.GroupMember.WORLD
    if _group is not group:
        _group = group
        forget_all()


def forget_all() -> None:
    """Empty the caches."""
    for cache in _caches:
        cache.clear()
