"""Intersections of two layouts: the boxes that a source shard and a target shard have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.index_sets import distinct_spans, is_strided, mesh_dims_of, spans_along
from ..layouts.layout import Cuts, Layout, pairs_of
from ..layouts.spans import Parts, ranges, runs_in_common
from .pairs import Coordinates, Pairs


@dataclass(frozen=True, eq=False)
class Intersection:
    """n boxes of pairs of a holder and a receiver; the fields are those of `TransferTable`, with an array for each
    tensor dim or axis: [n], or a single value for all boxes.

    Attributes:
        pair: [n] the index of the pair of each box; None: there is one box for each pair.
    """

    pair: np.ndarray | None
    source_start: list[np.ndarray]
    target_start: list[np.ndarray]
    extent: list[np.ndarray]
    source_step: list[np.ndarray]
    target_step: list[np.ndarray]
    axes: tuple[int, ...]


def intersect(
    shape: Sequence[int],
    source: Layout,
    source_mesh: Sequence[int],
    target: Layout,
    target_mesh: Sequence[int],
    pairs: Pairs,
) -> Intersection:
    """Intersect the source shards of holders with the target shards of receivers, pair by pair.

    Args:
        shape: the global shape.
        source_mesh, target_mesh: mesh shapes.

    Returns:
        The boxes in the order of pairs. A tensor dim that a strided shard cuts has two axes: one from span to span and
        one along the spans.
    """
    strided = sorted({*source.strided_dims, *target.strided_dims})
    plain: dict[int, tuple[Any, Any, Any]] = {}  # start in the holder's shard, in the receiver's shard, length
    meets = np.array(True)
    for d, extent in enumerate(shape):
        if d not in strided:
            held_from, held_to = spans_along(extent, source.order(d), source_mesh, pairs.holders)
            wanted_from, wanted_to = spans_along(extent, target.order(d), target_mesh, pairs.receivers)
            start, stop = np.maximum(held_from, wanted_from), np.minimum(held_to, wanted_to)
            plain[d] = start - held_from, start - wanted_from, stop - start
            of_dim = start < stop
            meets = meets if of_dim.all() else meets & of_dim
    pair = None
    if not meets.all():
        pair = np.flatnonzero(pairs.values(meets))
        pairs = pairs.select(pair)
    runs: dict[int, np.ndarray] = {}
    for d in strided:
        of_dim, first, count = _runs_along(
            shape[d], source.cuts(d), source_mesh, pairs.holders, target.cuts(d), target_mesh, pairs.receivers
        )
        first, count = pairs.values(first), pairs.values(count)
        if (count != 1).any():
            index, first = ranges(first, first + count - 1)
            pair = index if pair is None else pair[index]
            pairs, runs = pairs.select(index), {other: x[index] for other, x in runs.items()}
        runs[d] = of_dim[first]
    common = Intersection(
        pair, [], [], [], [], [], tuple([d for d in range(len(shape)) for _ in range(1 + (d in runs))])
    )
    one = np.array(1)
    for d in range(len(shape)):
        if d in runs:
            source_start, target_start, count, length, source_step, target_step = runs[d].T
            common.extent.append(count)
            common.source_step.append(source_step)
            common.target_step.append(target_step)
        else:
            source_start, target_start, length = map(pairs.compact, plain[d])
        common.source_start.append(source_start)
        common.target_start.append(target_start)
        common.extent.append(length)
        common.source_step.append(one)
        common.target_step.append(one)
    return common


class FewPairs:
    """`intersect` for a few fixed pairs and tensors of varying shape, without strided shards.

    It uses Python numbers, which for a few pairs are faster than arrays.

    Args:
        source_mesh, target_mesh: mesh shapes.
        holders, receivers: the coordinates of each pair, each on its own mesh.
    """

    def __init__(
        self,
        source: Layout,
        source_mesh: Sequence[int],
        holders: Sequence[Sequence[int]],
        target: Layout,
        target_mesh: Sequence[int],
        receivers: Sequence[Sequence[int]],
    ) -> None:
        dims = sorted({d for d, _ in (*source.all_cuts, *target.all_cuts)})
        ends = (source, source_mesh, holders), (target, target_mesh, receivers)
        # The cuts of each tensor dim by the holders and by the receivers: (number of parts, split factor, mesh dim).
        cuts = [[[(mesh[m], split, m) for m, split in pairs_of(x.cuts(d))] for d in dims] for x, mesh, _ in ends]
        indices: dict[tuple[int, Parts], int] = {}

        def cells(cuts: Sequence[Sequence[tuple[int, int, int]]], at: Sequence[int]) -> list[int]:
            """For each tensor dim of `dims` the index of the part of the rank at a coordinate."""
            parts = [
                (d, tuple([(number, split, at[m]) for number, split, m in c])) for d, c in zip(dims, cuts, strict=True)
            ]
            return [indices.setdefault(cell, len(indices)) for cell in parts]

        self.pairs = [
            list(zip(dims, cells(cuts[0], holder), cells(cuts[1], receiver), strict=True))
            for holder, receiver in zip(holders, receivers, strict=True)
        ]
        """For each pair and each tensor dim that is cut: (tensor dim, index in `cells` of the held part, of the wanted
        part)."""
        self.cells = list(indices)

    def intersections(self, shape: Sequence[int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """The pair index, source start, target start and extent of each box, in the order of pairs."""
        if 0 in shape:
            return
        spans = []
        for d, parts in self.cells:  # as `held_span`, without function calls
            start, stop = 0, shape[d]
            for number, _, index in parts:
                size = -(-(stop - start) // number)
                start += index * size
                start = start if start < stop else stop
                stop = start + size if start + size < stop else stop
            spans.append((start, stop))
        for pair, cut in enumerate(self.pairs):
            source, extent = [0] * len(shape), list(shape)
            target = source.copy()
            for d, held, wanted in cut:
                (held_start, held_stop), (wanted_start, wanted_stop) = spans[held], spans[wanted]
                low, high = max(held_start, wanted_start), min(held_stop, wanted_stop)
                if low >= high:
                    break
                source[d], target[d], extent[d] = low - held_start, low - wanted_start, high - low
            else:
                yield pair, source, target, extent


def common_length(
    extent: int, held: Cuts, held_mesh: Sequence[int], holders: Coordinates, wanted: Cuts,
    wanted_mesh: Sequence[int], receivers: Coordinates,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """How many indices of a tensor dim holders and receivers have in common, and how many receivers want: arrays of the
    shapes to which the coordinates broadcast."""
    if not (is_strided(held) or is_strided(wanted)):
        held_from, held_to = spans_along(extent, mesh_dims_of(held), held_mesh, holders)
        wanted_from, wanted_to = spans_along(extent, mesh_dims_of(wanted), wanted_mesh, receivers)
        common = np.minimum(held_to, wanted_to) - np.maximum(held_from, wanted_from)
        return np.maximum(common, 0), wanted_to - wanted_from
    runs, first, count = _runs_along(extent, held, held_mesh, holders, wanted, wanted_mesh, receivers)
    total = np.append(0, (runs[:, 2] * runs[:, 3]).cumsum())
    spans, receiver = distinct_spans(extent, wanted, wanted_mesh, receivers)
    return total[first + count] - total[first], spans.sizes(int(receiver.max(initial=-1)) + 1)[receiver]


def _runs_along(
    extent: int, held: Cuts, held_mesh: Sequence[int], holders: Coordinates, wanted: Cuts,
    wanted_mesh: Sequence[int], receivers: Coordinates,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """The runs of all pairs along one tensor dim [n, 6] (`common_runs`), and for each pair the index of its first run
    and the number of its runs."""
    held_spans, holder = distinct_spans(extent, held, held_mesh, holders)
    wanted_spans, receiver = distinct_spans(extent, wanted, wanted_mesh, receivers)
    of_holder, of_receiver, runs = runs_in_common(held_spans, wanted_spans)
    shards, number = int(holder.max(initial=-1)) + 1, int(receiver.max(initial=-1)) + 1
    keys, pairs = of_holder * number + of_receiver, holder * number + receiver
    if shards <= 1 or number <= 1:  # as for the pairs of one rank: as many keys as shards
        count = np.bincount(keys, minlength=shards * number)
        return runs, (count.cumsum() - count)[pairs], count[pairs]
    first = np.searchsorted(keys, pairs)
    return runs, first, np.searchsorted(keys, pairs, side="right") - first
