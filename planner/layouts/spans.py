"""The spans that shards hold along one tensor dim, strided ones included, for many shards at once.

Strided shards of large meshes are planned in a fixed number of array operations, however many shards there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .distinct import distinct

Span = tuple[int, int]  # start, stop
Parts = tuple[tuple[int, int, int], ...]
"""The cuts of a tensor dim for one rank: (number of parts, split factor, index of the rank's part) of each cut."""

_MOST_INDICES = 1 << 61  # of all shards of a batch together, so that their sums fit in an int64
_MOST_PIECES = 1 << 20  # of all shards of a batch together


class Spans(NamedTuple):
    """Non-empty spans of shards, the shards one after the other and the spans of each ascending.

    Attributes:
        shard: [n] the index of the shard.
        start, stop: [n] indices of the tensor dim.
    """

    shard: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def select(self, shards: np.ndarray) -> Spans:
        """The spans of some shards [n], ascending, which are numbered from 0."""
        at = np.searchsorted(shards, self.shard)
        kept = np.append(shards, -1)[at] == self.shard
        return Spans(at[kept], self.start[kept], self.stop[kept])

    def by_start(self) -> Spans:
        """The same spans in ascending order of their starts."""
        order = np.argsort(self.start)
        return Spans(*(x[order] for x in self))

    @property
    def lengths(self) -> np.ndarray:
        return self.stop - self.start

    @property
    def local(self) -> np.ndarray:
        """[n] the index in its shard at which each span begins."""
        lengths, begins = self.lengths, np.ones(len(self.shard), dtype=bool)
        before = lengths.cumsum() - lengths
        np.not_equal(self.shard[1:], self.shard[:-1], out=begins[1:])
        return before - before[begins][begins.cumsum() - 1]

    def ends(self, shards: int) -> np.ndarray:
        """[shards + 1] the index of the first span of each shard, and the number of spans."""
        return _sums(np.bincount(self.shard, minlength=shards))

    def sizes(self, shards: int) -> np.ndarray:
        """[shards] the number of indices that each shard holds; `shards` is their number."""
        total, ends = _sums(self.lengths), self.ends(shards)
        return total[ends[1:]] - total[ends[:-1]]


def _sums(values: np.ndarray) -> np.ndarray:
    """[n + 1] the sums of the first values [n], from none to all."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def cut(span: Span, parts: int, index: int) -> Span:
    """Part `index` of a span cut into `parts`: of length ceil(length / parts), the last ones shorter or empty."""
    start, stop = span
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def spans_of_shards(extent: int, cuts: Sequence[tuple[int, int]], index: np.ndarray) -> Spans:
    """The spans of several shards of a tensor dim of `extent`.

    Args:
        cuts: (number of parts, split factor) of each cut, the first one first.
        index: [shards, cuts] the part that each shard has of each cut.
    """
    shards = len(index)
    at_once = _at_once(extent, sum(split for _, split in cuts))
    if shards > at_once:
        batches = range(0, shards, at_once)
        return _joined([spans_of_shards(extent, cuts, index[first : first + at_once]) for first in batches], at_once)
    shard = np.arange(shards if extent else 0)
    spans = Spans(shard, np.zeros_like(shard), np.full_like(shard, extent))
    for (number, split), part in zip(cuts, index.T, strict=True):
        spans = _cut_again(spans, number, split, part)
    return spans


def cut_shards(extent: int, spans: Spans, cut: tuple[int, int], shard: np.ndarray, part: np.ndarray) -> Spans:
    """The spans of parts of shards.

    Args:
        extent: the extent of the tensor dim.
        spans: the spans of the shards.
        cut: (number of parts, split factor) of the cut.
        shard, part: [n] the shard that each one is a part of, and which part.
    """
    number, split = cut
    ends = spans.ends(int(shard.max(initial=-1)) + 1)
    first, last = ends[shard], ends[shard + 1] - 1
    at_once = _at_once(extent, split + int((last - first).max(initial=0)))
    found = []
    for begin in range(0, max(len(shard), 1), at_once):
        batch = slice(begin, begin + at_once)
        child, at = ranges(first[batch], last[batch])
        found.append(_cut_again(Spans(child, spans.start[at], spans.stop[at]), number, split, part[batch]))
    return _joined(found, at_once)


def _at_once(extent: int, splits: int) -> int:
    """How many shards of a tensor dim of `extent` are cut together, given the sum of the split factors."""
    return max(1, min(_MOST_INDICES // max(extent, 1), _MOST_PIECES // max(min(extent, splits + 1), 1)))


def _joined(batches: Sequence[Spans], shards: int) -> Spans:
    """The spans of batches of `shards` shards each."""
    if len(batches) == 1:
        return batches[0]
    moved = [(spans.shard + i * shards, spans.start, spans.stop) for i, spans in enumerate(batches)]
    return Spans(*map(np.concatenate, zip(*moved, strict=True)))


def _cut_again(spans: Spans, number: int, split: int, part: np.ndarray) -> Spans:
    """Part `part` [shards] of each shard: of each of the `split` pieces into which it is cut, one of `number` parts."""
    lengths = spans.lengths
    ends = lengths.cumsum()  # places in all shards, laid end to end
    total = spans.sizes(len(part))
    before = total.cumsum() - total
    piece = -(-total // split)
    count = np.minimum(split, total)
    shard = np.repeat(np.arange(len(part)), count)
    low = np.minimum((np.arange(len(shard)) - (count.cumsum() - count)[shard]) * piece[shard], total[shard])
    high = np.minimum(low + piece[shard], total[shard])
    size = -(-(high - low) // number)
    low = np.minimum(low + part[shard] * size, high)
    high = np.minimum(low + size, high)
    kept = low < high
    low, high = (low + before[shard])[kept], (high + before[shard])[kept]
    if len(spans.shard) == len(part) and total.all():  # one span each, so `shard` is also the index of the span
        i = shard[kept]
    else:
        i, _, low, high = intersections(ends - lengths, ends, low, high)
    shift = spans.start[i] - (ends - lengths)[i]
    return _merged(Spans(spans.shard[i], low + shift, high + shift))


def shards_meeting(extent: int, cuts: Sequence[tuple[int, int]], wanted: np.ndarray) -> np.ndarray:
    """[n, cuts] the parts of the shards of a tensor dim that meet one of the ascending spans `wanted` [spans, 2].

    After each cut only shards that meet one are cut again, so that no shard is made that does not.

    Args:
        cuts: as for `spans_of_shards`.
    """
    wanted = wanted[wanted[:, 0] < wanted[:, 1]]
    cells = np.zeros((1 if extent and len(wanted) else 0, 0), dtype=np.int64)
    spans = spans_of_shards(extent, (), cells)
    for number, split in cuts:
        total, local = spans.sizes(len(cells)), spans.local
        order = np.argsort(spans.start)
        i, _, low, high = intersections(spans.start[order], spans.stop[order], wanted[:, 0], wanted[:, 1])
        i = order[i]
        shard, shift = spans.shard[i], local[i] - spans.start[i]
        low, high = low + shift, high + shift
        # The pieces that each intersection runs through, then the parts of each piece.
        piece = -(-total // split)
        at, pieces = ranges(low // piece[shard], (high - 1) // piece[shard])
        shard, low, high = shard[at], low[at], high[at]
        begin = pieces * piece[shard]
        end = np.minimum(begin + piece[shard], total[shard])
        size = -(-(end - begin) // number)
        at, part = ranges((np.maximum(low, begin) - begin) // size, (np.minimum(high, end) - 1 - begin) // size)
        shard, part = np.divmod(distinct(shard[at] * number + part), number)
        cells = np.concatenate([cells[shard], part[:, None]], axis=1)
        spans = cut_shards(extent, spans, (number, split), shard, part)
    return cells


def ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers from `first` [n] to `last`, both included, one range after the other: the index of the range, and
    the number."""
    count = last - first + 1
    index = np.repeat(np.arange(len(first)), count)
    return index, np.arange(len(index)) - np.repeat(count.cumsum() - count - first, count)


def _merged(spans: Spans) -> Spans:
    """The same with adjacent spans of a shard merged."""
    shard, start, stop = spans
    begins = np.ones(len(shard), dtype=bool)
    begins[1:] = (start[1:] != stop[:-1]) | (shard[1:] != shard[:-1])
    if begins.all():
        return spans
    ends = np.roll(begins, -1)
    return Spans(shard[begins], start[begins], stop[ends])


def intersections(
    a_start: np.ndarray, a_stop: np.ndarray, b_start: np.ndarray, b_stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The intersections of disjoint, non-empty spans `a` and ascending ones `b`, in the order of `a`: index in `a`, in
    `b`, start, stop."""
    first = np.searchsorted(b_stop, a_start, side="right")
    count = np.maximum(np.searchsorted(b_start, a_stop, side="left") - first, 0)
    i = np.repeat(np.arange(len(a_start)), count)
    j = np.arange(len(i)) - np.repeat(count.cumsum() - count - first, count)
    return i, j, np.maximum(a_start[i], b_start[j]), np.minimum(a_stop[i], b_stop[j])


def spans_in_common(a: Spans, b: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The intersections of the spans of disjoint shards `a` with those of disjoint shards `b`: index in `a`, index in
    `b`, start, stop. Sorted by the shard of `a`, then by that of `b`, then by start."""
    if len(a.shard) < len(b.shard):
        order = np.argsort(a.start)
        j, i, start, stop = intersections(b.start, b.stop, a.start[order], a.stop[order])
        i = order[i]
    else:
        order = np.argsort(b.start)
        i, j, start, stop = intersections(a.start, a.stop, b.start[order], b.stop[order])
        j = order[j]
    # They are sorted by one of the shards, then by start; if there is one shard in `a` or in `b`, that is the order.
    shards = a.shard[i] * (int(b.shard.max(initial=0)) + 1) + b.shard[j]
    if (shards[1:] < shards[:-1]).any():
        order = np.argsort(shards, kind="stable")
        i, j, start, stop = i[order], j[order], start[order], stop[order]
    return i, j, start, stop


def runs_in_common(held: Spans, wanted: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The indices that disjoint shards `held` and disjoint shards `wanted` have in common, as runs.

    Returns:
        The held shard and the wanted shard of each run [n], sorted by the held shard, then by the wanted one; and the
        runs [n, 6], as in `common_runs`.
    """
    i, j, low, high = spans_in_common(held, wanted)
    length, holder, receiver = high - low, held.shard[i], wanted.shard[j]
    source, target = (low + (spans.local - spans.start)[of] for spans, of in ((held, i), (wanted, j)))
    # Spans that are adjacent in both shards are one.
    alike = (holder[1:] == holder[:-1]) & (receiver[1:] == receiver[:-1])
    begins = np.ones(len(length), dtype=bool)
    begins[1:] = ~alike | (np.diff(source) != length[:-1]) | (np.diff(target) != length[:-1])
    first = np.flatnonzero(begins)
    length = np.add.reduceat(length, first) if len(first) else length
    source, target, holder, receiver = (x[first] for x in (source, target, holder, receiver))
    # A run goes on as long as lengths and steps stay the same.
    same = (length[1:] == length[:-1]) & (holder[1:] == holder[:-1]) & (receiver[1:] == receiver[:-1])
    steps = np.stack([np.diff(source), np.diff(target)], axis=1)
    goes_on = np.zeros(len(length), dtype=bool)  # from the span before over this one to the next
    goes_on[1:-1] = same[1:] & same[:-1] & (steps[1:] == steps[:-1]).all(axis=1)
    breaks = np.flatnonzero(~goes_on)
    index = np.arange(len(length))
    after = index + 1  # where the run that begins at each span ends
    pairs = np.flatnonzero(same)
    after[pairs] = breaks[np.searchsorted(breaks, pairs + 1)] + 1
    run = _reached(np.flatnonzero(np.append(True, ~same)) if len(length) else pairs, after)
    count = after[run] - run
    steps = np.concatenate([steps, np.ones((1, 2), dtype=np.int64)])[run]
    steps[count == 1] = 1
    runs = np.column_stack([source[run], target[run], count, length[run], steps])
    return holder[run], receiver[run], runs


def _reached(starts: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The indices, ascending, that are reached from some indices by steps from index i to `after[i]` > i, the number of
    indices being the end."""
    reached = np.zeros(len(after) + 1, dtype=bool)
    reached[starts] = reached[-1] = True
    after = np.append(after, len(after))
    while not reached[further := after[reached]].all():
        reached[further] = True
        after = after[after]  # twice as many steps
    return np.flatnonzero(reached[:-1])


def _of_one(extent: int, parts: Parts) -> Spans:
    cuts = [(number, split) for number, split, _ in parts]
    return spans_of_shards(extent, cuts, np.array([[index for *_, index in parts]], dtype=np.int64))


@lru_cache(maxsize=8192)
def held_spans(extent: int, parts: Parts) -> np.ndarray:
    """[n, 2] the ascending spans, with gaps between them, that a rank holds of a tensor dim of `extent`."""
    if all(split == 1 for _, split, _ in parts):
        span = (0, extent)
        for number, _, index in parts:
            span = cut(span, number, index)
        return np.array([span] if span[0] < span[1] else [], dtype=np.int64).reshape(-1, 2)
    spans = _of_one(extent, parts)  # type: ignore[arg-type]  # nodes do not share strided shards
    return np.stack([spans.start, spans.stop], axis=1)


@lru_cache(maxsize=8192)
def common_runs(extent: int, held: Parts, wanted: Parts) -> np.ndarray:
    """[n, 6] int64: the indices that a holder and a receiver have in common along a tensor dim of `extent`, as runs.

    A run is a number of equally spaced spans of equal length: (start in the holder's shard, start in the receiver's
    shard, count, length, step in the holder's shard, step in the receiver's shard).
    """
    return runs_in_common(_of_one(extent, held), _of_one(extent, wanted))[2]
