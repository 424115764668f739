"""A step on a transport whose ranks send and receive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...planner import FILL, Exchange, Row, Step
from ..transports.policies import BACKENDS
from ..transports.requests import HEADER, AllGather, AllToAll, Transfer
from .copies import Copies, Move, Part, Patchwork, Reduction, Whole, is_plain, packed, run_of
from .lower import Lowering
from .step import BoundStep, Run, Terms

_PACKED = -1  # in place of a buffer
_ALIGNMENT = 16  # bytes; of each message in a buffer that kernels pack or unpack, so that they move wide words


class SharedBuffers(NamedTuple):
    """Where buffers that other tensors share hold what goes to each peer and what comes from it, in elements, by the
    peer's position."""

    sent_at: Mapping[int, int]
    received_at: Mapping[int, int]


class SendRecvStep(BoundStep):
    """Pack what peers need, send and receive with exact sizes, unpack or reduce what came: a kernel before, one after.

    By a message to each peer, where what lies in one run of memory is sent from where it is and received where it
    belongs; by an all-to-all, from one buffer into another; or by an all-gather, where all get the same.

    Args:
        lowering: which of these.
        shared: of a step whose messages are parts of others, which someone else sends; None: the step is alone.
        origin: what the step reads, and in which of the buffers that `run` is given; None: one tensor in the only one.
        buffers: how many `run` is given.
        leave_apart: what comes is not put together: `run` returns its buffers and one more, where `patchwork` lies.
    """

    def __init__(
        self,
        *args: Any,
        lowering: Lowering,
        shared: SharedBuffers | None = None,
        origin: Patchwork | None = None,
        buffers: int = 1,
        leave_apart: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.origin = origin or Whole(0, self.source_strides)
        self.arrived, self.leave_apart = buffers, leave_apart
        self.group = lowering.group
        everyone = [self.program.mesh.rank_at(p) for p in self.program.members(self.step, self.me)]
        # Of a step between meshes each rank has members of its own.
        within = isinstance(self.step, Exchange) and self.step.group is not None
        self.of_group = self.transport.group_order(everyone) if within else None
        self.together, self.gathers = lowering.algorithm == "all-to-all", lowering.algorithm == "all-gather"
        # Of an all-to-all, in elements: what stands before the data of a message, and the room for one that comes,
        # which is alike for all requests.
        self.header = HEADER // self.dtype.itemsize if self.together else 0
        room = BACKENDS[self.transport.backend].all_to_all if self.together else 0
        self.room = self.header + room // self.dtype.itemsize
        exact = self.together or self.gathers or self.device.type == "cpu"
        self.unit = 1 if exact else max(1, _ALIGNMENT // self.dtype.itemsize)
        peers = list(zip(self.peers, self.peer_ranks, strict=True))
        if self.together or self.gathers:
            peers.sort(key=lambda peer: self.group.index(peer[1]))
        self._bind_sends(peers[:1] if self.gathers else peers, shared)
        if self.gathers:
            rank = self.program.mesh.rank_at(self.me)
            peers.insert(self.group.index(rank), (self.me, rank))
        unpack = self._bind_receives(peers, shared)
        self.bind_finish(unpack)
        # Bytes for each rank of the group, of an all-to-all.
        sent = {rank: self.header + last - first for rank, _, first, last in self.sends}
        me = self.program.mesh.rank_at(self.me)
        self.sent = [sent.get(rank, 0) * self.dtype.itemsize for rank in self.group]
        self.came = [self.room * self.dtype.itemsize * (rank != me) for rank in self.group]

    def _moves_to(self, peer: int, base: int) -> tuple[list[Move], int]:
        """What a peer gets, contributor by contributor in the order of rows, packed from `base`; and where it ends."""
        moves: list[Move] = []
        for _, rows in sorted(self.outgoing.get(peer, {}).items()):
            for row in rows:
                there = packed(row.extent, base)
                for piece in self.origin.pieces(row, self.boxes.axes):
                    moves.append(Move((0, piece.of(there)), [piece.part]))
                base += math.prod(row.extent)
        return moves, base

    def _bind_sends(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> None:
        self.sends: list[tuple[int, int, int, int]] = []
        """Rank, buffer or `_PACKED`, first and last element there."""
        packing: list[Move] = []
        self.packed = 0
        from_where_it_is = shared is None and not self.together
        for peer, rank in peers:
            first = self._aligned(self.packed) + self.header if shared is None else shared.sent_at[peer]
            moves, last = self._moves_to(peer, first)
            if last == first and not self.together:
                continue
            found = _buffer_and_run(moves) if from_where_it_is else None
            if found is not None:
                buffer, run = found
                self.sends.append((rank, buffer, run, run + last - first))
                continue
            packing += moves
            self.sends.append((rank, _PACKED, first, last))
            self.packed = last
        self.pack = Copies(packing, self.step.fill, self.dtype, self.device)

    def _bind_receives(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> list[tuple[Row, Part]]:
        """What is to be unpacked, and where it arrives."""
        self.receives: list[tuple[int, int, int, bool]] = []
        """Rank, first and last element, and whether in the output itself."""
        self.staged: Terms = {}
        unpack: list[tuple[Row, Part]] = []
        in_place = shared is None and not (self.together or self.leave_apart or self.step.reduce)
        in_place = in_place and (not self.gathers or self._gathers_in_order(peers))
        base = 0
        for number, (peer, rank) in enumerate(peers):
            first = base = self._aligned(base) if shared is None else shared.received_at[peer]
            if self.together:
                first = base = number * self.room + self.header
            for contributor, rows in sorted(self.incoming_from.get(peer, {}).items()):
                run = run_of(self.target(row) for _, row in rows) if in_place else None
                if run is not None:
                    self.receives.append((rank, run, run + _elements(row for _, row in rows), True))
                    continue
                for i, row in rows:
                    arrives = self.arrived, packed(row.extent, base)
                    self.staged[i, contributor] = arrives
                    unpack.append((row, arrives))
                    base += math.prod(row.extent)
            if base > first:
                self.receives.append((rank, first, base, False))
        self.received = len(peers) * self.room if self.together else base
        return unpack

    def bind_finish(self, unpack: list[tuple[Row, Part]]) -> None:
        if self.step.reduce:
            self.finish: Reduction | Copies = self.reduction(self.staged)
            return
        kept = [] if self.gathers else [row for row in self.incoming if row.senders[0] == self.me]
        found = [(row, piece) for row in kept for piece in self.origin.pieces(row, self.boxes.axes)]
        if self.leave_apart:
            self.patchwork = Patchwork([*((piece.row(row), piece.part) for row, piece in found), *unpack])
            return
        moves = [Move((0, piece.of(self.target(row))), [piece.part]) for row, piece in found]
        moves += self.fills()
        moves += [Move((0, self.target(row)), [arrives]) for row, arrives in unpack]
        self.finish = Copies(moves, self.step.fill, self.dtype, self.device)

    def _gathers_in_order(self, peers: Sequence[tuple[int, int]]) -> bool:
        """Whether the output is what comes from each rank, one after the other."""
        end = 0
        for peer, _ in peers:
            rows = [row for _, row in self.incoming_from.get(peer, {}).get(0, [])]
            if run_of(map(self.target, rows)) != end:
                return False
            end += _elements(rows)
        return True

    def _aligned(self, elements: int) -> int:
        return -(-elements // self.unit) * self.unit

    def run(self, x: torch.Tensor | list[torch.Tensor], fingerprint: int) -> Run:
        buffers = x if isinstance(x, list) else [x]
        out = None if self.leave_apart else self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        # To a collective every rank of the group comes, also one that has nothing to send and gets nothing.
        if self.group or self.sends or self.receives:
            asked = self.messages(buffers, received if out is None else out, received, fingerprint)
            yield asked._replace(output=out) if self.last else asked
        buffers = [*buffers, received]
        if out is None:
            return buffers
        self.finish(buffers, [out])
        return out

    def messages(
        self, buffers: Sequence[torch.Tensor], out: torch.Tensor, received: torch.Tensor, fingerprint: int
    ) -> Transfer | AllToAll | AllGather:
        """What the transport is to do, with all packed that is sent from there."""
        packed = torch.empty(self.packed, dtype=self.dtype, device=self.device)
        self.pack(buffers, [packed])
        flat, arrived, size = packed.view(torch.uint8), received.view(torch.uint8), self.dtype.itemsize
        if self.together:
            return AllToAll(self.group, flat, arrived, self.sent, self.came, fingerprint)
        sends = []
        for rank, buffer, first, last in self.sends:
            if buffer == _PACKED:
                sends.append((rank, flat[first * size : last * size]))
                continue
            source = buffers[buffer]
            part = source.as_strided((last - first,), (1,), source.storage_offset() + first)
            sends.append((rank, part.view(torch.uint8)))
        landed = out.view(-1).view(torch.uint8)
        if self.gathers:
            return AllGather(self.group, sends[0][1], landed if self.receives[0][3] else arrived, fingerprint)
        receives = [
            (rank, (landed if final else arrived)[first * size : last * size])
            for rank, first, last, final in self.receives
        ]
        return Transfer(tuple(sends), tuple(receives), fingerprint, group=self.of_group)


def _elements(rows: Iterable[Row]) -> int:
    return sum([math.prod(row.extent) for row in rows])


def _buffer_and_run(moves: Sequence[Move]) -> tuple[int, int] | None:
    """The buffer in which all that is moved lies as it is to be packed, and where it begins; None if there is none."""
    parts = [part for _, (part,) in moves]
    if len({buffer for buffer, _ in parts}) != 1 or run_of(where for (_, where), _ in moves) is None:
        return None
    run = run_of(where for _, where in parts)
    return None if run is None else (parts[0][0], run)


def may_leave_apart(step: Step, following: Step) -> bool:
    """Whether what `step` brings may be read by `following` from where it arrived."""
    reduces = step.reduce or following.reduce
    return not reduces and is_plain(step.boxes) and is_plain(following.boxes) and not (step.boxes.sender == FILL).any()
