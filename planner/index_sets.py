"""What a rank holds along a tensor dim: what is left after mesh dims cut it in order, as torch.chunk does.

Plain cuts leave one span. A strided cut takes a part of each of several pieces, so it leaves several spans, ascending;
locally they lie one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .layout import Cuts, Layout, pairs_of
from .mesh import Coordinate

Span = tuple[int, int]  # start, stop
Parts = tuple[tuple[int, int, int], ...]
"""The cuts of a tensor dim as one rank sees them: parts, pieces that are cut first, and the index of its part."""


def cut(span: Span, parts: int, index: int) -> Span:
    """Part `index` of `parts` of a span: ceil(length / parts) each, the last ones shorter or empty."""
    start, stop = span
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def parts_of(cuts: Cuts, mesh_shape: Sequence[int], coordinate: Mapping[int, int] | Coordinate) -> Parts:
    return tuple((mesh_shape[m], split, coordinate[m]) for m, split in pairs_of(cuts))


def mesh_dims_of(cuts: Cuts) -> tuple[int, ...]:
    return tuple(m for m, _ in pairs_of(cuts))


def is_strided(cuts: Cuts) -> bool:
    return any(isinstance(cut, tuple) for cut in cuts)


def held_span(extent: int, parts: Parts) -> Span:
    """The first and last index of a tensor dim of `extent` that a rank holds, as a span; what plain cuts leave."""
    if any(split > 1 for _, split, _ in parts):
        held = held_spans(extent, parts)
        return (int(held[0, 0]), int(held[-1, 1])) if len(held) else (0, 0)
    span = (0, extent)
    for number, _, index in parts:
        span = cut(span, number, index)
    return span


@lru_cache(maxsize=8192)
def held_spans(extent: int, parts: Parts) -> np.ndarray:
    """The indices of a tensor dim of `extent` that a rank holds: ascending spans that do not touch, [n, 2]."""
    held = _not_empty(np.array([[0, extent]], dtype=np.int64))
    for number, split, index in parts:
        lengths = held[:, 1] - held[:, 0]
        total = int(lengths.sum())
        piece = -(-total // split)
        starts = np.minimum(np.arange(min(split, total)) * piece, total)
        stops = np.minimum(starts + piece, total)
        size = -(-(stops - starts) // number)
        low = np.minimum(starts + index * size, stops)
        wanted = _not_empty(np.stack([low, np.minimum(low + size, stops)], axis=1))
        first = lengths.cumsum() - lengths  # of each span, among all that is held
        i, j, low, high = _meeting(np.stack([first, first + lengths], axis=1), wanted)
        shift = held[i, 0] - first[i]
        held = _joined(np.stack([low + shift, high + shift], axis=1))
    return held


def _not_empty(spans: np.ndarray) -> np.ndarray:
    return spans[spans[:, 0] < spans[:, 1]]


def _joined(spans: np.ndarray) -> np.ndarray:
    """Ascending spans with those that touch made one."""
    begins = np.ones(len(spans), dtype=bool)
    begins[1:] = spans[1:, 0] != spans[:-1, 1]
    ends = np.roll(begins, -1)
    return np.stack([spans[begins, 0], spans[ends, 1]], axis=1)


def _meeting(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where ascending spans of `a` and of `b`, none of them empty, meet: which of each, from where, to where."""
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    count = np.maximum(np.searchsorted(b[:, 0], a[:, 1], side="left") - first, 0)
    i = np.repeat(np.arange(len(a)), count)
    j = np.arange(count.sum()) - np.repeat(count.cumsum() - count - first, count)
    return i, j, np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])


