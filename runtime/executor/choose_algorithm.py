"""Chooses the algorithm by which a transport executes a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from ...errors import ArgumentError, shown
from ...planner import (
    ITEMSIZE,
    Exchange,
    Mesh,
    Program,
    Step,
    backend_reduction,
    format_bytes,
    is_even_all_gather,
)
from ..transports.backend_limits import BACKENDS, Rates, WindowPolicy, assumed_node
from ..transports.base import Capabilities, TwoSidedCapabilities
from .window_layout import why_not_direct, why_not_pulled, window_bytes

Reduction = Literal["ordered", "fast"]
REDUCTIONS: tuple[Reduction, ...] = ("ordered", "fast")


@dataclass(frozen=True)
class Algorithm:
    """The algorithm of a step.

    Attributes:
        name: "local", "push", "direct push", "pull", "push and send", "send and receive", "all-to-all", "all-gather",
            "reduce-scatter" or "all-reduce".
        why: the reason, for `explain`.
        group: of a collective, the ranks of its process group in its order.
    """

    name: str
    why: str
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


_PUSH = Algorithm("push", "ranks write into each other's memory")
_LOCAL = Algorithm("local", "no rank receives anything")


def check_reduction(reduction: object) -> Reduction:
    """Validate a `reduction` argument.

    Raises:
        ArgumentError: it is not one of `REDUCTIONS`.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction: {shown(reduction)}; allowed: {', '.join(map(repr, REDUCTIONS))}")
    return reduction  # type: ignore[return-value]


def leaves_sums_to_backend(program: Program, reduction: Reduction) -> bool:
    """Whether a program has sums that `reduction="fast"` may leave to the backend, which knows its own machines. Such a
    program is not planned for a topology that is found, since backends only reduce along mesh dims."""
    return reduction == "fast" and any(
        step.reduce is not None and step.reduce.contributors > 1 for step in program.steps
    )


def choose_algorithm(
    program: Program, step: Step, position: int, transport: Capabilities, reduction: Reduction = "ordered"
) -> Algorithm:
    """Choose the algorithm of a step. Ranks of one group choose the same: it depends on what they all know. Between two
    meshes each rank chooses by its own peers: a rank that pushes only and one that pushes and sends exchange with ranks
    of their node in the same way."""
    if not isinstance(step, Exchange):
        return _LOCAL
    if transport.one_sided and not transport.windows:
        return _PUSH
    members = window_members(program, step, position) if transport.windows else program.members(step, position)
    if transport.one_sided and transport.windows:
        return _through_windows(program, step, members, transport.windows)
    if step.group is not None and len(members) == 1:
        return Algorithm("local", "this rank has no part in it")
    ranks = [program.mesh.rank_at(p) for p in members]
    nodes = len({transport.node_of(rank) for rank in ranks})
    if nodes == 1 and len(ranks) > 1:
        if transport.windows:
            return _through_windows(program, step, members, transport.windows)
        return Algorithm("push", "ranks of one node write into each other's memory")
    if nodes < len(ranks):
        return Algorithm(
            "push and send", f"ranks of a node write into each other's memory, those of {nodes} nodes send"
        )
    if step.group is None:
        return Algorithm("send and receive", "between two meshes each rank has peers of its own")
    processes = cast("TwoSidedCapabilities", transport)
    order = processes.group_order(ranks)
    if order is None:
        return Algorithm("send and receive", "no process group of a mesh dim, or of all, has exactly these ranks")
    itemsize = ITEMSIZE[program.dtype]
    # The first member's shard is empty only if all are. Along one mesh dim it is the largest.
    before, after = (
        math.prod(shape(step, members[0])) * itemsize for shape in (program.shape_before, program.shape_after)
    )
    if before == 0 or after == 0:
        return Algorithm("local", "the ranks of this step hold nothing")
    if reduction == "fast" and (kind := backend_reduction(program, step, members)):
        return Algorithm(kind, f'reduction="fast" leaves the order of terms to {processes.backend}', order)
    limits, largest = BACKENDS[processes.backend], max(before, after)
    if largest <= limits.all_gather and is_even_all_gather(program, step, members):
        return Algorithm("all-gather", f"every rank ends with {format_bytes(largest)}, an equal part from each", order)
    if len(step.group) > 1:
        return Algorithm("send and receive", "along several mesh dims a rank has few of the group as peers")
    shards = f"shards of {format_bytes(largest)}"
    if largest > limits.all_to_all:
        return Algorithm("send and receive", f"{shards} are not copied into one buffer first")
    return Algorithm("all-to-all", f"{shards} at most cost less in one call", order)


