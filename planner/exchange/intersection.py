"""Intersections of two layouts: the boxes that a source shard and a target shard have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..layouts.index_sets import distinct_spans, parts_of, spans_at
from ..layouts.layout import Cuts, Layout
from ..layouts.spans import MeshParts, runs_in_common


@dataclass(frozen=True, eq=False)
class Intersection:
    """n boxes; `pair` is the index of the (holder, receiver) pair of each, the other fields are as in
    `TransferTable`."""

    pair: np.ndarray  # [n]
    source_start: np.ndarray  # [n, tensor dims]
    target_start: np.ndarray  # [n, tensor dims]
    extent: np.ndarray  # [n, axes]
    source_step: np.ndarray  # [n, axes]
    target_step: np.ndarray  # [n, axes]
    axes: tuple[int, ...]


def intersect(
    shape: Sequence[int],
    source: Layout,
    source_mesh: Sequence[int],
    holders: np.ndarray,
    target: Layout,
    target_mesh: Sequence[int],
    receivers: np.ndarray,
) -> Intersection:
    """Intersect the source shards of `holders` with the target shards of `receivers`, pair by pair.

    Args:
        shape: the global shape.
        source_mesh, target_mesh: mesh shapes.
        holders, receivers: [pairs, mesh dims] coordinates, each on its own mesh.

    Returns:
        The boxes in the order of pairs. A tensor dim that a strided shard cuts has two axes: one from span to span and
        one along the spans.
    """
    held_from, held_to = spans_at(shape, source, source_mesh, holders.T)
    wanted_from, wanted_to = spans_at(shape, target, target_mesh, receivers.T)
    start, stop = np.maximum(held_from, wanted_from), np.minimum(held_to, wanted_to)
    strided = sorted({*source.strided_dims, *target.strided_dims})
    meets = start < stop
    if strided:
        meets[strided] = True
    pair = np.flatnonzero(meets.all(axis=0))
    boxes = start - held_from, start - wanted_from, stop - start
    source_start, target_start, length = (x.T if len(pair) == len(holders) else x.T[pair] for x in boxes)
    if not strided:
        ones = np.ones_like(length)
        return Intersection(pair, source_start, target_start, length, ones, ones, tuple(range(len(shape))))
    runs: dict[int, np.ndarray] = {}
    for d in strided:
        rows, index = _runs_of_pairs(
            shape[d], source.cuts(d), source_mesh, holders[pair], target.cuts(d), target_mesh, receivers[pair]
        )
        pair, source_start, target_start, length = (x[index] for x in (pair, source_start, target_start, length))
        runs = {other: of_dim[index] for other, of_dim in runs.items()} | {d: rows}
        source_start[:, d], target_start[:, d] = rows[:, 0], rows[:, 1]
    extent, source_step, target_step, axes = [], [], [], []
    ones = np.ones(len(pair), dtype=np.int64)
    for d in range(len(shape)):
        if d in runs:
            extent += [runs[d][:, 2], runs[d][:, 3]]
            source_step += [runs[d][:, 4], ones]
            target_step += [runs[d][:, 5], ones]
            axes += [d, d]
        else:
            extent.append(length[:, d])
            source_step.append(ones)
            target_step.append(ones)
            axes.append(d)
    extents, source_steps, target_steps = (np.stack(x, axis=1) for x in (extent, source_step, target_step))
    return Intersection(pair, source_start, target_start, extents, source_steps, target_steps, tuple(axes))


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
        indices: dict[tuple[int, MeshParts], int] = {}
        self.pairs: list[list[tuple[int, int, int]]] = []
        """For each pair and each tensor dim that is cut: (tensor dim, index in `cells` of the held part, of the wanted
        part)."""
        for holder, receiver in zip(holders, receivers, strict=True):
            cut = []
            for d in dims:
                held = d, parts_of(source.cuts(d), source_mesh, tuple(holder))
                wanted = d, parts_of(target.cuts(d), target_mesh, tuple(receiver))
                cut.append((d, *[indices.setdefault(cell, len(indices)) for cell in (held, wanted)]))
            self.pairs.append(cut)  # type: ignore[arg-type]
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


def _runs_of_pairs(
    extent: int, held: Cuts, held_mesh: Sequence[int], holders: np.ndarray, wanted: Cuts,
    wanted_mesh: Sequence[int], receivers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The runs of each pair along one tensor dim [n, 6] (`common_runs`), and the index of the pair of each run [n]."""
    held_spans, holder = distinct_spans(extent, held, held_mesh, holders.T)
    wanted_spans, receiver = distinct_spans(extent, wanted, wanted_mesh, receivers.T)
    of_holder, of_receiver, runs = runs_in_common(held_spans, wanted_spans)
    number = int(receiver.max(initial=-1)) + 1
    keys, wanted_keys = of_holder * number + of_receiver, holder * number + receiver
    first = np.searchsorted(keys, wanted_keys)
    count = np.searchsorted(keys, wanted_keys, side="right") - first
    index = np.repeat(np.arange(len(holders)), count)
    return runs[np.arange(len(index)) - np.repeat(count.cumsum() - count - first, count)], index
