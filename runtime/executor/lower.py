"""How a transport carries out a step: which of its means, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...errors import ArgumentError, shown
from ...planner import ITEMSIZE, Exchange, Mesh, Partial, Program, Replicate, Shard, Step, format_bytes
from ..transports.capabilities import BACKENDS, Means, Rates, WindowPolicy, node_of

Reduction = Literal["ordered", "fast"]
REDUCTIONS: tuple[Reduction, ...] = ("ordered", "fast")


_REDUCED_BY_BACKENDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")


@dataclass(frozen=True)
class Lowering:
    """`algorithm`: "local", "push", "pull", "push and send", "send and receive", "all-to-all", "all-gather",
    "reduce-scatter" or "all-reduce"; `group`: the ranks of a collective in the order of its process group."""

    algorithm: str
    why: str
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


_PUSH = Lowering("push", "ranks write into each other's memory")
_LOCAL = Lowering("local", "no rank receives anything")


def check_reduction(reduction: object) -> Reduction:
    """
    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction: {shown(reduction)}; allowed: {', '.join(map(repr, REDUCTIONS))}")
    return reduction  # type: ignore[return-value]


def lower(program: Program, step: Step, position: int, transport: Means, reduction: Reduction = "ordered") -> Lowering:
    """The means for a step. Follows from what all ranks that meet know alike, so they choose alike."""
    if not isinstance(step, Exchange):
        return _LOCAL
    if transport.one_sided and not transport.windows:
        return _PUSH
    members = window_members(program, step, position) if transport.windows else program.members(step, position)
    if transport.one_sided and transport.windows:
        return _through_windows(program, step, members, transport.windows)
    if step.group is not None and len(members) == 1:
        return Lowering("local", "this rank has no part in it")
    ranks = [program.mesh.rank_at(p) for p in members]
    nodes = len({transport.node_of(rank) for rank in ranks})
    if nodes == 1 and len(ranks) > 1:
        if transport.windows:
            return _through_windows(program, step, members, transport.windows)
        return Lowering("push", "ranks of one node write into each other's memory")
    if nodes < len(ranks):
        return Lowering("push and send", f"ranks of a node write into each other's memory, those of {nodes} nodes send")
    if step.group is None:
        return Lowering("send and receive", "between two meshes each rank has peers of its own")
    order = transport.group_order(ranks)
    if order is None:
        return Lowering("send and receive", "no process group of a mesh dim, or of all, has exactly these ranks")
    before, after = (
        [math.prod(shape(step, p)) * ITEMSIZE[program.dtype] for p in members]
        for shape in (program.shape_before, program.shape_after)
    )
    if sum(before) == 0 or sum(after) == 0:
        return Lowering("local", "the ranks that would meet hold nothing")
    if reduction == "fast" and (kind := _vendor_reduction(program, step, members)):
        return Lowering(kind, f'reduction="fast" leaves the order of terms to {transport.backend}', order)
    limits, largest = BACKENDS[transport.backend], max(*before, *after)
    if _gathers(step) and len(set(before)) == 1 and largest <= limits.all_gather:
        return Lowering("all-gather", f"every rank ends with {format_bytes(largest)}, an equal part from each", order)
    if len(step.group) > 1:
        return Lowering("send and receive", "along several mesh dims a rank has few of the group as peers")
    said = f"shards of {format_bytes(largest)}"
    if largest > limits.all_to_all:
        return Lowering("send and receive", f"{said} are not copied into one buffer first")
    return Lowering("all-to-all", f"{said} at most cost less in one call", order)


