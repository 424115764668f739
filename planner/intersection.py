"""Two layouts laid over each other: of pairs of a holder and a receiver, the boxes that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .index_sets import Parts, common_runs, held_span, mesh_dims_of, parts_of, spans_at
from .layout import Cuts, Layout


@dataclass(frozen=True, eq=False)
class Overlay:
    """n boxes; `pair` says of which pair each is, the rest as in `Boxes`."""

    pair: np.ndarray  # [n]
    source_start: np.ndarray  # [n, tensor dims]
    target_start: np.ndarray  # [n, tensor dims]
    extent: np.ndarray  # [n, axes]
    source_step: np.ndarray  # [n, axes]
    target_step: np.ndarray  # [n, axes]
    axes: tuple[int, ...]


def overlay(
    shape: Sequence[int],
    source: Layout,
    source_mesh: Sequence[int],
    holders: np.ndarray,
    target: Layout,
    target_mesh: Sequence[int],
    receivers: np.ndarray,
) -> Overlay:
    """The boxes of pairs of coordinates, [pairs, mesh dims] each on its own mesh, in the order of pairs.

    A tensor dim that a strided shard cuts has two axes, one from span to span and one along them.
    """
    held_from, held_to = spans_at(shape, source, source_mesh, holders.T)
    wanted_from, wanted_to = spans_at(shape, target, target_mesh, receivers.T)
    start, stop = np.maximum(held_from, wanted_from), np.minimum(held_to, wanted_to)
    strided = sorted({*source.strided_dims, *target.strided_dims})
    meets = start < stop
    if strided:
        meets[strided] = True
    pair = np.flatnonzero(meets.all(axis=0))
    found = start - held_from, start - wanted_from, stop - start
    source_start, target_start, length = (x.T if len(pair) == len(holders) else x.T[pair] for x in found)
    if not strided:
        ones = np.ones_like(length)
        return Overlay(pair, source_start, target_start, length, ones, ones, tuple(range(len(shape))))
    runs: dict[int, np.ndarray] = {}
    for d in strided:
        rows, which = _runs_of_pairs(
            shape[d], source.cuts(d), source_mesh, holders[pair], target.cuts(d), target_mesh, receivers[pair]
        )
        pair, source_start, target_start, length = (x[which] for x in (pair, source_start, target_start, length))
        runs = {other: found[which] for other, found in runs.items()} | {d: rows}
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
    sizes, here, there = (np.stack(x, axis=1) for x in (extent, source_step, target_step))
    return Overlay(pair, source_start, target_start, sizes, here, there, tuple(axes))


class FewPairs:
    """`overlay` of a few pairs, in tensors of ever new shapes, where nothing is strided: in Python numbers, which take
    less time than arrays of so few.

    Args:
        holders, receivers: coordinates, each on its own mesh, of each pair.
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
        numbers: dict[tuple[int, Parts], int] = {}
        self.pairs: list[list[tuple[int, int, int]]] = []
        """Of each pair, for each tensor dim that is cut: which of `cells` is held, and which is wanted."""
        for holder, receiver in zip(holders, receivers, strict=True):
            cut = []
            for d in dims:
                held = d, parts_of(source.cuts(d), source_mesh, tuple(holder))
                wanted = d, parts_of(target.cuts(d), target_mesh, tuple(receiver))
                cut.append((d, *[numbers.setdefault(cell, len(numbers)) for cell in (held, wanted)]))
            self.pairs.append(cut)  # type: ignore[arg-type]
        self.cells = list(numbers)

    def overlay(self, shape: Sequence[int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Pair, source start, target start and extent of each box, in the order of pairs."""
        if 0 in shape:
            return
        spans = [held_span(shape[d], parts) for d, parts in self.cells]
        for pair, cut in enumerate(self.pairs):
            source, extent = [0] * len(shape), list(shape)
            target = source.copy()
            for d, held, wanted in cut:
                (here, here_ends), (there, there_ends) = spans[held], spans[wanted]
                low, high = max(here, there), min(here_ends, there_ends)
                if low >= high:
                    break
                source[d], target[d], extent[d] = low - here, low - there, high - low
            else:
                yield pair, source, target, extent


def _runs_of_pairs(
    extent: int, held: Cuts, held_mesh: Sequence[int], holders: np.ndarray, wanted: Cuts,
    wanted_mesh: Sequence[int], receivers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The runs of each pair along one tensor dim, [n, 6], and the pair each is of, [n]."""
    mine, theirs = mesh_dims_of(held), mesh_dims_of(wanted)
    kinds, kind = np.unique(
        np.concatenate([holders[:, mine], receivers[:, theirs]], axis=1), axis=0, return_inverse=True
    )
    tables = []
    for row in kinds.tolist():
        at, to = dict(zip(mine, row, strict=False)), dict(zip(theirs, row[len(mine) :], strict=True))
        tables.append(common_runs(extent, parts_of(held, held_mesh, at), parts_of(wanted, wanted_mesh, to)))
    kind = kind.reshape(-1)
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    first = sizes.cumsum() - sizes
    count = sizes[kind] if len(tables) else np.zeros(0, dtype=np.int64)
    which = np.repeat(np.arange(len(kind)), count)
    row_of = np.arange(len(which)) - np.repeat(count.cumsum() - count - first[kind] if len(tables) else count, count)
    rows = np.concatenate(tables) if tables else np.zeros((0, 6), dtype=np.int64)
    return rows[row_of], which
