"""What is kept for the default process group, and forgotten when it is destroyed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Cache = TypeVar("_Cache", bound=dict)
_caches: list[dict] = []
_at_end: list[Callable[[], None]] = []
_lives = itertools.count(1)
_life = 0


def _no_group() -> object:
    return None


_group: Callable[[], object] = _no_group
"""The group that the caches are for, or None; not held: it would live on when it is destroyed."""


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
    group: Any = dist.distributed_c10d.GroupMember.WORLD
    if _group() is group:
        return
    _end(_life)
    if group is None:
        return
    _group, _life = weakref.ref(group), next(_lives)
    # `destroy_process_group` lets go of the group and of the store that was made for it. Who else holds one of them,
    # as a mesh may the group, does not hold the other.
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    for held in (group, store):
        if held is not None:
            weakref.finalize(held, _end, _life).atexit = False


def forget_all() -> None:
    """Empty the caches."""
    for cache in _caches:
        cache.clear()


def _end(life: int) -> None:
    """Forget all that is kept, if it is of that life."""
    global _group
    if life == _life:
        _group = _no_group
        forget_all()
        for forget in _at_end:
            forget()
