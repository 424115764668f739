"""Where in a symmetric window the data of a step lies, and how many bytes the window needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...planner import ITEMSIZE, Layout, Mesh, Program, Step, format_bytes, spans_at
from ..transports.symmetric_memory.window import PIECE_ALIGNMENT


class PushedPieces(NamedTuple):
    """The places of what ranks push to each other: contiguous pieces, one of each sender, at multiples of 16 bytes.

    A piece is followed by unused bytes up to the next multiple of 16, so it is written in stores of 16 bytes whatever
    its length is.

    Attributes:
        first: the first element of a sender's piece in the receiver's window, by the positions (receiver, sender).
        nbytes: of the largest window.
    """

    first: Mapping[tuple[int, int], int]
    nbytes: int


def pushed_pieces(program: Program, step: Step, members: Sequence[int]) -> PushedPieces | None:
    """The pieces that these positions push to each other, equal on all ranks; None where the receiver's window has to
    be laid out as its output instead.

    A rank of a program knows only its own boxes. The place of its piece depends on the lengths of the pieces before it,
    which follow from the shards. This gives one piece for each pair, unless a shard is strided or cut by nodes, and too
    many where a source is replicated along the group, since only one of equal holders sends: then windows would be
    larger than outputs.
    """
    if not _is_plain(step):
        return None
    held = _spans(program, step.source, step.source_mesh, members)
    wanted = _spans(program, step.target, step.target_mesh, members)
    # [tensor dims, receiver, sender]
    common = np.minimum(held[1][:, None, :], wanted[1][:, :, None])
    common -= np.maximum(held[0][:, None, :], wanted[0][:, :, None])
    nbytes = np.maximum(common, 0).prod(axis=0) * ITEMSIZE[program.dtype]
    np.fill_diagonal(nbytes, 0)
    ends = (-(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT).cumsum(axis=1)
    largest = int(ends[:, -1].max())
    if largest > _placed_bytes(program, step, members) + PIECE_ALIGNMENT * len(members):
        return None
    first = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1) // ITEMSIZE[program.dtype]
    pairs = ((receiver, sender) for receiver in members for sender in members)
    return PushedPieces(dict(zip(pairs, first.reshape(-1).tolist(), strict=True)), largest)


def why_not_direct(program: Program, step: Step, members: Sequence[int], nbytes: int) -> str:
    """Why these positions do not write directly into outputs in buffers of `nbytes`, equal on all ranks; "" if they do.

    Stores to peers are to be 16 bytes wide. In an output, which is laid out as its user expects, they are so only where
    all runs begin and end at multiples of 16 bytes; a window takes pieces of any shape.
    """
    size = ITEMSIZE[program.dtype]
    largest = max(math.prod(program.shape_after(step, p)) for p in members) * size
    if largest > nbytes:
        return f"which are {format_bytes(largest)} and the pooled buffers {format_bytes(nbytes)}"
    if not _is_plain(step):
        return "whose shards are strided or cut by nodes"
    held = _spans(program, step.source, step.source_mesh, members)
    wanted = _spans(program, step.target, step.target_mesh, members)
    shapes = ((wanted[1] - wanted[0]).T.tolist(), (held[1] - held[0]).T.tolist())
    for r, s in ((r, s) for r in range(len(members)) for s in range(len(members)) if r != s):
        start = np.maximum(held[0][:, s], wanted[0][:, r])
        extent = np.minimum(held[1][:, s], wanted[1][:, r]) - start
        at = (start - wanted[0][:, r]).tolist()
        if (extent > 0).all() and not _is_wide(at, extent.tolist(), shapes[0][r], shapes[1][s], size):
            return "in which runs do not begin and end at multiples of 16 bytes"
    return ""


def _is_wide(
    start: Sequence[int], extent: Sequence[int], target: Sequence[int], source: Sequence[int], size: int
) -> bool:
    """Whether all runs of a box that are contiguous in the target and in the source, tensors of these shapes, begin and
    end at multiples of 16 bytes in the target, where the box is at `start`."""
    stride = size  # bytes
    for d in reversed(range(len(extent))):
        if not extent[d] == target[d] == source[d]:
            # Runs end along this dim; along the ones before it they repeat.
            repeats = any(n > 1 for n in extent[:d]) or any(start[:d])
            terms = start[d] * stride, extent[d] * stride, target[d] * stride if repeats else 0
            return all(term % PIECE_ALIGNMENT == 0 for term in terms)
        stride *= target[d]
    return stride % PIECE_ALIGNMENT == 0


def _is_plain(step: Step) -> bool:
    """Whether each shard is one box, before and after a step."""
    return all(type(layout) is Layout and not layout.strided_dims for layout in (step.source, step.target))


def _spans(program: Program, layout: Layout, mesh: Mesh, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop [tensor dims, members] of the shards of positions; empty for those that are not in the mesh."""
    at = [program.coordinate_in(mesh, position) for position in members]
    coordinates = np.array([(0,) * mesh.ndim if c is None else c for c in at], np.int64).reshape(len(at), mesh.ndim)
    start, stop = spans_at(program.shape, layout, mesh.shape, coordinates.T)
    stop[:, [c is None for c in at]] = 0
    return start, stop


def window_bytes(program: Program, step: Step, members: Sequence[int], algorithm: str) -> int:
    """The bytes of a window of these positions: of the input for a pull, otherwise of what peers push."""
    if algorithm == "pull":
        return max(math.prod(program.shape_before(step, p)) for p in members) * ITEMSIZE[program.dtype]
    pieces = pushed_pieces(program, step, members)
    return _placed_bytes(program, step, members) if pieces is None else pieces.nbytes


def _placed_bytes(program: Program, step: Step, members: Sequence[int]) -> int:
    """The bytes of a window with a staging slot of the output's shape for each contribution."""
    elements = max(math.prod(program.shape_after(step, p)) for p in members) * max(step.staged_terms, 1)
    return elements * ITEMSIZE[program.dtype]
