"""Plans of several tensors that are redistributed together.

The programs of a batch run in rounds: a round is the next exchange of every program, with one barrier or one message
per pair of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import ArgumentError, UnsupportedError, with_prefix
from .cost.topology import Topology, TopologyName, topology_argument
from .exchange.steps import Exchange
from .layouts.mesh import MOST_RANKS, position_of, whole_numbers
from .plan import plan
from .program import Program
from .program_base import format_bytes
from .request import Request, check_max_bytes


@dataclass(frozen=True, eq=False)
class Batch:
    """Programs that run together, round by round: a round is the next exchange of every program.

    Attributes:
        programs: one per request, of all ranks or of one. A rank that is in neither mesh of a request has the program
            of position 0 in its place, so that all ranks agree on the request.
        rank: the rank whose programs these are; None for the programs of all ranks.
    """

    programs: tuple[Program, ...]
    rank: int | None = None

    def position(self, index: int, rank: int) -> int | None:
        """The position of a rank in the mesh of program `index`; None if it is not in the mesh."""
        (position,) = self.programs[index].mesh.positions_of(np.array([rank])).tolist()
        return None if position < 0 else position

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose programs these are, ascending."""
        if self.rank is not None:
            return (self.rank,)
        return self.everyone

    @property
    def everyone(self) -> tuple[int, ...]:
        """The ranks that take part in any program, ascending."""
        meshes = {id(program.mesh): program.mesh for program in self.programs}  # most batches have one
        return tuple(sorted({rank for mesh in meshes.values() for rank in mesh.rank_array.tolist()}))

    @property
    def exchanges(self) -> int:
        """The number of rounds."""
        return max((program.exchanges for program in self.programs), default=0)

    def participants(self, rank: int) -> tuple[int, ...]:
        """The ranks that must run the batch together with `rank`, itself included: all ranks if any program exchanges,
        otherwise only itself."""
        return self.everyone if self.exchanges else (rank,)

    def first_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the first round in which `rank` exchanges, itself included, ascending."""
        for round_index in range(self.exchanges):
            group = {rank}
            for index, program in enumerate(self.programs):
                position = self.position(index, rank)
                exchanges = [step for step in program.steps if isinstance(step, Exchange)]
                if position is not None and round_index < len(exchanges):
                    members = list(program.members(exchanges[round_index], position))
                    group |= set(program.mesh.rank_array[members].tolist())
            if len(group) > 1:
                return tuple(sorted(group))
        return (rank,)

    def all_meet(self, rank: int) -> bool:
        """Whether the first exchange of a tensor is among all ranks that run the batch, on each of them."""
        positions = [(program, self.position(index, rank)) for index, program in enumerate(self.programs)]
        return any(
            position is not None and program.all_meet(position) and program.first_group(position) == self.everyone
            for program, position in positions
        )

    def _total(self, name: str) -> list[int] | None:
        """The sum over programs of an attribute that has one int per rank; None if a program has none."""
        totals = dict.fromkeys(self.ranks, 0)
        for index, program in enumerate(self.programs):
            values = getattr(program, name)
            if values is None:
                return None
            for rank in self.ranks:
                position = self.position(index, rank)
                if position is not None:
                    totals[rank] += values[0 if program.rank is not None else position]
        return list(totals.values())

    @cached_property
    def bytes_received(self) -> list[int]:
        """The bytes that each of `ranks` receives from other ranks in all steps."""
        return self._total("bytes_received") or []

    @cached_property
    def bytes_bound(self) -> list[int] | None:
        """The bytes that each of `ranks` must receive at least; None if a layout is partial."""
        return self._total("bytes_bound")

    @cached_property
    def peak_bytes(self) -> list[int]:
        """The bytes that each of `ranks` holds at most, with all tensors in memory at once."""
        return self._total("peak_bytes") or []

    @cached_property
    def messages(self) -> list[int]:
        """The number of peers that each of `ranks` exchanges with, summed over rounds: at most as many messages in each
        direction."""
        counts = []
        for rank in self.ranks:
            peers: set[tuple[int, int]] = set()
            for index in range(len(self.programs)):
                for round_index, ranks in enumerate(self._peers(index, rank)):
                    peers |= {(round_index, other) for other in ranks}
            counts.append(len(peers))
        return counts

    @cached_property
    def messages_one_by_one(self) -> list[int]:
        """`messages` if the tensors were redistributed one after the other."""
        return [sum(len(p) for i in range(len(self.programs)) for p in self._peers(i, rank)) for rank in self.ranks]

    def _peers(self, index: int, rank: int) -> list[set[int]]:
        """The ranks that `rank` sends to or receives from in each exchange of a program."""
        program, position = self.programs[index], self.position(index, rank)
        if position is None:
            return []
        peers = []
        for step in program.steps:
            if isinstance(step, Exchange):
                boxes = step.boxes
                receivers = boxes.receiver[(boxes.sender == position).any(axis=1)]
                senders = boxes.sender[boxes.receiver == position]
                others = np.concatenate([receivers, senders.reshape(-1)])
                others = others[(others >= 0) & (others != position)]
                peers.append(set(program.mesh.rank_array[others].tolist()))
        return peers

    @property
    def cost_us(self) -> float | None:
        """The estimated microseconds on the slowest rank, with latencies and the overhead of the call shared by the
        tensors; None without a topology."""
        costs = [program.cost_us for program in self.programs if not program.is_identity]
        return None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs)

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the requests, which ranks compare to detect that they disagree."""
        text = repr([program.digest for program in self.programs]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def explain(self) -> str:
        """The batch as text: the totals, then one line per tensor."""
        number = len(self.programs)
        of = "" if self.rank is None else f", rank {self.rank}"
        lines = [
            f"{number} tensor{'' if number == 1 else 's'} in {self.exchanges} "
            f"round{'' if self.exchanges == 1 else 's'}{of}"
        ]
        if number:
            bound = "no bound with partial"
            if self.bytes_bound is not None:
                met = "met exactly" if self.bytes_received == self.bytes_bound else "not met"
                bound = f"bound {format_bytes(max(self.bytes_bound))}, {met}"
            lines.append(
                f"  received {format_bytes(max(self.bytes_received))} ({bound}), peak "
                f"{format_bytes(max(self.peak_bytes))}"
            )
            lines.append(
                f"  a rank exchanges with at most {max(self.messages)} peers over all rounds; tensor after tensor it "
                f"would be {max(self.messages_one_by_one)}"
            )
        if self.cost_us is not None and number:
            lines.append(f"  {self.cost_us:.1f} µs")
        for program in self.programs:
            steps = ", ".join(step.kind for step in program.steps) or "nothing to do"
            received = format_bytes(max(program.bytes_received))
            lines.append(
                f"  {program.source} → {program.target}   {program.dtype}{list(program.shape)}: {steps}, "
                f"receives {received}"
            )
        return "\n".join(lines)

    __str__ = explain


def plan_batch(
    requests: Sequence[Request],
    *,
    rank: int | None = None,
    topology: Topology | TopologyName | None = None,
    max_bytes: int | None = None,
) -> Batch:
    """Plan several tensors that are redistributed together, such as the parameters of a model.

    Args:
        requests: one per tensor; meshes and dtypes may differ. Their own `rank`, `topology` and `max_bytes` are
            ignored.
        rank: plan only the part of this rank (a rank, not a position: meshes may differ). None: plan all ranks.
        topology: as for `plan`; the latency of a round is shared by all tensors.
        max_bytes: the bytes that a rank may hold at most of all tensors together. If the unconstrained plans need more,
            the limit is divided in proportion to their needs.

    Raises:
        ArgumentError: as for `plan`, prefixed with the index of the request; or no plans were found that stay within
            `max_bytes` together.
    """
    if not isinstance(requests, Sequence):
        raise ArgumentError(f"requests: {requests!r}; allowed: a list of requests")
    if rank is not None:
        (rank,) = whole_numbers("rank", [rank])
        if not 0 <= rank < MOST_RANKS:
            raise ArgumentError(f"rank: {rank}; allowed: 0 and up, below {MOST_RANKS}, or None")
    topology = topology_argument(topology)
    shared = _with_shared_latency(topology, len(requests))
    max_bytes = check_max_bytes(max_bytes)
    limits: list[int | None] = [None] * len(requests)
    if max_bytes is not None:
        limits = _limits(requests, shared, max_bytes)
    return Batch(_programs(requests, limits, shared, rank), rank)


def _programs(
    requests: Sequence[Request], limits: Sequence[int | None], topology: Topology | None, rank: int | None
) -> tuple[Program, ...]:
    programs = []
    for index, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        mesh, shape, dtype, source, target, target_mesh = request.fields()
        position = None if rank is None else max(position_of(rank, mesh, target_mesh), 0)
        try:
            program = plan(
                mesh, shape, dtype, source, target,
                target_mesh=target_mesh, rank=position, topology=topology, max_bytes=limit,
            )  # fmt: skip
        except (ArgumentError, UnsupportedError) as error:
            raise with_prefix(error, f"requests[{index}]") from error
        programs.append(program)
    return tuple(programs)


def _limits(requests: Sequence[Request], topology: Topology | None, max_bytes: int) -> list[int | None]:
    """The `max_bytes` of each tensor, the same on every rank: None for all if the unconstrained plans fit."""
    no_limits: list[int | None] = [None] * len(requests)
    unconstrained = Batch(_programs(requests, no_limits, topology, None))
    needed = max(unconstrained.peak_bytes, default=0)
    if needed <= max_bytes:
        return no_limits
    limits: list[int | None] = [max(program.peak_bytes) * max_bytes // needed for program in unconstrained.programs]
    with suppress(ArgumentError):
        if max(Batch(_programs(requests, limits, topology, None)).peak_bytes) <= max_bytes:
            return limits
    raise ArgumentError(
        f"max_bytes: {max_bytes}; the {len(requests)} tensors together need {needed}; allowed: as much, or fewer "
        f"tensors at a time"
    )


def _with_shared_latency(topology: Topology | None, tensors: int) -> Topology | None:
    """The topology with latencies and the overhead of the call divided by the number of tensors."""
    if topology is None or tensors < 2:
        return topology
    node, network = (replace(link, latency_us=link.latency_us / tensors) for link in (topology.node, topology.network))
    return replace(topology, node=node, network=network, call_us=topology.call_us / tensors)
