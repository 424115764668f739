"""The indices that a rank holds along a tensor dim, after mesh dims cut it one after the other as `torch.chunk` does.

Plain cuts leave one span. A strided cut takes a part of each of several pieces and leaves several ascending spans,
which are contiguous in the local shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .distinct import numbered
from .layout import Cuts, Layout, pairs_of
from .mesh import Coordinate, Mesh
from .node_layout import NodeLayout
from .spans import (
    Parts,
    Span,
    Spans,
    common_runs,
    cut,
    held_spans,
    intersections,
    shards_meeting,
    spans_of_shards,
)


def parts_of(cuts: Cuts, mesh_shape: Sequence[int], coordinate: Mapping[int, int] | Coordinate) -> Parts:
    """The cuts of a tensor dim for the rank at `coordinate`."""
    return tuple((mesh_shape[m], split, coordinate[m]) for m, split in pairs_of(cuts))


def mesh_dims_of(cuts: Cuts) -> tuple[int, ...]:
    """The mesh dims of the cuts, the first cut first."""
    return tuple(m for m, _ in pairs_of(cuts))


def is_strided(cuts: Cuts) -> bool:
    """Whether one of the cuts is strided."""
    return tuple in map(type, cuts)


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
def cut_dims(
    layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> tuple[tuple[int, Parts, bool], ...]:
    """(tensor dim, cuts for the rank at `coordinate`, whether a cut is strided) of each tensor dim that is cut."""
    if isinstance(layout, NodeLayout):
        last, more = layout.tensor_dim, layout.parts(coordinate)
        cuts = {**dict(layout.all_cuts), last: layout.cuts(last)}
        parts: dict[int, Parts] = {d: parts_of(c, mesh_shape, coordinate) for d, c in cuts.items()}
        parts[last] += more
        return tuple((d, parts[d], is_strided(c)) for d, c in cuts.items())
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


def spans_by_dim(
    shape: Sequence[int], layout: Layout, mesh_shape: tuple[int, ...], coordinate: Coordinate
) -> list[list[Span]]:
    """The spans of the shard of the rank at `coordinate`, for each tensor dim."""
    spans: list[list[Span]] = [[(0, n)] for n in shape]
    for d, parts, strided in cut_dims(layout, mesh_shape, coordinate):
        whole = held_spans(shape[d], parts).tolist() if strided else [held_span(shape[d], parts)]
        spans[d] = [(low, high) for low, high in whole]
    return spans


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
    extent: int, order: Sequence[int], mesh_shape: Sequence[int], coordinates: Sequence[np.ndarray] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of the spans that the ranks at `coordinates`, an array for each mesh dim, hold of a tensor dim.

    Args:
        order: the mesh dims that cut it, the first cut first; all cuts are plain.

    Returns:
        Arrays of the shape to which the coordinates along `order` broadcast: without axes if nothing cuts it.
    """
    start: Any = np.int64(0)
    stop: Any = np.int64(extent)
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
    of the sums of its node. For strided tensor dims, those of the whole dim."""
    held = np.stack(spans_at(shape, layout, mesh.shape, mesh.coordinates)).T  # [positions, tensor dims, start and stop]
    if not isinstance(layout, NodeLayout):
        return held, held
    valid, d = held.copy(), layout.tensor_dim
    valid[:, d] = np.stack(layout.narrowed(held[:, d, 0], held[:, d, 1]), axis=1)
    return (held if layout.kind == "node sums" else valid), valid


def overlaps_of_spans(
    spans_a: Spans, shard_a: np.ndarray, spans_b: Spans, shard_b: np.ndarray, others: np.ndarray | None = None
) -> np.ndarray:
    """[a, b] the number of indices of a tensor dim that two ranks have in common.

    The elements that two shards have in common are the product over tensor dims.

    Args:
        spans_a, spans_b: the spans of distinct shards, in ascending order of their starts.
        shard_a, shard_b: [a] and [b] the index of the shard of each rank.
        others: [a, n] for each of `a` the indices of some of `b`; the result is [a, n].
    """
    common = np.zeros((int(shard_a.max(initial=-1)) + 1, int(shard_b.max(initial=-1)) + 1), dtype=np.int64)
    i, j, start, stop = intersections(spans_a.start, spans_a.stop, spans_b.start, spans_b.stop)
    np.add.at(common, (spans_a.shard[i], spans_b.shard[j]), stop - start)
    return common[shard_a[:, None], shard_b if others is None else shard_b[others]]


def distinct_spans(
    extent: int, cuts: Cuts, mesh_shape: Sequence[int], coordinates: Sequence[np.ndarray] | np.ndarray
) -> tuple[Spans, np.ndarray]:
    """The spans of the distinct shards along a tensor dim, and the index of the shard of each rank at `coordinates`, an
    array for each mesh dim: an array of the shape to which those of the cuts broadcast."""
    pairs = pairs_of(cuts)
    sizes = [mesh_shape[m] for m, _ in pairs]
    key = np.zeros((), dtype=np.int64)
    for m, _ in pairs:
        key = key * mesh_shape[m] + coordinates[m]
    found, shard = numbered(key.reshape(-1))
    index = np.stack(np.unravel_index(found, sizes), axis=1) if sizes else np.zeros((len(found), 0), dtype=np.int64)
    return spans_of_shards(extent, [(mesh_shape[m], split) for m, split in pairs], index), shard.reshape(key.shape)


def cells_meeting(extent: int, cuts: Cuts, mesh_shape: Sequence[int], wanted: Sequence[Span]) -> np.ndarray:
    """[n, cuts] the coordinates, in cutting order, of the shards of a tensor dim that meet one of the ascending spans
    `wanted`; in time proportional to the spans that they have in common."""
    pairs = [(mesh_shape[m], split) for m, split in pairs_of(cuts)]
    if is_strided(cuts) or len(wanted) > 1:
        return shards_meeting(extent, pairs, np.array(wanted, dtype=np.int64).reshape(-1, 2))
    return _plain_cells_meeting(extent, tuple([number for number, _ in pairs]), wanted[0] if wanted else (0, 0))


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
