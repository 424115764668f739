"""The failures of ranks, as they are in the store, and which of them a process group was made after."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from .store_texts import StoreTexts, parsed

_FAILURES = [(int, int, [str])]
_COUNT = "failures"


class Failure(NamedTuple):
    """A failure of a rank.

    Attributes:
        number: counts the failures of all ranks, from 1 on.
        rank: the rank that failed.
        numbered: how many process groups torch had numbered on that rank by then.
        names: the groups that it had whose names are no numbers.
    """

    number: int
    rank: int
    numbered: int
    names: list[str]

    def is_before(self, group: dist.ProcessGroup, ranks: Collection[int]) -> bool:
        """Whether a process group was made after this failure, as far as its name and its ranks tell."""
        name = str(group.group_name)
        if name.isdecimal():  # all ranks number the groups that they make together
            return int(name) >= self.numbered
        return self.rank in ranks and name not in self.names


class Failures:
    """The failures of the ranks of a default process group.

    A rank that fails writes which process groups it has, before it raises. It takes part in making every group that it
    is in. Where ranks meet for that, as with gloo, its earlier failures are in the store when the group is there, so
    that whichever rank reads them, and whenever, finds the same ones before the group.
    """

    def __init__(self, texts: StoreTexts, rank: int, timeout: float) -> None:
        self._texts, self._rank = texts, rank
        self._own: list[tuple[int, int, list[str]]] = []
        self._clear(timeout)  # what an earlier default group may have left

    def _clear(self, within: float | None = None) -> None:
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self._texts.set(_key(self._rank), "", within)

    def leave(self) -> None:
        """The rank leaves the default group: its failures are none of the next one."""
        if self._own:
            self._clear()

    def add(self) -> None:
        """Write that this rank has failed. Raises nothing: without the store no group can be made."""
        c10d: Any = dist.distributed_c10d
        # Names that are numbers are told by how many there were.
        names = [name for name in map(str, c10d._world.pg_names.values()) if not name.isdecimal()]
        numbered = c10d._world.group_count
        with suppress(RuntimeError):
            number = self._texts.bounded.run(lambda store: store.add(_COUNT, 1), self._texts.longest_answer)
            self._own.append((number, numbered, names))
            self._texts.set(_key(self._rank), json.dumps(self._own))

    def last_before(
        self, ranks: tuple[int, ...], groups: Iterable[tuple[dist.ProcessGroup, Collection[int]]]
    ) -> Failure | None:
        """The last failure of one of `ranks` that one of `groups`, each given with its ranks, was made after; None if
        there is none. Does not wait. The same on all of `ranks` that name groups of one mesh."""
        # A name that is not a number tells only the ranks of its group.
        telling = [(g, members) for g, members in groups if g.group_name.isdecimal() or set(ranks) <= set(members)]
        if not telling:
            return None
        found = self._read(ranks)
        return max((f for f in found if any(f.is_before(g, members) for g, members in telling)), default=None)

    def may_be_last(self, failure: Failure, groups: Collection[tuple[dist.ProcessGroup, Collection[int]]]) -> bool:
        """Whether `last_before` may find this failure again, for any ranks, where `groups` are all that this rank has:
        unless the same rank has failed since, and none of the groups was made in between."""
        later = [each for each in self._read((failure.rank,)) if each.number > failure.number]
        since = [(g, members) for g, members in groups if failure.is_before(g, members)]
        return not later or any(not any(each.is_before(g, members) for each in later) for g, members in since)

    def _read(self, ranks: tuple[int, ...]) -> list[Failure]:
        """The failures of some ranks; none if the store cannot be reached."""
        keys = [_key(rank) for rank in ranks]
        texts: list[str | None] = []
        with suppress(RuntimeError):  # the store is gone: calls say so
            texts = list(self._texts.get_all(keys) or map(self._texts.get, keys))
        return [
            Failure(number, rank, numbered, names)
            for rank, text in zip(ranks, texts, strict=False)
            for number, numbered, names in (parsed(rank, text, _FAILURES) if text else ())
        ]


def _key(rank: int) -> str:
    return f"failures/{rank}"