@lru_cache(maxsize=8192)
def common_runs(extent: int, held: Parts, wanted: Parts) -> np.ndarray:
    """What a holder and a receiver have in common along a tensor dim of `extent`, as runs: [n, 6] int64.

    A run is `count` spans of `length`: start in the holder's shard, start in the receiver's, count, length, and what a
    span is from the next in each shard.
    """
    a, b = held_spans(extent, held), held_spans(extent, wanted)
    i, j, low, high = _meeting(a, b)
    places = []
    for spans, which in ((a, i), (b, j)):
        lengths = spans[:, 1] - spans[:, 0]
        places.append(low + (lengths.cumsum() - lengths - spans[:, 0])[which])
    source, target, length = places[0], places[1], high - low
    # Neighbours in both shards are one span.
    begins = np.ones(len(low), dtype=bool)
    begins[1:] = (np.diff(source) != length[:-1]) | (np.diff(target) != length[:-1])
    starts = np.flatnonzero(begins)
    source, target, length = source[starts], target[starts], np.add.reduceat(length, starts) if len(starts) else length
    steps = np.stack([np.diff(source), np.diff(target)], axis=1)
    same = length[1:] == length[:-1]
    runs, first = [], 0
    # A run goes on for as long as lengths and steps stay the same.
    goes_on = same[1:] & same[:-1] & (steps[1:] == steps[:-1]).all(axis=1) if len(steps) else np.zeros(0, dtype=bool)
    breaks = np.flatnonzero(~goes_on) + 2
    while first < len(length):
        last = first + 1
        if first < len(same) and same[first]:
            at = np.searchsorted(breaks, first + 2)
            last = int(breaks[at]) if at < len(breaks) else len(length)
        step = steps[first] if last > first + 1 else (1, 1)
        runs.append((source[first], target[first], last - first, length[first], *step))
        first = last
    return np.array(runs, dtype=np.int64).reshape(len(runs), 6)


