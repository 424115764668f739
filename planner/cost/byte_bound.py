"""The lower bound on the bytes that a rank receives in a redistribution.

A rank must receive the elements of its target shard that are not in its source shard. One exchange over all mesh dims
that change meets the bound exactly. With partial layouts there is no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..layouts.dtypes import ITEMSIZE
from ..layouts.index_sets import elements_in_common, held_sizes
from ..layouts.layout import Layout
from ..layouts.mesh import Coordinate, Mesh


def bytes_bound(
    shape: tuple[int, ...],
    dtype: str,
    source_mesh: Mesh,
    source: Layout,
    target_mesh: Mesh,
    target: Layout,
    coordinates: Iterable[tuple[Coordinate | None, Coordinate | None]],
) -> list[int] | None:
    """The bytes that each rank must receive at least; None if a layout is partial.

    Args:
        shape: the global shape.
        coordinates: of each rank, its coordinates in the source mesh and in the target mesh; None where it is not in
            the mesh.
    """
    if source.has_partial or target.has_partial:
        return None
    bound = []
    for held_at, wanted_at in coordinates:
        missing = 0
        if wanted_at is not None:
            missing = math.prod(held_sizes(shape, target, target_mesh.shape, wanted_at))
            if held_at is not None:
                at = source_mesh.shape, held_at
                missing -= elements_in_common(shape, source, at, target, (target_mesh.shape, wanted_at))
        bound.append(missing * ITEMSIZE[dtype])
    return bound
