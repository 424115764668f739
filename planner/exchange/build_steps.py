"""Builds the steps of programs from layout changes."""

from __future__ import annotations

from functools import lru_cache

from ..layouts.dtypes import check_computed, identity
from ..layouts.placements import Partial
from .layout_change import LayoutChange
from .senders import communicates, transfer_table
from .steps import Exchange, Local, Reduce, Step


@lru_cache(maxsize=4096)
def _reduction_and_fill(change: LayoutChange) -> tuple[Reduce | None, float | int | bool]:
    """The reduction of a change (None for plain copies) and its fill value, for tensors of any shape."""
    plain = change.contributors == 1 and change.divisor == 1
    reduce = None if plain else Reduce(change.op, change.contributors, change.divisor)
    if reduce is not None:
        check_computed(change.dtype)
    partials = [p for p in change.target.placements if isinstance(p, Partial)]
    return reduce, identity(change.dtype, partials[0].op) if partials else 0


def build_step(change: LayoutChange, shape: tuple[int, ...], rank: int | None) -> Step:
    """The step that performs a layout change on a tensor of `shape`: of all ranks, or of position `rank`."""
    reduce, fill = _reduction_and_fill(change)
    table = transfer_table(change, shape, rank)
    fields = (change.source_mesh, change.source, change.target_mesh, change.target, table, reduce, fill)
    return Exchange(*fields, change.closure) if communicates(change, shape, table) else Local(*fields)
