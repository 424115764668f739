"""Boxes of traced tensors: read by slices, put together to a tensor by concatenation.

The starts, extents and steps of boxes are ints. Along a tensor dim of symbolic size they count units of `scale[d]`
elements, which may be a `torch.SymInt`; boxes have one axis with step 1 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Size = int | torch.SymInt


class Piece(NamedTuple):
    """The value of a box of a tensor.

    Attributes:
        start: the first index of the box along each tensor dim.
        step: the distance of indices along each axis.
        value: of one dim for each axis.
        extent: of the value, in units.
    """

    start: Sequence[int]
    step: Sequence[int]
    extent: Sequence[int]
    value: torch.Tensor


def extent_of(extent: Sequence[int], axes: Sequence[int], scale: Sequence[Size]) -> list[Size]:
    """The elements of a box along each axis; `axes`: the tensor dim of each axis (`TransferTable`)."""
    return [n * scale[d] for n, d in zip(extent, axes, strict=True)]


def read_box(
    x: torch.Tensor,
    held: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    step: Sequence[int],
    axes: Sequence[int],
    scale: Sequence[Size],
) -> torch.Tensor:
    """A view of a box of `x`, of one dim for each axis.

    Args:
        held: the shape of `x` in units.
        start, extent, step, axes: of a row of a `TransferTable`.
    """
    dims: dict[int, int] = {}  # of the view, by axis
    for d in range(len(start)):
        mine = [a for a, dim in enumerate(axes) if dim == d]
        length = 1 + sum((extent[a] - 1) * step[a] for a in mine)
        if (start[d], length) != (0, held[d]):
            x = x.narrow(d, start[d] * scale[d], length * scale[d])
        at = d
        for a in mine[:-1]:  # a window for each index of an outer axis
            length -= (extent[a] - 1) * step[a]
            x, dims[a], at = x.unfold(at, length, max(step[a], 1)), at, x.ndim
        inner = mine[-1]
        dims[inner] = at
        if step[inner] > 1 and extent[inner] > 1:
            x = x[(slice(None),) * at + (slice(None, None, step[inner]),)]
    order = [dims[a] for a in range(len(axes))]
    return x if order == list(range(len(axes))) else x.permute(order)


def put_together(
    pieces: Sequence[Piece], held: Sequence[int], axes: Sequence[int], scale: Sequence[Size], like: torch.Tensor
) -> torch.Tensor:
    """The tensor that consists of the pieces, which cover it: a piece's value if there is only one.

    Args:
        held: the shape in units.
        axes: the tensor dim of each axis.
        like: gives dtype and device.
    """
    if pieces and list(axes) == list(range(len(held))) and all(n == 1 for piece in pieces for n in piece.step):
        joined = _joined(pieces)
        if joined is not None:
            return joined
    shape = [n * unit for n, unit in zip(held, scale, strict=True)]
    out, strides = like.new_empty(shape), _contiguous_strides(shape)
    for piece in pieces:
        offset = sum(n * unit * stride for n, unit, stride in zip(piece.start, scale, strides, strict=True))
        steps = [n * strides[d] for n, d in zip(piece.step, axes, strict=True)]
        out.as_strided(piece.value.shape, steps, offset).copy_(piece.value)
    return out


def _joined(pieces: Sequence[Piece]) -> torch.Tensor | None:
    """The concatenation of pieces, along one dim those of its parts along others; None if no dim divides them."""
    if len(pieces) == 1:
        return pieces[0].value
    for d in range(len(pieces[0].start)):
        parts = _divided(pieces, d)
        if len(parts) > 1:
            values = [value for value in map(_joined, parts) if value is not None]
            return torch.cat(values, d) if len(values) == len(parts) else None
    return None


def _divided(pieces: Sequence[Piece], d: int) -> list[list[Piece]]:
    """The pieces in the most groups of which each begins, along dim `d`, where the one before it ends."""
    parts: list[list[Piece]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start[d]):
        if not parts or piece.start[d] >= end:
            parts.append([])
        parts[-1].append(piece)
        end = max(end, piece.start[d] + piece.extent[d])
    return parts


def _contiguous_strides(shape: Sequence[Size]) -> list[Size]:
    strides: list[Size] = []
    step: Size = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step = step * n
    return strides