def _through_windows(program: Program, step: Step, members: Sequence[int], policy: WindowPolicy) -> Lowering:
    """What takes less time. A push is a window's bytes to peers, and then out of the own one; a pull is the input into
    the own window, and then what a push brings from peers. Push where both take as long: a store is sent and forgotten.
    """
    pushed, published = (window_bytes(program, step, members, algorithm) for algorithm in ("push", "pull"))
    bytes_of = {"push": pushed, "pull": published}
    if policy.direction != "auto":
        return Lowering(policy.direction, f"asked for; windows of {format_bytes(bytes_of[policy.direction])}")
    measured = policy.rates.get(tuple(sorted(map(program.mesh.rank_at, members))))
    rates = measured or Rates()
    seconds = {
        "push": pushed / rates.push + pushed / rates.local,
        "pull": published / rates.local + pushed / rates.pull,
    }
    algorithm, other = ("pull", "push") if seconds["pull"] < seconds["push"] else ("push", "pull")
    why = f"windows of {format_bytes(bytes_of[algorithm])}, {format_bytes(bytes_of[other])} for {other}"
    if measured:
        why += f"; {1e6 * seconds[algorithm]:.3g} µs, {1e6 * seconds[other]:.3g} for {other}, by measured rates"
    return Lowering(algorithm, why)


def window_members(program: Program, step: Step, position: int) -> tuple[int, ...]:
    """The positions that share windows in a step. Between two meshes it is everyone: each rank has peers of its own
    there, and a window is free when everyone has left it."""
    if isinstance(step, Exchange) and step.group is None:
        return tuple(range(program.mesh.size))
    return program.members(step, position)


def window_bytes(program: Program, step: Step, members: Sequence[int], algorithm: str) -> int:
    """What windows of these positions hold: for a pull the input, else a slab of the output for each contribution."""
    if algorithm == "pull":
        sizes = [math.prod(program.shape_before(step, p)) for p in members]
    else:
        sizes = [math.prod(program.shape_after(step, p)) * max(step.staged_terms, 1) for p in members]
    return max(sizes) * ITEMSIZE[program.dtype]


def _gathers(step: Exchange) -> bool:
    """Whether every rank of the group ends with all that the group holds, each its own part of it."""
    was, becomes = _of_group(step)
    return all(isinstance(p, Shard) for p in was) and all(isinstance(p, Replicate) for p in becomes)


def _vendor_reduction(program: Program, step: Exchange, members: Sequence[int]) -> str | None:
    """The reduction of torch.distributed that does a step, if there is one."""
    was, becomes = _of_group(step)
    if program.dtype not in _REDUCED_BY_BACKENDS or not all(isinstance(p, Partial) for p in was):
        return None
    if step.reduce is None or step.reduce.op not in ("sum", "prod"):
        return None  # nothing is gained by another order, and NaN may be lost
    if all(isinstance(p, Replicate) for p in becomes):
        return "all-reduce"
    even = len({program.shape_after(step, p) for p in members}) == 1
    return "reduce-scatter" if even and all(isinstance(p, Shard) for p in becomes) else None


def _of_group(step: Exchange) -> tuple[list[object], list[object]]:
    """What the mesh dims along which ranks meet are before and after."""
    group = step.group or ()
    return [step.source.placements[m] for m in group], [step.target.placements[m] for m in group]


@dataclass(frozen=True)
class AssumedTransport:
    """A transport for programs that are only looked at, with the process groups of mesh dims and of all ranks."""

    mesh: Mesh
    one_sided: bool
    backend: str = "gloo"
    windows: WindowPolicy | None = None
    node_size: int | None = None
    """Of a transport that mixes: ranks of a node of so many consecutive ones write into each other's memory."""

    def node_of(self, rank: int) -> int:
        return node_of(rank, self.one_sided, self.node_size)

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        found = sorted(ranks)
        if len(found) == self.mesh.size:
            return tuple(found)
        position = int(self.mesh.positions_of(np.array(found[:1]))[0])
        along = (self.mesh.subgroup(position, [m]) for m in range(self.mesh.ndim))
        groups = [tuple(sorted(map(self.mesh.rank_at, members))) for members in along]
        return tuple(found) if tuple(found) in groups else None


def explain_on(program: Program, transport: Means, reduction: Reduction = "ordered") -> str:
    """The program as text, with the means of a transport for each step and why."""
    position = program.ranks[0]
    return program.explain([lower(program, step, position, transport, reduction) for step in program.steps])
