"""What is kept for the default process group, and forgotten when it is destroyed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Cache = TypeVar("_Cache", bound=dict)


class _Ranks(dict):
    """A table that weak references may be had of."""


_caches: list[dict] = []
_at_end: list[Callable[[], None]] = []
_lives = itertools.count(1)
_group: object = None
_life = 0


def kept_with_group(cache: _Cache) -> _Cache:
    """`cache` itself, to be emptied when the group ends: what it holds would keep the old group alive."""
    _caches.append(cache)
    return cache


def at_end_of_group(forget: Callable[[], None]) -> None:
    """Have something called when the group has ended, after the caches have been emptied."""
    _at_end.append(forget)


def forget_dead_groups() -> None:
    """Forget what is kept if the default process group is not the one that it is kept for."""
    global _group, _life
    c10d: Any = dist.distributed_c10d
    group = c10d.GroupMember.WORLD
    if _group is group:
        return
    _end(_life)
    _group, _life = group, next(_lives)
    ranks = c10d._world.pg_group_ranks.get(group)
    if ranks is not None:
        # Meshes, which are kept as well, hold the group, and anybody may hold its store; nobody but torch's own table
        # holds this entry, until `destroy_process_group`.
        watched = c10d._world.pg_group_ranks[group] = _Ranks(ranks)
        weakref.finalize(watched, _end, _life).atexit = False


def forget_all() -> None:
    """Empty the caches."""
    for cache in _caches:
        cache.clear()


def _end(life: int) -> None:
    """Forget all that is kept, if it is of that life."""
    global _group
    if life == _life:
        _group = None
        forget_all()
        for forget in _at_end:
            forget()
