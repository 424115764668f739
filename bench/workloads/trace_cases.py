"""The distinct redistributions of a trace, as cases to replay or to price, and the memory that they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import ArgumentError
from ...planner import Layout, Mesh, plan
from ...planner.layouts.dtypes import ITEMSIZE
from ...planner.layouts.index_sets import held_sizes
from ...planner.render.explain import format_bytes
from ...runtime.tracing.trace_file import FSDP_COLLECTIVES, Cost, Entry, Trace
from ..harness.interleaved import KEPT, Rotation
from ..harness.machine import available_memory
from . import scaled_down


@dataclass(frozen=True)
class Case:
    """One distinct redistribution, from all its places.

    Attributes:
        entries: one, or one for each of several equal meshes without common ranks, as along a dim of a larger mesh:
            their ranks redistribute at the same time, in the program and in a replay.
        cost: calls of a rank, and the bytes that it receives in each, as they were recorded.
        shape, bytes_received: the recorded ones, or scaled.
    """

    entries: tuple[Entry, ...]
    cost: Cost
    wheres: tuple[str, ...]
    shape: tuple[int, ...]
    bytes_received: int

    @property
    def entry(self) -> Entry:
        """The first of them."""
        return self.entries[0]

    @property
    def collective(self) -> str | None:
        """The collective that FSDP2 calls; None where DTensor redistributes."""
        return FSDP_COLLECTIVES[self.entry.source, self.entry.target] if self.entry.fsdp else None

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return len({rank for entry in self.entries for mesh in meshes_of(entry) for rank in mesh.rank_array.tolist()})

    def of_rank(self, rank: int) -> Entry:
        """The entry of the mesh that contains a rank; the first one for other ranks."""
        return next((entry for entry in self.entries if rank in entry.mesh.rank_array), self.entry)

    def scaled(self) -> Case:
        """With an eighth of every size of 64 and more, and the bytes that then the rank with most receives."""
        entry, shape = self.entry, tuple(map(scaled_down, self.shape))
        if entry.fsdp:  # whose flat tensors are padded to even shards
            shape = tuple(-(-n // entry.mesh.shape[-1]) * entry.mesh.shape[-1] for n in shape)
        mesh, other = meshes_of(entry)
        program = plan(mesh, shape, entry.dtype, entry.source, entry.target, target_mesh=other)
        return replace(self, shape=shape, bytes_received=max(program.bytes_received))


def meshes_of(entry: Entry) -> tuple[Mesh, Mesh]:
    """The source's and the target's."""
    return entry.mesh, entry.target_mesh or entry.mesh


def distinct(trace: Trace, of_ranks: Sequence[Trace] = ()) -> list[Case]:
    """The redistributions, from all places and all of several equal meshes; those that move most bytes first.

    Args:
        of_ranks: the traces that `trace` was merged from; none: it is of one rank, or of ranks that do the same. Ranks
            may ask for the same from different places, whose calls are not one rank's then.
    """
    families: dict[Entry, dict[Entry, list[Entry]]] = {}
    for entry, _ in trace.heaviest_first():
        one = replace(entry, where="", traced=False)
        kind = one if one.target_mesh else replace(one, mesh=Mesh(one.mesh.shape, one.mesh.names))
        families.setdefault(kind, {}).setdefault(one, []).append(entry)
    cases = []
    for family in families.values():
        ranks = [rank for one in family for rank in one.mesh.rank_array.tolist()]
        together = len(ranks) == len(set(ranks))
        apart = [family] if together else [{one: places} for one, places in family.items()]
        cases += [_case(alike, of_ranks or [trace]) for alike in apart]
    return sorted(cases, key=lambda case: -case.cost.total_bytes)


def _place(entry: Entry) -> str:
    return f"{entry.where}, traced" if entry.traced else entry.where


def _case(family: dict[Entry, list[Entry]], of_ranks: Sequence[Trace]) -> Case:
    costs = [
        [of.redistributions[entry] for entry in places if entry in of.redistributions]
        for places in family.values()
        for of in of_ranks
    ]
    calls = max(sum(cost.calls for cost in of_mesh) for of_mesh in costs)
    wheres = dict.fromkeys(_place(entry) for places in family.values() for entry in places)
    received = max(cost.bytes_received for of_mesh in costs for cost in of_mesh)
    return Case(tuple(family), Cost(calls, received), tuple(wheres), next(iter(family)).shape, received)


def check_memory(cases: Sequence[Case], cache_bytes: int) -> None:
    """Check that each case fits into memory, since ranks would be killed; they run one after the other.

    Raises:
        ArgumentError: a case needs more memory than is free.
    """
    there = available_memory()
    needed, case = max(((_bytes_needed(case, cache_bytes), case) for case in cases), key=lambda pair: pair[0])
    if needed > there:
        one = case.entry
        raise ArgumentError(
            f"TRACE: {one.source} → {one.target} of {one.dtype}{list(case.shape)}, {case.wheres[0]}, takes some "
            f"{format_bytes(needed)} of memory on all ranks together; allowed: up to {format_bytes(there)}, what is "
            f"free here. --scaled takes an eighth of the sizes, --only TEXT and --most N leave cases out, --topology "
            f"prices without running"
        )


def _bytes_needed(case: Case, cache_bytes: int) -> int:
    """Of all ranks together while they are timed: the sources that take turns, twice for an all-reduce in place, and a
    copy of one for peers; of either side `KEPT` outputs, a new one, and the buffers that it is computed from."""
    sources = targets = largest = 0
    for entry in case.entries:
        (mesh, other), itemsize = meshes_of(entry), ITEMSIZE[entry.dtype]
        source, target = (
            math.prod(held_sizes(case.shape, Layout.parse(text, of.shape), of.shape, (0,) * of.ndim)) * itemsize
            for of, text in ((mesh, entry.source), (other, entry.target))
        )
        sources, targets, largest = sources + mesh.size * source, targets + other.size * target, max(largest, source)
    sets = Rotation.of(largest, case.ranks, cache_bytes).sets * (2 if case.collective == "all_reduce" else 1)
    return sources * (sets + 1) + targets * (2 * KEPT + 2)
