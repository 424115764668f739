"""Caches that belong to the default process group: bounded, and emptied when it or another one is destroyed."""

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
    """A dictionary with a limit, emptied when the default process group is destroyed, and after another one that is
    watched (`watch`): its values would keep the group alive.

    A look-up is `dict.get`. A new key in a full cache first removes the oldest eighth of the entries.

    Call `forget_dead_groups` before a look-up, since process groups may have been destroyed.
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
_settled: object = None
"""The default process group, unless a group has been destroyed since `forget_dead_groups` emptied the caches."""


def on_group_destroyed(callback: Callable[[], None]) -> None:
    """Call `callback` when the default process group is destroyed, after the caches have been emptied."""
    _destroy_callbacks.append(callback)


def forget_dead_groups() -> None:
    """Empty the caches if the default process group is not the one that they were filled for, or if a process group
    that is watched has been destroyed."""
    global _group, _generation, _settled
    c10d: Any = dist.distributed_c10d
    group = c10d._world.default_pg  # what `GroupMember.WORLD` returns, with a call less
    if _settled is group:
        return
    _settled = group  # first: what is destroyed from now on empties the caches again
    if _group is group:
        clear_caches()
        return
    _end(_generation)
    _group, _generation, _settled = group, next(_generations), group
    _call_when_destroyed(group, _end, _generation)


def watch(group: dist.ProcessGroup) -> None:
    """Empty the caches at the first call after a process group is destroyed, unless it is watched already."""
    if type(_ranks_of_groups().get(group)) is not _Ranks:
        _call_when_destroyed(group, _note_destroyed)


def living_groups() -> dict[dist.ProcessGroup, dict[int, int]]:
    """The process groups of this rank that are not destroyed. Of each, its ranks with their numbers in it."""
    table = list(_ranks_of_groups().items())
    return {group: ranks for group, ranks in table if isinstance(group, dist.ProcessGroup)}  # also stands for no group


def _ranks_of_groups() -> dict[Any, dict[int, int]]:
    """torch's own table."""
    c10d: Any = dist.distributed_c10d
    return c10d._world.pg_group_ranks


def _call_when_destroyed(group: Any, function: Callable[..., None], *args: int) -> None:
    table = _ranks_of_groups()
    ranks = table.get(group)
    if ranks is not None:
        # Cached meshes hold the group, and user code may hold its store. Only torch's own table holds this entry, which
        # `destroy_process_group` removes.
        watched = table[group] = _Ranks(ranks)
        weakref.finalize(watched, function, *args).atexit = False


def _note_destroyed() -> None:
    """On any thread, and in the midst of a call: the next one empties the caches."""
    global _settled
    _settled = None


def clear_caches() -> None:
    for cache in _caches:
        cache.clear()


def _end(generation: int) -> None:
    """Clear the caches and run the callbacks, if the caches still belong to this generation of the group."""
    global _group, _settled
    if generation == _generation:
        _group = _settled = None
        clear_caches()
        for callback in _destroy_callbacks:
            callback()
