"""A step on a transport whose ranks send and receive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ...planner import Exchange, Row
from ..transports.backend_limits import BACKENDS
from ..transports.base import TwoSidedTransport
from ..transports.comm_requests import HEADER, AllGather, AllToAll, AwaitTransfer, StartTransfer, Transfer
from .choose_algorithm import Algorithm
from .copies import Copies, Move, Part, Reduction, contiguous_start, packed
from .pieces import Cut, is_worth_cutting, part_of_move, pieces_of
from .run import Run
from .step import BoundStep, Terms

Key = TypeVar("Key")

_RECEIVED = 1  # index of the receive buffer, after the input
_ALIGNMENT = 16  # bytes; messages in a buffer that kernels pack or unpack are aligned, so that kernels move wide words


class SharedBuffers(NamedTuple):
    """Where the data of one tensor begins in the send and receive buffers of a batch, in elements, by the position of
    the peer."""

    sent_at: Mapping[int, int]
    received_at: Mapping[int, int]


class SendRecvStep(BoundStep):
    """Pack what peers need, exchange messages of exact size, unpack or reduce: one kernel before, one after.

    The exchange is one of three: a message to each peer, where contiguous data is sent and received in place; an
    all-to-all between two buffers; or an all-gather, where all ranks get the same.

    On CPUs large messages to peers are sent in pieces: each is sent once it is packed, and unpacked or reduced once it
    has arrived, while the next ones are on the wire.

    Args:
        algorithm: selects the exchange.
        shared: the place in a batch's buffers, which the batch exchanges; None: the step exchanges on its own.
    """

    transport: TwoSidedTransport

    def __init__(self, *args: Any, algorithm: Algorithm, shared: SharedBuffers | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group = algorithm.group
        ranks = [self.program.mesh.rank_at(p) for p in self.program.members(self.step, self.me)]
        # Between meshes each rank has other members, so that there is no process group of all of them.
        one_group = isinstance(self.step, Exchange) and self.step.group is not None
        self.transfer_group = self.transport.group_order(ranks) if one_group else None
        self.is_all_to_all = algorithm.name == "all-to-all"
        self.is_all_gather = algorithm.name == "all-gather"
        # In elements, of an all-to-all: the header of a message, and the room for one, equal for all requests.
        self.header = HEADER // self.dtype.itemsize if self.is_all_to_all else 0
        room = BACKENDS[self.transport.backend].all_to_all if self.is_all_to_all else 0
        self.room = self.header + room // self.dtype.itemsize
        collective = self.is_all_to_all or self.is_all_gather
        exact = collective or self.device.type == "cpu"
        strided = any(layout.strided_dims for layout in (self.step.source, self.step.target))
        self.in_pieces = self.device.type == "cpu" and shared is None and not (collective or strided)
        self.in_pieces = self.in_pieces and is_worth_cutting(self._most_bytes())
        self.unit = 1 if exact else max(1, _ALIGNMENT // self.dtype.itemsize)
        peers = list(zip(self.peers, self.peer_ranks, strict=True))
        if self.is_all_to_all or self.is_all_gather:
            peers.sort(key=lambda peer: self.group.index(peer[1]))
        self.on_arrival: Sequence[Copies | Reduction] = []
        self._bind_sends(peers[:1] if self.is_all_gather else peers, shared)
        if self.is_all_gather:
            rank = self.program.mesh.rank_at(self.me)
            peers.insert(self.group.index(rank), (self.me, rank))
        unpack = self._bind_receives(peers, shared)
        self.bind_finish(unpack)
        # In bytes by rank of the group, of an all-to-all.
        sent = {rank: self.header + last - first for rank, _, first, last in self.sends}
        me = self.program.mesh.rank_at(self.me)
        self.send_sizes = [sent.get(rank, 0) * self.dtype.itemsize for rank in self.group]
        self.receive_sizes = [self.room * self.dtype.itemsize * (rank != me) for rank in self.group]

    def _most_bytes(self) -> int:
        """The bytes of all messages that this rank sends, or of those that it receives."""
        sent = [row for peer in self.peers for rows in self.outgoing.get(peer, {}).values() for row in rows]
        received = [row for peer in self.peers for rows in self.incoming_from.get(peer, {}).values() for _, row in rows]
        return max(_elements(sent), _elements(received)) * self.dtype.itemsize

    def _pieces(self, rows: Iterable[tuple[Key, Row]]) -> Sequence[Sequence[tuple[Key, Row, Cut | None]]]:
        """The pieces of a message."""
        if self.in_pieces:
            return pieces_of(rows, self.dtype.itemsize)
        whole = [(key, row, None) for key, row in rows]
        return [whole] if whole else []

    def _moves(self, rows: Iterable[Row], base: int) -> tuple[list[Move], int]:
        """The copies that pack rows from element `base` on, and the end."""
        moves: list[Move] = []
        for row in rows:
            moves.append(Move((0, packed(row.extent, base)), [(0, self.source(row))]))
            base += math.prod(row.extent)
        return moves, base

    def _bind_sends(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> None:
        sends: list[tuple[int, tuple[int, bool, int, int], list[Move]]] = []
        self.send_elements = 0
        may_send_in_place = shared is None and not self.is_all_to_all
        for peer, rank in peers:
            first = self._aligned(self.send_elements) + self.header if shared is None else shared.sent_at[peer]
            rows = [(c, row) for c, of_term in sorted(self.outgoing.get(peer, {}).items()) for row in of_term]
            moves, last = self._moves([row for _, row in rows], first)
            if last == first and not self.is_all_to_all:
                continue
            in_place = _contiguous_source(moves) if may_send_in_place else None
            is_in_place = in_place is not None
            start = first if in_place is None else in_place
            for number, piece in enumerate(self._pieces(rows) or [[]]):
                moves, end = self._moves([row for _, row, _ in piece], start)
                sends.append((number, (rank, is_in_place, start, end), [] if is_in_place else moves))
                start = end
            if not is_in_place:
                self.send_elements = last
        # The first pieces of all messages come first.
        sends.sort(key=lambda send: send[0])
        self.sends = [send for _, send, _ in sends]
        """Rank, whether in the input instead of the send buffer, first and last element in it."""
        packing = [moves for _, _, moves in sends]
        if self.in_pieces:
            self.pack_pieces = [self.copies(moves) for moves in packing]
            packing = []
        self.pack = self.copies([move for moves in packing for move in moves])

    def _bind_receives(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> list[tuple[Row, Part]]:
        """The rows that have to be unpacked, and where in the receive buffer they are."""
        receives: list[tuple[int, tuple[int, int, int, bool], list[tuple[int, Cut | None]]]] = []
        self.staged: Terms = {}
        unpack: list[tuple[Row, Part]] = []
        in_place = shared is None and not (self.is_all_to_all or self.step.reduce)
        in_place = in_place and (not self.is_all_gather or self._gathers_in_order(peers))
        base = 0
        for index, (peer, rank) in enumerate(peers):
            base = self._aligned(base) if shared is None else shared.received_at[peer]
            if self.is_all_to_all:
                base = index * self.room + self.header
            by_term = sorted(self.incoming_from.get(peer, {}).items())
            rows = [(i, row) for _, of_term in by_term for i, row in of_term]
            place = contiguous_start(self.target(row) for _, row in rows) if in_place else None
            is_in_output = place is not None
            start = base if place is None else place
            for number, piece in enumerate(self._pieces(rows)):
                end = start + _elements(row for _, row, _ in piece)
                parts = [(i, cut) for i, _, cut in piece]
                receives.append((number, (rank, start, end, is_in_output), parts))
                start = end
            if not is_in_output:
                for contributor, of_term in by_term:
                    for i, row in of_term:
                        where = _RECEIVED, packed(row.extent, base)
                        self.staged[i, contributor] = where
                        unpack.append((row, where))
                        base += math.prod(row.extent)
        receives.sort(key=lambda receive: receive[0])
        self.receives = [receive for _, receive, _ in receives]
        """Rank, first and last element, and whether in the output instead of the receive buffer."""
        self.arrives_with = {part: k for k, (_, _, parts) in enumerate(receives) for part in parts}
        """By index in `incoming` and cut, the index of the last receive that brings a term of it."""
        self.receive_elements = len(peers) * self.room if self.is_all_to_all else base
        return unpack

    def bind_finish(self, unpack: list[tuple[Row, Part]]) -> None:
        if self.step.reduce:
            self.bind_arrivals(dict(enumerate(self.reduction_moves(self.staged))), self.reducing)
            return
        kept = [] if self.is_all_gather else [row for row in self.incoming if row.senders[0] == self.me]
        moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in kept]
        moves += self.fills()
        of_row = {i: Move((0, self.target(self.incoming[i])), [where]) for (i, _), where in self.staged.items()}
        self.bind_arrivals(of_row, self.copies, moves)

    def bind_arrivals(
        self,
        of_row: Mapping[int, Move],
        bind: Callable[[list[Move]], Copies] | Callable[[list[Move]], Reduction],
        more: Sequence[Move] = (),
    ) -> None:
        """Bind what completes the output: `finish` for everything, or, in pieces, for what no message brings, and
        `on_arrival` for each receive."""
        moves = dict(of_row)
        if self.in_pieces:
            at: list[list[Move]] = [[] for _ in self.receives]
            for (i, cut), k in self.arrives_with.items():
                if i in of_row:
                    at[k].append(part_of_move(of_row[i], cut))
                    moves.pop(i, None)
            self.on_arrival = [bind(of_piece) for of_piece in at]
        self.finish = bind([*more, *moves.values()])

    def _gathers_in_order(self, peers: Sequence[tuple[int, int]]) -> bool:
        """Whether the output is the concatenation of the data of all ranks."""
        end = 0
        for peer, _ in peers:
            rows = [row for _, row in self.incoming_from.get(peer, {}).get(0, [])]
            if contiguous_start(map(self.target, rows)) != end:
                return False
            end += _elements(rows)
        return True

    def _aligned(self, elements: int) -> int:
        return -(-elements // self.unit) * self.unit

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        out = self.empty()
        received = self.transport.empty((self.receive_elements,), self.dtype, self.device)
        # All ranks of a group take part in a collective, including those that send and receive nothing.
        exchanges = bool(self.group or self.sends or self.receives)
        request = self.messages(x, out, received, fingerprint) if exchanges else None
        if self.in_pieces:
            started = None if request is None else (yield StartTransfer(cast("Transfer", request)))
            return (yield from self.arrive(started, [x, received], out))
        if request is not None:
            yield request._replace(output=out) if self.last else request
        self.finish([x, received], [out])
        return out

    def arrive(self, started: Any, buffers: list[torch.Tensor], out: torch.Tensor) -> Run:
        """Complete the output, in pieces as they arrive, and return it.

        Args:
            started: the transfer, for `AwaitTransfer`; None: there is none.
            buffers: what the copies that complete the output read.
        """
        output = out if self.last else None
        if self.in_pieces:
            self.finish(buffers, [out])
        for k, complete in enumerate(self.on_arrival):
            yield AwaitTransfer(started, k + 1, output)
            complete(buffers, [out])
        if started is not None:
            yield AwaitTransfer(started, None, output)
        if not self.in_pieces:
            self.finish(buffers, [out])
        return out

    def messages(
        self, x: torch.Tensor, out: torch.Tensor, received: torch.Tensor, fingerprint: int
    ) -> Transfer | AllToAll | AllGather:
        """The request for the exchange, packed unless it is in pieces."""
        send_buffer = self.transport.empty((self.send_elements,), self.dtype, self.device)
        self.pack([x], [send_buffer])
        packed_bytes, received_bytes = send_buffer.view(torch.uint8), received.view(torch.uint8)
        size = self.dtype.itemsize
        if self.is_all_to_all:
            return AllToAll(self.group, packed_bytes, received_bytes, self.send_sizes, self.receive_sizes, fingerprint)
        sends = []
        for rank, in_place, first, last in self.sends:
            if in_place:
                part = x.as_strided((last - first,), (1,), x.storage_offset() + first)
                sends.append((rank, part.view(torch.uint8)))
            else:
                sends.append((rank, packed_bytes[first * size : last * size]))
        out_bytes = out.view(-1).view(torch.uint8)
        if self.is_all_gather:
            receives_in_output = self.receives[0][3]
            return AllGather(self.group, sends[0][1], out_bytes if receives_in_output else received_bytes, fingerprint)
        receives = [
            (rank, (out_bytes if in_output else received_bytes)[first * size : last * size])
            for rank, first, last, in_output in self.receives
        ]

        def pack_piece(i: int) -> None:
            self.pack_pieces[i]([x], [send_buffer])

        before_send = pack_piece if self.in_pieces else None
        return Transfer(tuple(sends), tuple(receives), fingerprint, group=self.transfer_group, before_send=before_send)


def _elements(rows: Iterable[Row]) -> int:
    return sum([math.prod(row.extent) for row in rows])


def _contiguous_source(moves: Sequence[Move]) -> int | None:
    """The element of the input at which the data of moves is as it would be packed; None if it has to be packed."""
    if contiguous_start(where for (_, where), _ in moves) is None:
        return None
    return contiguous_start(where for _, ((_, where),) in moves)
