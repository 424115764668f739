"""The indices that a rank holds along a tensor dim, after mesh dims cut it one after the other as `torch.chunk` does.

Plain cuts leave one span. A strided cut takes a part of each of several pieces and leaves several ascending spans,
which are contiguous in the local shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .layout import Cuts, Layout, pairs_of
from .mesh import Coordinate, Mesh
from .node_layout import NodeLayout

Span = tuple[int, int]  # start, stop
MeshParts = tuple[tuple[int, int, int], ...]
"""The cuts of a tensor dim for one rank: (number of parts, split factor, index of the rank's part) of each cut."""
Parts = tuple[tuple[int, int, int | range], ...]
"""The same, of which a rank may have a range of parts, that are as equal as can be."""


def cut(span: Span, parts: int, index: int | range) -> Span:
    """Part `index` of a span cut into `parts`: of length ceil(length / parts), the last ones shorter or empty."""
    start, stop = span
    if isinstance(index, range):
        return tuple(start + (stop - start) * i // parts for i in (index.start, index.stop))  # type: ignore[return-value]
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def parts_of(cuts: Cuts, mesh_shape: Sequence[int], coordinate: Mapping[int, int] | Coordinate) -> MeshParts:
    """The cuts of a tensor dim for the rank at `coordinate`."""
    return tuple((mesh_shape[m], split, coordinate[m]) for m, split in pairs_of(cuts))


def mesh_dims_of(cuts: Cuts) -> tuple[int, ...]:
    """The mesh dims of the cuts, the first cut first."""
    return tuple(m for m, _ in pairs_of(cuts))


def is_strided(cuts: Cuts) -> bool:
    """Whether one of the cuts is strided."""
    return any(isinstance(cut, tuple) for cut in cuts)


def held_span(extent: int, parts: Parts) -> Span:
    """The span that a rank holds of a tensor dim of `extent`; with a strided cut, from its first to its last index."""
    if any(split > 1 for _, split, _ in parts):
        held = held_spans(extent, parts)
        return (int(held[0, 0]), int(held[-1, 1])) if len(held) else (0, 0)
    span = (0, extent)
    for number, _, index in parts:
        span = cut(span, number, index)
    return span


@lru_cache(maxsize=8192)
def held_spans(extent: int, parts: Parts) -> np.ndarray:
    """[n, 2] the ascending spans, with gaps between them, that a rank holds of a tensor dim of `extent`."""
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
        first = lengths.cumsum() - lengths  # local index of the start of each span
        i, j, low, high = _intersections(np.stack([first, first + lengths], axis=1), wanted)
        shift = held[i, 0] - first[i]
        held = _merged(np.stack([low + shift, high + shift], axis=1))
    return held


def _not_empty(spans: np.ndarray) -> np.ndarray:
    return spans[spans[:, 0] < spans[:, 1]]


def _merged(spans: np.ndarray) -> np.ndarray:
    """Ascending spans with adjacent ones merged."""
    begins = np.ones(len(spans), dtype=bool)
    begins[1:] = spans[1:, 0] != spans[:-1, 1]
    ends = np.roll(begins, -1)
    return np.stack([spans[begins, 0], spans[ends, 1]], axis=1)


def _intersections(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The intersections of ascending, non-empty spans of `a` and `b`: index in `a`, index in `b`, start, stop."""
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    count = np.maximum(np.searchsorted(b[:, 0], a[:, 1], side="left") - first, 0)
    i = np.repeat(np.arange(len(a)), count)
    j = np.arange(count.sum()) - np.repeat(count.cumsum() - count - first, count)
    return i, j, np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])


@lru_cache(maxsize=8192)
def common_runs(extent: int, held: Parts, wanted: Parts) -> np.ndarray:
    """[n, 6] int64: the indices that a holder and a receiver have in common along a tensor dim of `extent`, as runs.

    A run is a number of equally spaced spans of equal length: (start in the holder's shard, start in the receiver's
    shard, count, length, step in the holder's shard, step in the receiver's shard).
    """
    a, b = held_spans(extent, held), held_spans(extent, wanted)
    i, j, low, high = _intersections(a, b)
    starts = []
    for spans, index in ((a, i), (b, j)):
        lengths = spans[:, 1] - spans[:, 0]
        starts.append(low + (lengths.cumsum() - lengths - spans[:, 0])[index])
    source, target, length = starts[0], starts[1], high - low
    # Merge spans that are adjacent in both shards.
    begins = np.ones(len(low), dtype=bool)
    begins[1:] = (np.diff(source) != length[:-1]) | (np.diff(target) != length[:-1])
    first_of = np.flatnonzero(begins)
    length = np.add.reduceat(length, first_of) if len(first_of) else length
    source, target = source[first_of], target[first_of]
    steps = np.stack([np.diff(source), np.diff(target)], axis=1)
    same = length[1:] == length[:-1]
    runs, first = [], 0
    # A run continues as long as lengths and steps stay the same.
    continues = same[1:] & same[:-1] & (steps[1:] == steps[:-1]).all(axis=1) if len(steps) else np.zeros(0, dtype=bool)
    breaks = np.flatnonzero(~continues) + 2
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
def cut_dims(
    layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[tuple[int, Parts, bool], ...]:
    """(tensor dim, cuts for the rank at `coordinate`, whether a cut is strided) of each tensor dim that is cut."""
    if isinstance(layout, NodeLayout):
        last, more = layout.tensor_dim, layout.parts(coordinate)
        cuts = {**dict(layout.all_cuts), last: layout.cuts(last)}
        parts = {d: parts_of(c, mesh_shape, coordinate) for d, c in cuts.items()}
        return tuple((d, parts[d] + more if d == last else parts[d], is_strided(c)) for d, c in cuts.items())
    return tuple((d, parts_of(cuts, mesh_shape, coordinate), is_strided(cuts)) for d, cuts in layout.all_cuts)


def held_sizes(
    shape: Sequence[int], layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[int, ...]:
    """The shape of the shard of the rank at `coordinate`."""
    sizes = list(shape)
    for d, parts, strided in cut_dims(layout, mesh_shape, coordinate):
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
    """The spans of the shard of the rank at `coordinate`, one per tensor dim; from first to last index if strided."""
    box = [(0, n) for n in shape]
    for d, parts, _ in cut_dims(layout, mesh_shape, coordinate):
        box[d] = held_span(shape[d], parts)
    return tuple(box)


def elements_in_common(
    shape: Sequence[int], held: Layout, held_at: tuple[tuple[int, ...], Coordinate], wanted: Layout,
    wanted_at: tuple[tuple[int, ...], Coordinate],
) -> int:  # fmt: skip
    """The number of elements that a shard under `held` and a shard under `wanted` have in common.

    Args:
        held_at, wanted_at: the mesh shape and the coordinate of each.
    """
    held_cuts, wanted_cuts = (
        {d: p for d, p, _ in cut_dims(x, *at)} for x, at in ((held, held_at), (wanted, wanted_at))
    )
    strided = {*held.strided_dims, *wanted.strided_dims}
    count = 1
    for d, extent in enumerate(shape):
        a, b = held_cuts.get(d, ()), wanted_cuts.get(d, ())
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
    """Start and stop [n] of the spans that the ranks at `coordinates` [mesh dims, n] hold of a tensor dim.

    Args:
        order: the mesh dims that cut it, the first cut first; all cuts are plain.
    """
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
    """Start and stop [tensor dims, n] of the shards of the ranks at `coordinates` [mesh dims, n].

    For strided tensor dims, those of the whole dim.
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


def boxes_of_all(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """[positions, tensor dims, 2] the spans of each rank's shard, and of what it has values of: its shard, or its part
    of the sums of its node. Without strided shards."""
    held = np.stack(spans_at(shape, layout, mesh.shape, mesh.coordinates)).T  # [positions, tensor dims, start and stop]
    if not isinstance(layout, NodeLayout):
        return held, held
    valid, d = held.copy(), layout.tensor_dim
    valid[:, d] = np.stack(layout.narrowed(held[:, d, 0], held[:, d, 1]), axis=1)
    return (held if layout.kind == "node sums" else valid), valid


def overlaps(
    extent: int,
    cuts_a: Cuts,
    cuts_b: Cuts,
    mesh_shape: Sequence[int],
    coordinates_a: np.ndarray,
    coordinates_b: np.ndarray,
) -> np.ndarray:
    """[a, b] the number of indices of a tensor dim of `extent` that two ranks have in common.

    The elements that two shards have in common are the product over tensor dims.

    Args:
        cuts_a, cuts_b: the cuts of the tensor dim in the two layouts.
        coordinates_a, coordinates_b: [mesh dims, a] and [mesh dims, b].
    """
    if is_strided(cuts_a) or is_strided(cuts_b):
        spans_a, index_a = _distinct_spans(extent, cuts_a, mesh_shape, coordinates_a)
        spans_b, index_b = _distinct_spans(extent, cuts_b, mesh_shape, coordinates_b)
        return _common_lengths(spans_a, spans_b)[index_a[:, None], index_b]
    start_a, stop_a = spans_along(extent, mesh_dims_of(cuts_a), mesh_shape, coordinates_a)
    start_b, stop_b = spans_along(extent, mesh_dims_of(cuts_b), mesh_shape, coordinates_b)
    common = np.minimum(stop_a[:, None], stop_b) - np.maximum(start_a[:, None], start_b)
    return np.maximum(common, 0)


def _distinct_spans(
    extent: int, cuts: Cuts, mesh_shape: Sequence[int], coordinates: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """The spans of each distinct shard along a tensor dim, and the index of the shard of each rank at `coordinates`."""
    mesh_dims = mesh_dims_of(cuts)
    distinct, index = np.unique(coordinates[list(mesh_dims)], axis=1, return_inverse=True)
    by_mesh_dim = (dict(zip(mesh_dims, column, strict=True)) for column in distinct.T.tolist())
    return [held_spans(extent, parts_of(cuts, mesh_shape, at)) for at in by_mesh_dim], index.reshape(-1)


def _common_lengths(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    """[a, b] the number of indices that each of `a` and each of `b` have in common."""
    # All bounds cut the dim into pieces that each set of spans holds whole or not at all.
    bounds = np.unique(np.concatenate([spans.reshape(-1) for spans in (*a, *b)]))
    starts, lengths = bounds[:-1], np.diff(bounds)

    def holds(spans: np.ndarray) -> np.ndarray:
        if not len(spans):
            return np.zeros(len(starts), dtype=bool)
        last = np.searchsorted(spans[:, 0], starts, side="right") - 1
        return (last >= 0) & (starts < spans[last, 1])

    return (np.array([holds(spans) for spans in a]) * lengths) @ np.array([holds(spans) for spans in b]).T


def cells_meeting(extent: int, cuts: Cuts, mesh_shape: Sequence[int], wanted: Span) -> np.ndarray:
    """[n, cuts] the coordinates, in cutting order, of the shards of a tensor dim that may meet the span `wanted`.

    Exact for plain cuts, in time proportional to the result; all coordinates if a cut is strided.
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
        number = (np.minimum(high, stop) - 1 - start) // size - first + 1
        index = np.arange(number.sum()) - np.repeat(number.cumsum() - number, number) + np.repeat(first, number)
        cells = np.concatenate([np.repeat(cells, number, axis=0), index[:, None]], axis=1)
        size = np.repeat(size, number)
        start = np.repeat(start, number) + index * size
        stop = np.minimum(start + size, np.repeat(stop, number))
    return cells
