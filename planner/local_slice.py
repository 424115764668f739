"""Changes by which every rank keeps a part of what it holds, whatever the shape: where that part lies."""

from __future__ import annotations

from collections.abc import Sequence

from .exchange import Change
from .index_sets import cut, held_span, parts_of


class LocalSlice:
    """Where the target shard of one rank lies in its source shard, for tensors of any shape."""

    def __init__(self, change: Change, rank: int) -> None:
        mesh, source, target = change.mesh, change.source, change.target
        at, self._dims = mesh.coordinate(rank), []
        for d, cuts in target.all_cuts:
            parts = parts_of(cuts, mesh.shape, at)
            before = len(source.cuts(d))  # the source has the first of these cuts, and no others
            self._dims.append((d, parts[:before], parts[before:]))

    @staticmethod
    def applies(change: Change) -> bool:
        """Whether a change only cuts further what each rank holds, in one span along each tensor dim."""
        strided = change.source.strided_dims or change.target.strided_dims
        return change.stays and not (change.reduced or change.split or strided)

    def of(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shape of the source shard, where the target shard begins in it, and the shape of that."""
        source, start, target = list(shape), [0] * len(shape), list(shape)
        for d, before, after in self._dims:
            first, last = held = held_span(shape[d], before)
            for number, _, index in after:
                held = cut(held, number, index)
            source[d], start[d], target[d] = last - first, held[0] - first, held[1] - held[0]
        return tuple(source), tuple(start), tuple(target)
