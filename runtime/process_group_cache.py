"""Caches that belong to the default process group: bounded, and emptied when the group is destroyed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

K = TypeVar("K")
V = TypeVar("V")


class ProcessGroupCache(dict[K, V]):
    """A dictionary with a limit, emptied when the default process group is destroyed: its values would keep the group
    alive.

    A look-up is `dict.get`. A new key in a full cache first removes the oldest eighth of the entries.

    Call `forget_dead_groups` before a look-up, since the default process group may have changed.
    """

    __slots__ = ("_max_entries",)

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries
        _caches.append(self)

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._max_entries and key not in self:
            # Several at once: finding the oldest entry of a dictionary takes longer the more were removed before it.
            for oldest in list(islice(self, max(1, self._max_entries // 8))):
                self.pop(oldest, None)
        super().__setitem__(key, value)


class _Ranks(dict):
    """A dictionary that supports weak references."""


_caches: list[dict] = []
_destroy_callbacks: list[Callable[[], None]] = []
_generations = itertools.count(1)
_group: object = None
_generation = 0


def on_group_destroyed(callback: Callable[[], None]) -> None:
    """Call `callback` when the default process group is destroyed, after the caches have been emptied."""
    _destroy_callbacks.append(callback)


def forget_dead_groups() -> None:
    """Empty the caches if the default process group is not the one that they were filled for."""
    global _group, _generation
    c10d: Any = dist.distributed_c10d
    group = c10d._world.default_pg  # what `GroupMember.WORLD` returns, with a call less
    if _group is group:
        return
    _end(_generation)
    _group, _generation = group, next(_generations)
    ranks = c10d._world.pg_group_ranks.get(group)
    if ranks is not None:
        # Cached meshes hold the group, and user code may hold its store. Only torch's own table holds this entry, which
        # `destroy_process_group` removes.
        watched = c10d._world.pg_group_ranks[group] = _Ranks(ranks)
        weakref.finalize(watched, _end, _generation).atexit = False


def clear_caches() -> None:
    for cache in _caches:
        cache.clear()


def _end(generation: int) -> None:
    """Clear the caches and run the callbacks, if the caches still belong to this generation of the group."""
    global _group
    if generation == _generation:
        _group = None
        clear_caches()
        for callback in _destroy_callbacks:
            callback()
