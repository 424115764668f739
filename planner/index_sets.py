"""What a rank holds: the span of a tensor dim that is left after mesh dims cut it in order, as torch.chunk does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .layout import Layout
from .mesh import Coordinate

Span = tuple[int, int]  # start, stop


def cut(span: Span, parts: int, index: int) -> Span:
    """Part `index` of `parts` of a span: ceil(length / parts) each, the last ones shorter or empty."""
    start, stop = span
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def held_span(extent: int, order: Sequence[int], mesh_shape: Sequence[int], coordinate: Coordinate) -> Span:
    """The span of a tensor dim of `extent` that the rank at `coordinate` holds."""
    span = (0, extent)
    for mesh_dim in order:
        span = cut(span, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return span


def held_box(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Coordinate
) -> tuple[Span, ...]:
    """The spans, one per tensor dim, of the shard of the rank at `coordinate`."""
    orders = dict(layout.orders)
    return tuple(held_span(n, orders.get(d, ()), mesh_shape, coordinate) for d, n in enumerate(shape))


def spans_along(
    extent: int, order: Sequence[int], mesh_shape: Sequence[int], coordinates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop, [n] each, of what the ranks at `coordinates`, [mesh dims, n], hold of a tensor dim."""
    start = np.zeros(coordinates.shape[1], dtype=np.int64)
    stop = np.full(coordinates.shape[1], extent, dtype=np.int64)
    for mesh_dim in order:
        size = -(-(stop - start) // mesh_shape[mesh_dim])
        start = np.minimum(start + coordinates[mesh_dim] * size, stop)
        stop = np.minimum(start + size, stop)
    return start, stop


def spans_at(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinates: np.ndarray) -> np.ndarray:
    """Start and stop of the shards at `coordinates`, [mesh dims, n], in each tensor dim: [tensor dims, n, 2]."""
    orders = dict(layout.orders)
    out = np.empty((len(shape), coordinates.shape[1], 2), dtype=np.int64)
    for d, extent in enumerate(shape):
        out[d, :, 0], out[d, :, 1] = spans_along(extent, orders.get(d, ()), mesh_shape, coordinates)
    return out


def overlaps(
    extent: int,
    cuts_a: Sequence[int],
    cuts_b: Sequence[int],
    mesh_shape: Sequence[int],
    coordinates_a: np.ndarray,
    coordinates_b: np.ndarray,
) -> np.ndarray:
    """How many indices of a tensor dim of `extent` two ranks both hold, [a, b].

    One at `coordinates_a`, [mesh dims, a], where the mesh dims `cuts_a` cut it, in that order; one at `coordinates_b`,
    [mesh dims, b], where `cuts_b` do. What two shards have in common is the product over tensor dims.
    """
    start_a, stop_a = spans_along(extent, cuts_a, mesh_shape, coordinates_a)
    start_b, stop_b = spans_along(extent, cuts_b, mesh_shape, coordinates_b)
    common = np.minimum(stop_a[:, None], stop_b) - np.maximum(start_a[:, None], start_b)
    return np.maximum(common, 0)


@lru_cache(maxsize=4096)
def cells_meeting(extent: int, sizes: tuple[int, ...], wanted: Span) -> np.ndarray:
    """The cells of a dim cut by `sizes` in order that meet `wanted`: coordinates in cutting order, [n, cuts].

    Descends only into parts that meet `wanted`, so the time goes with the number of cells found, not with the mesh.
    """
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