def _through_windows(program: Program, step: Step, members: Sequence[int], policy: WindowPolicy) -> Algorithm:
    """Select push or pull, whichever takes less time.

    A push writes a window's bytes to peers and copies them out of the own window. A pull copies the input into the own
    window and reads from peers what a push would write. If both take the same time it is push, because the device does
    not wait for stores. It is push as well where loads from peers would be narrower than 16 bytes, and stores are not.
    Without a reduction, ranks write directly into outputs in pooled buffers, where there are some: nothing is copied
    out of a window then.
    """
    why_not = ""
    pooled = policy.outputs.get(tuple(sorted(map(program.mesh.rank_at, members))))
    if pooled is not None and step.reduce is None and policy.direction != "pull":
        why_not = why_not_direct(program, step, members, pooled.nbytes)
        if not why_not:
            buffers = f"{pooled.number} pooled buffers of {format_bytes(pooled.nbytes)}"
            return Algorithm(
                "direct push", f"into outputs in {buffers}; while all are in use, with a copy from another"
            )
        why_not = f"; not directly into outputs, {why_not}"
    pushed, published = (window_bytes(program, step, members, algorithm) for algorithm in ("push", "pull"))
    bytes_of = {"push": pushed, "pull": published}
    if policy.direction != "auto":
        return Algorithm(policy.direction, f"requested; windows of {format_bytes(bytes_of[policy.direction])}{why_not}")
    measured = policy.rates.get(tuple(sorted(map(program.mesh.rank_at, members))))
    rates = measured or Rates()
    seconds = {
        "push": pushed / rates.push + pushed / rates.local,
        "pull": published / rates.local + pushed / rates.pull,
    }
    algorithm, other = ("pull", "push") if seconds["pull"] < seconds["push"] else ("push", "pull")
    why = f"windows of {format_bytes(bytes_of[algorithm])}, {format_bytes(bytes_of[other])} for {other}"
    if algorithm == "pull" and (narrow := why_not_pulled(program, step, members)):
        return Algorithm(other, f"windows of {format_bytes(bytes_of[other])}, not pulled from shards {narrow}{why_not}")
    if measured:
        why += f"; {1e6 * seconds[algorithm]:.3g} µs, {1e6 * seconds[other]:.3g} for {other}, by measured rates"
    return Algorithm(algorithm, why + why_not)


def window_members(program: Program, step: Step, position: int) -> tuple[int, ...]:
    """The positions that share windows in a step. Between two meshes these are all positions: each rank has other
    peers, and a window may be written again once all ranks have released it."""
    if isinstance(step, Exchange) and step.group is None:
        return tuple(range(program.mesh.size))
    return program.members(step, position)


@dataclass(frozen=True)
class AssumedTransport:
    """The capabilities of a transport that does not exist, for `explain`. It has process groups of each mesh dim and of
    all ranks."""

    mesh: Mesh
    one_sided: bool
    backend: str = "gloo"
    windows: WindowPolicy | None = None
    node_size: int | None = None
    """The number of consecutive ranks that write into each other's memory, for a hierarchical transport."""

    def node_of(self, rank: int) -> int:
        return assumed_node(rank, self.one_sided, self.node_size)

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        ordered = tuple(sorted(ranks))
        if len(ordered) == self.mesh.size:
            return ordered
        position = int(self.mesh.positions_of(np.array(ordered[:1]))[0])
        along = (self.mesh.subgroup(position, [m]) for m in range(self.mesh.ndim))
        groups = [tuple(sorted(map(self.mesh.rank_at, members))) for members in along]
        return ordered if ordered in groups else None


def explain_on(program: Program, transport: Capabilities, reduction: Reduction = "ordered") -> str:
    """The program as text, with the algorithm of each step on a transport and the reason for it."""
    position = program.ranks[0]
    return program.explain([choose_algorithm(program, step, position, transport, reduction) for step in program.steps])
