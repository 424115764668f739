"""Tensors with symbolic sizes: a program for units of elements, which every size of a dim that is cut alike shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import UnsupportedError
from ...planner import Layout, Mesh, Program
from .boxes import Size


class Units(NamedTuple):
    """What a program for a tensor with symbolic sizes is planned for.

    Attributes:
        shape: the global shape in units.
        scale: the elements of a unit along each tensor dim.
        carried: the tensor dims that the layouts cut alike, so that all boxes must have the whole shard.
    """

    shape: tuple[int, ...]
    scale: tuple[Size, ...]
    carried: tuple[int, ...]


def units_of(
    shape: Sequence[Size], local_shape: Sequence[Size], mesh: Mesh, source: Layout, target: Layout, is_cross_mesh: bool
) -> Units:
    """The units of a redistribution.

    A symbolic size that both layouts cut alike has one unit for each shard. Of one that is divisible by the numbers of
    shards, which a guard states, a unit is a part that no cut divides. Any other is made an int, by a guard.

    Args:
        shape, local_shape: of the tensor, and of this rank's shard of the source.
    """
    units: list[int] = []
    scale: list[Size] = []
    carried: list[int] = []
    for d, (size, local) in enumerate(zip(shape, local_shape, strict=True)):
        before, after = source.cuts(d), target.cuts(d)
        parts = [_parts(cuts, mesh) for cuts in (before, after)]
        if not isinstance(size, torch.SymInt) or is_cross_mesh or 0 in parts:
            units.append(int(size))
            scale.append(1)
        elif before == after:
            units.append(parts[0])
            scale.append(local)
            carried.append(d)
        elif size % (whole := math.lcm(*parts)) == 0:
            units.append(whole)
            scale.append(size // whole)
        else:
            units.append(int(size))
            scale.append(1)
    return Units(tuple(units), tuple(scale), tuple(carried))


def check_carried(program: Program, carried: Sequence[int]) -> None:
    """
    Raises:
        UnsupportedError: a step of this rank's program cuts one of these tensor dims.
    """
    for step in program.steps:
        for row in step.boxes.rows():
            for d in carried:
                mine = [a for a, dim in enumerate(step.boxes.axes) if dim == d]
                if row.source_start[d] or row.target_start[d] or [row.extent[a] for a in mine] != [1]:
                    raise UnsupportedError(f"a symbolic size of tensor dim {d}, which a step cuts")


def _parts(cuts: Sequence[int | tuple[int, int]], mesh: Mesh) -> int:
    """The number of shards into which cuts divide a tensor dim; 0 for strided shards."""
    return math.prod(0 if isinstance(cut, tuple) else mesh.shape[cut] for cut in cuts)