@lru_cache(maxsize=8192)
def _cut_dims(
    layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[tuple[int, Parts, bool], ...]:
    """The tensor dims that are cut, how the rank at `coordinate` sees their cuts, and whether one is strided."""
    return tuple((d, parts_of(cuts, mesh_shape, coordinate), is_strided(cuts)) for d, cuts in layout.all_cuts)


def held_sizes(
    shape: Sequence[int], layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[int, ...]:
    """The shape of the shard of the rank at `coordinate`."""
    sizes = list(shape)
    for d, parts, strided in _cut_dims(layout, mesh_shape, coordinate):
        if strided:
            held = held_spans(sizes[d], parts)
            sizes[d] = int((held[:, 1] - held[:, 0]).sum())
        else:
            low, high = held_span(sizes[d], parts)
            sizes[d] = high - low
    return tuple(sizes)


def held_box(
    shape: Sequence[int], layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[Span, ...]:
    """The spans, one per tensor dim, of the shard of the rank at `coordinate`; first to last where it is strided."""
    box = [(0, n) for n in shape]
    for d, parts, _ in _cut_dims(layout, mesh_shape, coordinate):
        box[d] = held_span(shape[d], parts)
    return tuple(box)


def elements_in_common(
    shape: Sequence[int], held: Layout, held_at: tuple[tuple[int, ...], Coordinate], wanted: Layout,
    wanted_at: tuple[tuple[int, ...], Coordinate],
) -> int:  # fmt: skip
    """Elements of one rank's shard under `wanted` that are in one rank's under `held`; mesh shape and coordinate of
    each."""
    cut_here, cut_there = ({d: p for d, p, _ in _cut_dims(x, *at)} for x, at in ((held, held_at), (wanted, wanted_at)))
    strided = {*held.strided_dims, *wanted.strided_dims}
    count = 1
    for d, extent in enumerate(shape):
        a, b = cut_here.get(d, ()), cut_there.get(d, ())
        if d in strided:
            runs = common_runs(extent, a, b)
            count *= int((runs[:, 2] * runs[:, 3]).sum())
        else:
            (low, high), (start, stop) = held_span(extent, a), held_span(extent, b)
            count *= max(0, min(high, stop) - max(low, start))
    return count


def spans_along(
    extent: int, order: Sequence[int], mesh_shape: Sequence[int], coordinates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop, [n] each, of what the ranks at `coordinates`, [mesh dims, n], hold of a tensor dim."""
    number = coordinates.shape[1]
    if not order:
        return np.zeros(number, dtype=np.int64), np.full(number, extent, dtype=np.int64)
    start: Any = 0
    stop: Any = extent
    for mesh_dim in order:
        size = -(-(stop - start) // mesh_shape[mesh_dim])
        start = np.minimum(start + coordinates[mesh_dim] * size, stop)
        stop = np.minimum(start + size, stop)
    return start, stop


def spans_at(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of the shards at `coordinates`, [mesh dims, n], in each tensor dim: [tensor dims, n] each.

    Of tensor dims that are cut plainly; of strided ones the whole dim.
    """
    orders = {d: order for d, order in layout.orders if d not in layout.strided_dims}
    start = np.zeros((len(shape), coordinates.shape[1]), dtype=np.int64)
    stop = np.empty_like(start)
    for d, extent in enumerate(shape):
        if d in orders:
            start[d], stop[d] = spans_along(extent, orders[d], mesh_shape, coordinates)
        else:
            stop[d] = extent
    return start, stop


def overlaps(
    extent: int,
    cuts_a: Cuts,
    cuts_b: Cuts,
    mesh_shape: Sequence[int],
    coordinates_a: np.ndarray,
    coordinates_b: np.ndarray,
) -> np.ndarray:
    """How many indices of a tensor dim of `extent` two ranks both hold, [a, b].

    One at `coordinates_a`, [mesh dims, a], where `cuts_a` cut it; one at `coordinates_b`, [mesh dims, b], where
    `cuts_b` do. What two shards have in common is the product over tensor dims.
    """
    if is_strided(cuts_a) or is_strided(cuts_b):
        cells_a, which_a = _cells_at(extent, cuts_a, mesh_shape, coordinates_a)
        cells_b, which_b = _cells_at(extent, cuts_b, mesh_shape, coordinates_b)
        return _common(cells_a, cells_b)[which_a[:, None], which_b]
    start_a, stop_a = spans_along(extent, mesh_dims_of(cuts_a), mesh_shape, coordinates_a)
    start_b, stop_b = spans_along(extent, mesh_dims_of(cuts_b), mesh_shape, coordinates_b)
    common = np.minimum(stop_a[:, None], stop_b) - np.maximum(start_a[:, None], start_b)
    return np.maximum(common, 0)


def _cells_at(
    extent: int, cuts: Cuts, mesh_shape: Sequence[int], coordinates: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """The spans of each different shard, and which of them each of the ranks at `coordinates` has."""
    mesh_dims = mesh_dims_of(cuts)
    kinds, which = np.unique(coordinates[list(mesh_dims)], axis=1, return_inverse=True)
    places = (dict(zip(mesh_dims, column, strict=True)) for column in kinds.T.tolist())
    return [held_spans(extent, parts_of(cuts, mesh_shape, at)) for at in places], which.reshape(-1)


def _common(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    """How many indices spans of `a` and of `b` have in common, [a, b]: counted on the pieces that they all cut."""
    bounds = np.unique(np.concatenate([spans.reshape(-1) for spans in (*a, *b)]))
    starts, lengths = bounds[:-1], np.diff(bounds)

    def holds(spans: np.ndarray) -> np.ndarray:
        if not len(spans):
            return np.zeros(len(starts), dtype=bool)
        last = np.searchsorted(spans[:, 0], starts, side="right") - 1
        return (last >= 0) & (starts < spans[last, 1])

    return (np.array([holds(spans) for spans in a]) * lengths) @ np.array([holds(spans) for spans in b]).T


def cells_meeting(extent: int, cuts: Cuts, mesh_shape: Sequence[int], wanted: Span) -> np.ndarray:
    """The cells of a cut dim that may meet `wanted`: coordinates in cutting order, [n, cuts].

    Exactly those that do, where the cuts are plain, in time that goes with their number; all where one is strided.
    """
    sizes = tuple(mesh_shape[m] for m in mesh_dims_of(cuts))
    if is_strided(cuts):
        return np.indices(sizes, dtype=np.int64).reshape(len(sizes), math.prod(sizes)).T
    return _plain_cells_meeting(extent, sizes, wanted)


@lru_cache(maxsize=4096)
def _plain_cells_meeting(extent: int, sizes: tuple[int, ...], wanted: Span) -> np.ndarray:
    low, high = wanted
    count = 1 if low < high else 0
    cells = np.zeros((count, 0), dtype=np.int64)
    start, stop = np.zeros(count, dtype=np.int64), np.full(count, extent, dtype=np.int64)
    for parts in sizes:
        size = -(-(stop - start) // parts)
        first = np.maximum(low - start, 0) // size
        found = (np.minimum(high, stop) - 1 - start) // size - first + 1
        index = np.arange(found.sum()) - np.repeat(found.cumsum() - found, found) + np.repeat(first, found)
        cells = np.concatenate([np.repeat(cells, found, axis=0), index[:, None]], axis=1)
        size = np.repeat(size, found)
        start = np.repeat(start, found) + index * size
        stop = np.minimum(start + size, np.repeat(stop, found))
    return cells
