"""Where in a symmetric window the data of a step lies, and how many bytes the window needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...planner import ITEMSIZE, Layout, Mesh, Program, Step, format_bytes, spans_at
from ..transports.symmetric_memory.window import PIECE_ALIGNMENT

_Spans = tuple[np.ndarray, np.ndarray]


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
    held, wanted = _held_and_wanted(program, step, members)
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
    held, wanted = _held_and_wanted(program, step, members)
    if not _are_wide(held, wanted, wanted[0][:, :, None], (wanted[1] - wanted[0])[:, :, None], size):
        return "in which runs do not begin and end at multiples of 16 bytes"
    return ""


def why_not_pulled(program: Program, step: Step, members: Sequence[int]) -> str:
    """Why these positions do not read from each other's memory if they may as well push, equal on all ranks; "" if they
    do.

    Accesses to peers are to be 16 bytes wide. What is pulled lies in a copy of the peer's shard, whose runs begin and
    end where its shape has them; what is pushed lies in pieces that are padded (`pushed_pieces`).
    """
    if not _is_plain(step) or pushed_pieces(program, step, members) is None:
        return ""
    held, wanted = _held_and_wanted(program, step, members)
    if _are_wide(held, wanted, held[0][:, None, :], (held[1] - held[0])[:, None, :], ITEMSIZE[program.dtype]):
        return ""
    return "of which runs do not begin and end at multiples of 16 bytes"


def _held_and_wanted(program: Program, step: Step, members: Sequence[int]) -> tuple[_Spans, _Spans]:
    """Of a step whose shards are boxes, those before it and after it."""
    held = _spans(program, step.source, step.source_mesh, members)
    return held, _spans(program, step.target, step.target_mesh, members)


def _are_wide(held: _Spans, wanted: _Spans, first: np.ndarray, shape: np.ndarray, size: int) -> bool:
    """Whether all that goes from one rank to another is made of runs that begin and end at multiples of 16 bytes in one
    of the two tensors: in it and in the other one they are contiguous.

    Args:
        first, shape: [tensor dims, receivers, senders], of the shards that the tensor consists of; of one of the ranks
            alone: with one entry for all of the others.
        size: of an element, in bytes.
    """
    start = np.maximum(held[0][:, None, :], wanted[0][:, :, None])
    extent = np.minimum(held[1][:, None, :], wanted[1][:, :, None]) - start
    lengths = (wanted[1] - wanted[0])[:, :, None], (held[1] - held[0])[:, None, :]
    at = start - first
    moved = np.asarray((extent > 0).all(axis=0))
    np.fill_diagonal(moved, False)
    stride = np.full(moved.shape, size)  # bytes
    inside = moved.copy()  # boxes whose runs go on along the next dim
    wide = ~moved
    for d in reversed(range(len(extent))):
        whole = (extent[d] == lengths[0][d]) & (extent[d] == lengths[1][d])
        # Runs end along this dim; along the ones before it they repeat.
        repeats = ((extent[:d] > 1) | (at[:d] > 0)).any(axis=0)
        bits = at[d] * stride | extent[d] * stride | np.where(repeats, shape[d] * stride, 0)
        wide |= inside & ~whole & (bits % PIECE_ALIGNMENT == 0)
        inside &= whole
        stride = stride * shape[d]
    return bool((wide | inside & (stride % PIECE_ALIGNMENT == 0)).all())


def _is_plain(step: Step) -> bool:
    """Whether each shard is one box, before and after a step."""
    return all(type(layout) is Layout and not layout.strided_dims for layout in (step.source, step.target))


def _spans(program: Program, layout: Layout, mesh: Mesh, members: Sequence[int]) -> _Spans:
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
