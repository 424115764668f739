"""What a rank holds: the span of a tensor dim that is left after mesh dims cut it in order, as torch.chunk does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .layout import Layout
from .mesh import Coordinate, Mesh

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


def spans_at(shape: Sequence[int], layout: Layout, mesh: Mesh, positions: np.ndarray) -> np.ndarray:
    """Start and stop of the shards at mesh positions, in each tensor dim: [tensor dims, positions, 2]."""
    coordinates = np.unravel_index(positions, mesh.shape)
    orders = dict(layout.orders)
    out = np.empty((len(shape), len(positions), 2), dtype=np.int64)
    for d, extent in enumerate(shape):
        start, stop = np.zeros(len(positions), dtype=np.int64), np.full(len(positions), extent, dtype=np.int64)
        for mesh_dim in orders.get(d, ()):
            size = -(-(stop - start) // mesh.shape[mesh_dim])
            low = np.minimum(start + coordinates[mesh_dim] * size, stop)
            start, stop = low, np.minimum(low + size, stop)
        out[d, :, 0], out[d, :, 1] = start, stop
    return out


@lru_cache(maxsize=65536)
def cells_meeting(extent: int, sizes: tuple[int, ...], wanted: Span) -> tuple[tuple[Coordinate, Span], ...]:
    """The cells of a dim cut by `sizes` in order that meet `wanted`: coordinates in cutting order, and spans.

    Descends only into parts that meet `wanted`, so the time goes with the number of cells found, not with the mesh.
    """
    low, high = wanted
    if low >= high:
        return ()
    found: list[tuple[Coordinate, Span]] = [((), (0, extent))]
    for parts in sizes:
        deeper = []
        for coordinate, span in found:
            size = -(-(span[1] - span[0]) // parts)
            first = max(low - span[0], 0) // size
            last = (min(high, span[1]) - 1 - span[0]) // size
            deeper += [((*coordinate, i), cut(span, parts, i)) for i in range(first, last + 1)]
        found = deeper
    return tuple(found)
