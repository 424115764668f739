"""Many tensors carried over together: their programs in step, one meeting or one message per pair of ranks a round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import ArgumentError, LayoutSyntaxError, UnsupportedError
from .cross_mesh_exchange import position_of
from .layout import Layout
from .mesh import MOST_RANKS, Mesh, whole_numbers
from .plan import plan
from .program import Exchange, Program, format_bytes
from .topology import Topology


@dataclass(frozen=True)
class Request:
    """What `plan` is asked of one tensor: of global `shape`, from `src` on `mesh` to `dst` on `target_mesh`, if that is
    another."""

    mesh: Mesh | Sequence[int]
    shape: Sequence[int]
    dtype: str
    src: Layout | str
    dst: Layout | str
    target_mesh: Mesh | Sequence[int] | None = None

    def fields(self) -> tuple:
        return self.mesh, self.shape, self.dtype, self.src, self.dst, self.target_mesh


@dataclass(frozen=True, eq=False)
class Batch:
    """Programs that are carried out together, round by round: a round is the next exchange of every program.

    Attributes:
        programs: one per request; of all ranks, or of one. A rank that is in none of a request's meshes has the program
            of position 0 in its place, so that all ranks agree on what is asked.
        rank: the rank whose programs they are, None for those of all ranks.
    """

    programs: tuple[Program, ...]
    rank: int | None = None

    def position(self, index: int, rank: int) -> int | None:
        """The position of a rank in a program's mesh; None if it is not in it."""
        (position,) = self.programs[index].mesh.positions_of(np.array([rank])).tolist()
        return None if position < 0 else position

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose programs they are, ascending."""
        if self.rank is not None:
            return (self.rank,)
        return tuple(sorted({r for program in self.programs for r in program.mesh.rank_array.tolist()}))

    @property
    def everyone(self) -> tuple[int, ...]:
        """The ranks that take part in any program, ascending."""
        tables = [program.mesh.rank_array for program in self.programs]
        return tuple(np.unique(np.concatenate(tables)).tolist()) if tables else ()

    @property
    def exchanges(self) -> int:
        """Rounds in which ranks meet."""
        return max((program.exchanges for program in self.programs), default=0)

    def participants(self, rank: int) -> tuple[int, ...]:
        """The ranks that run the batch in step with a rank, itself included: all that take part in any program that
        exchanges, or it alone."""
        return self.everyone if self.exchanges else (rank,)

    def first_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank meets in its first round, itself included, ascending."""
        for number in range(self.exchanges):
            met = {rank}
            for index, program in enumerate(self.programs):
                position = self.position(index, rank)
                exchanges = [step for step in program.steps if isinstance(step, Exchange)]
                if position is not None and number < len(exchanges):
                    members = list(program.members(exchanges[number], position))
                    met |= set(program.mesh.rank_array[members].tolist())
            if len(met) > 1:
                return tuple(sorted(met))
        return (rank,)

    def _total(self, name: str) -> list[int] | None:
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
        """One int for each of `ranks`."""
        return self._total("bytes_received") or []

    @cached_property
    def bytes_bound(self) -> list[int] | None:
        """The least that each of `ranks` must receive; None where a layout is partial."""
        return self._total("bytes_bound")

    @cached_property
    def peak_bytes(self) -> list[int]:
        """What each of `ranks` holds at most: all tensors are there at once."""
        return self._total("peak_bytes") or []

    @cached_property
    def messages(self) -> list[int]:
        """For each of `ranks`, the peers it exchanges with, over all rounds: as many messages in, or out, at most."""
        found = []
        for rank in self.ranks:
            peers: set[tuple[int, int]] = set()
            for index in range(len(self.programs)):
                for at, met in enumerate(self._met(index, rank)):
                    peers |= {(at, other) for other in met}
            found.append(len(peers))
        return found

    @cached_property
    def messages_one_by_one(self) -> list[int]:
        """What `messages` would be if tensor went after tensor."""
        return [sum(len(m) for i in range(len(self.programs)) for m in self._met(i, rank)) for rank in self.ranks]

    def _met(self, index: int, rank: int) -> list[set[int]]:
        """The ranks that a rank moves bytes from or to in each exchange of a program."""
        program, position = self.programs[index], self.position(index, rank)
        if position is None:
            return []
        found = []
        for step in program.steps:
            if isinstance(step, Exchange):
                boxes = step.boxes
                mine = boxes.receiver[(boxes.sender == position).any(axis=1)], boxes.sender[boxes.receiver == position]
                others = np.unique(np.concatenate([x.reshape(-1) for x in mine]))
                others = others[(others >= 0) & (others != position)]
                found.append(set(program.mesh.rank_array[others].tolist()))
        return found

    @property
    def cost_us(self) -> float | None:
        """Microseconds on the rank that takes longest, latencies and the call shared by the tensors; None without a
        topology."""
        costs = [program.cost_us for program in self.programs if not program.is_identity]
        return None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs)

    @cached_property
    def digest(self) -> int:
        """63 bits that differ for different batches: what ranks compare when they meet."""
        text = repr([program.digest for program in self.programs]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def explain(self) -> str:
        """The batch as text: the totals, then a line for each tensor."""
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
                f"  {program.src} → {program.dst}   {program.dtype}{list(program.shape)}: {steps}, receives {received}"
            )
        return "\n".join(lines)

    __str__ = explain


