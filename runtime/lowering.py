"""How a world carries out a step: which of its means, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..planner import ITEMSIZE, Exchange, Mesh, Program, Step, format_bytes

LARGEST_IN_ONE_CALL = 1 << 20
"""Bytes of the largest shard up to which one all-to-all takes the place of a message per peer. On gloo, 4 ranks on 2
cores, an all-to-all took 0.3 of the messages' time with 1 KiB to each peer, 0.5 with 64 KiB, and as long with 1 MiB,
where packing all messages into one buffer would come on top; all-gather took 0.7, 0.9, and 1.6 times as long."""


@dataclass(frozen=True)
class Lowering:
    """`how`: "local", "push", "send and receive" or "all-to-all"; `group`: the ranks of an all-to-all in the order of
    its process group."""

    how: str
    why: str
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.how}: {self.why}"


class Means(Protocol):
    """What a world has to carry out exchanges with."""

    @property
    def one_sided(self) -> bool:
        """Ranks write into each other's memory."""

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks of a process group of exactly these ranks, in its order; None if there is none that all of them
        know."""


def lower(program: Program, step: Step, position: int, world: Means) -> Lowering:
    """The means for a step. Follows from what all ranks that meet know alike, so they choose alike."""
    if not isinstance(step, Exchange):
        return Lowering("local", "no rank receives anything")
    if world.one_sided:
        return Lowering("push", "ranks write into each other's memory")
    if step.group is None:
        return Lowering("send and receive", "between two meshes each rank has peers of its own")
    members = program.members(step, position)
    if len(members) == 1:
        return Lowering("local", "this rank has no part in it")
    order = world.group_order([program.mesh.rank_at(p) for p in members])
    if order is None:
        return Lowering("send and receive", "no process group of a mesh dim, or of all, has exactly these ranks")
    largest = max(_largest_shard(program, step, p) for p in members)
    if largest > LARGEST_IN_ONE_CALL:
        return Lowering("send and receive", f"shards of {format_bytes(largest)} are not copied into one message first")
    return Lowering("all-to-all", f"shards of {format_bytes(largest)} at most cost less in one call", order)


@dataclass(frozen=True)
class AssumedWorld:
    """What a world would have, for programs that are only looked at: process groups of mesh dims and of everyone."""

    mesh: Mesh
    one_sided: bool

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        found = sorted(ranks)
        if len(found) == self.mesh.size:
            return tuple(found)
        position = int(self.mesh.positions_of(np.array(found[:1]))[0])
        along = (self.mesh.subgroup(position, [m]) for m in range(self.mesh.ndim))
        groups = [tuple(sorted(map(self.mesh.rank_at, members))) for members in along]
        return tuple(found) if tuple(found) in groups else None


def explain_on(program: Program, world: Means) -> str:
    """The program as text, with the means of a world for each step and why."""
    position = program.ranks[0]
    return program.explain([lower(program, step, position, world) for step in program.steps])


def _largest_shard(program: Program, step: Step, position: int) -> int:
    shapes = program.shape_before(step, position), program.shape_after(step, position)
    return max(map(math.prod, shapes)) * ITEMSIZE[program.dtype]
