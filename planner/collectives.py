"""Which steps are collectives of torch.distributed: all-gathers, and reductions in an order of the backend's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .exchange.steps import Exchange
from .layouts.node_layout import NodeLayout
from .layouts.placements import Partial, Replicate, Shard
from .program_base import ProgramBase

_REDUCED_BY_BACKENDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")


def is_even_all_gather(program: ProgramBase, step: Exchange, members: Sequence[int]) -> bool:
    """Whether a step makes shards of one size replicated: each member receives the whole shard of each other."""
    if isinstance(step.source, NodeLayout) or isinstance(step.target, NodeLayout):
        return False
    before, after = _group_placements(step)
    if not (all(isinstance(p, Shard) for p in before) and all(isinstance(p, Replicate) for p in after)):
        return False
    # Each cut leaves the first part at least the average and the last part at most that, so these two are equal only if
    # all are.
    first, last = (math.prod(program.shape_before(step, p)) for p in (members[0], members[-1]))
    return first == last


def backend_reduction(program: ProgramBase, step: Exchange, members: Sequence[int]) -> str | None:
    """The collective that reduces as a step does, in an order that the backend chooses: "all-reduce", "reduce-scatter",
    or None."""
    if isinstance(step.source, NodeLayout) or isinstance(step.target, NodeLayout):
        return None  # parts of nodes are no shards of a backend's collective
    before, after = _group_placements(step)
    if program.dtype not in _REDUCED_BY_BACKENDS or not all(isinstance(p, Partial) for p in before):
        return None
    if step.reduce is None or step.reduce.op not in ("sum", "prod"):
        return None  # max and min depend on no order, and backends may lose NaN
    if all(isinstance(p, Replicate) for p in after):
        return "all-reduce"
    even = len({program.shape_after(step, p) for p in members}) == 1
    return "reduce-scatter" if even and all(isinstance(p, Shard) for p in after) else None


def _group_placements(step: Exchange) -> tuple[list[object], list[object]]:
    """The placements, before and after a step, of the mesh dims that its group spans."""
    group = step.group or ()
    return [step.source.placements[m] for m in group], [step.target.placements[m] for m in group]
