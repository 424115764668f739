"""Redistributions in which every rank keeps a slice of its shard, for tensors of any shape."""

from __future__ import annotations

from collections.abc import Sequence

from ..layouts.index_sets import cut, held_span, parts_of
from .layout_change import LayoutChange


class LocalSlice:
    """The slice of the source shard of one rank that is its target shard, for tensors of any shape."""

    def __init__(self, change: LayoutChange, rank: int) -> None:
        mesh, source, target = change.source_mesh, change.source, change.target
        at, self._dims = mesh.coordinate(rank), []
        for d, cuts in target.all_cuts:
            parts = parts_of(cuts, mesh.shape, at)
            before = len(source.cuts(d))  # the cuts of the source are the first of these
            self._dims.append((d, parts[:before], parts[before:]))

    @staticmethod
    def applies(change: LayoutChange) -> bool:
        """Whether a change only cuts shards further, into one contiguous slice per tensor dim."""
        strided = change.source.strided_dims or change.target.strided_dims
        return change.is_local and not (change.reduced or change.split or strided)

    def of(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shape of the source shard, the start of the target shard in it, and the shape of the target shard."""
        source, start, target = list(shape), [0] * len(shape), list(shape)
        for d, before, after in self._dims:
            first, last = held = held_span(shape[d], before)
            for number, _, index in after:
                held = cut(held, number, index)
            source[d], start[d], target[d] = last - first, held[0] - first, held[1] - held[0]
        return tuple(source), tuple(start), tuple(target)