def plan_batch(
    requests: Sequence[Request],
    *,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Batch:
    """The programs of several tensors, to be carried out together: a refit, an optimizer's step.

    Args:
        requests: one per tensor; meshes and dtypes may differ.
        rank: only this rank's part (a rank, not a position: meshes may differ), None: of all ranks.
        topology: as for `plan`; a round's latency is shared by all tensors.
        max_bytes: what a rank may hold of all tensors together at any time; where that is less than they ask for, each
            is planned with as much less.

    Raises:
        ArgumentError: as for `plan`, with the number of the request in front; no plans were found that keep to
            `max_bytes` together.
    """
    if not isinstance(requests, Sequence):
        raise ArgumentError(f"requests: {requests!r}; allowed: a list of requests")
    if rank is not None:
        (rank,) = whole_numbers("rank", [rank])
        if not 0 <= rank < MOST_RANKS:
            raise ArgumentError(f"rank: {rank}; allowed: 0 and up, below {MOST_RANKS}, or None")
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology, or None")
    shared = _with_latency_shared(topology, len(requests))
    caps: list[int | None] = [None] * len(requests)
    if max_bytes is not None:
        (max_bytes,) = whole_numbers("max_bytes", [max_bytes])
        if max_bytes < 0:
            raise ArgumentError(f"max_bytes: {max_bytes}; allowed: 0 and up, or None")
        caps = _caps(requests, shared, max_bytes)
    return Batch(_planned(requests, caps, shared, rank), rank)


def _planned(
    requests: Sequence[Request], caps: Sequence[int | None], topology: Topology | None, rank: int | None
) -> tuple[Program, ...]:
    programs = []
    for number, (request, cap) in enumerate(zip(requests, caps, strict=True)):
        try:
            position = None if rank is None else max(_position(request, rank), 0)
            *asked, target_mesh = request.fields()
            program = plan(*asked, target_mesh=target_mesh, rank=position, topology=topology, max_bytes=cap)
        except LayoutSyntaxError as error:
            raise LayoutSyntaxError(error.text, error.position, f"requests[{number}]: {error.reason}") from None
        except (ArgumentError, UnsupportedError) as error:
            raise type(error)(f"requests[{number}]: {error}") from error
        programs.append(program)
    return tuple(programs)


def _caps(requests: Sequence[Request], topology: Topology | None, max_bytes: int) -> list[int | None]:
    """What each tensor may hold, the same on every rank: all that it asks for, or each as much less."""
    free: list[int | None] = [None] * len(requests)
    whole = Batch(_planned(requests, free, topology, None))
    needed = max(whole.peak_bytes, default=0)
    if needed <= max_bytes:
        return free
    caps: list[int | None] = [max(program.peak_bytes) * max_bytes // needed for program in whole.programs]
    with suppress(ArgumentError):
        if max(Batch(_planned(requests, caps, topology, None)).peak_bytes) <= max_bytes:
            return caps
    raise ArgumentError(
        f"max_bytes: {max_bytes}; the {len(requests)} tensors together need {needed}; allowed: as much, or fewer "
        f"tensors at a time"
    )


def _position(request: Request, rank: int) -> int:
    """The position of a rank among everyone of a request, -1 if it is not among them."""
    source = request.mesh if isinstance(request.mesh, Mesh) else Mesh(request.mesh)
    other = request.target_mesh
    target = source if other is None else other if isinstance(other, Mesh) else Mesh(other)
    return position_of(rank, source, target)


def _with_latency_shared(topology: Topology | None, tensors: int) -> Topology | None:
    if topology is None or tensors < 2:
        return topology
    node, network = (replace(link, latency_us=link.latency_us / tensors) for link in (topology.node, topology.network))
    return replace(topology, node=node, network=network, call_us=topology.call_us / tensors)
