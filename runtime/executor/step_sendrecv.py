"""A step on a transport whose ranks send and receive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ...planner import FILL, Exchange, Row, Step
from ..transports.backend_limits import BACKENDS
from ..transports.base import TwoSidedTransport
from ..transports.comm_requests import HEADER, AllGather, AllToAll, AwaitTransfer, StartTransfer, Transfer
from .choose_algorithm import Algorithm
from .copies import Copies, Move, Part, Reduction, ScatteredTensor, StridedTensor, contiguous_start, is_plain, packed
from .pieces import Cut, is_worth_cutting, part_of_move, pieces_of
from .run import Run
from .step import BoundStep, Terms
from .step_put import Unreduced

Key = TypeVar("Key")

_PACKED = -1  # in place of the index of a buffer
_ALIGNMENT = 16  # bytes; messages in a buffer that kernels pack or unpack are aligned, so that kernels move wide words


class SharedBuffers(NamedTuple):
    """Where the data of one tensor begins in the send and receive buffers of a batch, in elements, by the position of
    the peer."""

    sent_at: Mapping[int, int]
    received_at: Mapping[int, int]


class Arriving(NamedTuple):
    """A run whose messages have started.

    Attributes:
        started: the transfer, for `AwaitTransfer`, or its receives; None if there is none.
        buffers: what the copies that complete the output read.
        out: the output.
        more: the transfer of the other sends, if there are any.
    """

    started: Any
    buffers: list[torch.Tensor]
    out: torch.Tensor
    more: Any = None


class SendRecvStep(BoundStep):
    """Pack what peers need, exchange messages of exact size, unpack or reduce: one kernel before, one after.

    The exchange is one of three: a message to each peer, where contiguous data is sent and received in place; an
    all-to-all between two buffers; or an all-gather, where all ranks get the same.

    On CPUs large messages to peers are sent in pieces: each is sent once it is packed, and unpacked or reduced once it
    has arrived, while the next ones are on the wire.

    Args:
        algorithm: selects the exchange.
        shared: the place in a batch's buffers, which the batch exchanges; None: the step exchanges on its own.
        scattered: the input, if the previous step left it in several buffers; None: `run` gets one tensor.
        buffers: the number of buffers that `run` gets.
        keep_scattered: leave the output in several buffers: `run` returns its buffers and one more, and `output_boxes`
            tells where in them the output is.
    """

    transport: TwoSidedTransport

    is_forwarded = False
    """`run` returns `Arriving`, for a `ForwardStep`."""

    def __init__(
        self,
        *args: Any,
        algorithm: Algorithm,
        shared: SharedBuffers | None = None,
        scattered: ScatteredTensor | None = None,
        buffers: int = 1,
        keep_scattered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.input = scattered or StridedTensor(0, self.source_strides)
        self.receive_index, self.keep_scattered = buffers, keep_scattered
        self.group = algorithm.group
        ranks = [self.program.mesh.rank_at(p) for p in self.program.members(self.step, self.me)]
        # Between meshes each rank has other members, so that there is no process group of all of them.
        one_group = isinstance(self.step, Exchange) and self.step.group is not None
        self.transfer_group = self.transport.group_order(ranks) if one_group else None
        self.is_all_to_all = algorithm.name == "all-to-all"
        self.is_all_gather = algorithm.name == "all-gather"
        # In elements, of an all-to-all: the header of a message, and the room for one, equal for all requests.
        self.header = HEADER // self.dtype.itemsize if self.is_all_to_all else 0
        room = BACKENDS[self.transport.backend].room(len(self.group)) if self.is_all_to_all else 0
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
            target = packed(row.extent, base)
            for part in self.input.locate(row, self.boxes.axes):
                moves.append(Move((0, part.of(target)), [part.place]))
            base += math.prod(row.extent)
        return moves, base

    def _bind_sends(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> None:
        sends: list[tuple[int, tuple[int, int, int, int], list[Move], list[Row]]] = []
        self.send_elements = 0
        may_send_in_place = shared is None and not self.is_all_to_all
        for peer, rank in peers:
            first = self._aligned(self.send_elements) + self.header if shared is None else shared.sent_at[peer]
            rows = [(c, row) for c, of_term in sorted(self.outgoing.get(peer, {}).items()) for row in of_term]
            moves, last = self._moves([row for _, row in rows], first)
            if last == first and not self.is_all_to_all:
                continue
            in_place = _contiguous_source(moves) if may_send_in_place else None
            buffer, start = (_PACKED, first) if in_place is None else in_place
            for number, piece in enumerate(self._pieces(rows) or [[]]):
                sent = [row for _, row, _ in piece]
                moves, end = self._moves(sent, start)
                sends.append((number, (rank, buffer, start, end), [] if in_place else moves, sent))
                start = end
            if in_place is None:
                self.send_elements = last
        # The first pieces of all messages come first.
        sends.sort(key=lambda send: send[0])
        self.sends = [send for _, send, _, _ in sends]
        """Rank, index of the buffer or `_PACKED`, first and last element in it."""
        packing = [moves for _, _, moves, _ in sends]
        self.reductions: list[Reduction] = []
        """Of the previous step, if they are left to this one: those that each send needs, then the rest."""
        self.sends_first = 0
        """The number of sends that need only what the previous step has pushed first, if it pushes in two parts."""
        if self.in_pieces:
            self.sent_rows = [rows for _, _, _, rows in sends]
            """For each send, the rows in it; those that are cut, in parts."""
            self.pack_pieces = [self.copies(moves) for moves in packing]
            packing = []
        self.pack = self.copies([move for moves in packing for move in moves])

    def _bind_receives(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> list[tuple[Row, Part]]:
        """The rows that have to be unpacked, and where in the receive buffer they are."""
        receives: list[tuple[int, tuple[int, int, int, bool], list[tuple[int, Cut | None]]]] = []
        self.staged: Terms = {}
        unpack: list[tuple[Row, Part]] = []
        in_place = shared is None and not (self.is_all_to_all or self.keep_scattered or self.step.reduce)
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
                        where = self.receive_index, packed(row.extent, base)
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
        parts = [(row, part) for row in kept for part in self.input.locate(row, self.boxes.axes)]
        if self.keep_scattered:
            self.output_boxes = ScatteredTensor([*((part.row(row), part.place) for row, part in parts), *unpack])
            return
        moves = [Move((0, part.of(self.target(row))), [part.place]) for row, part in parts]
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

    def run(self, x: torch.Tensor | list[torch.Tensor] | Unreduced, fingerprint: int) -> Run:
        if self.in_pieces and not self.keep_scattered:
            arriving = yield from self.start(x, fingerprint)
            return arriving if self.is_forwarded else (yield from self.arrive(arriving))
        assert not isinstance(x, Unreduced)
        buffers = x if isinstance(x, list) else [x]
        out = None if self.keep_scattered else self.empty()
        received = self.transport.empty((self.receive_elements,), self.dtype, self.device)
        # All ranks of a group take part in a collective, including those that send and receive nothing.
        if self.group or self.sends or self.receives:
            request = self.messages(buffers, received if out is None else out, received, fingerprint)
            yield request._replace(output=out) if self.last else request
        buffers = [*buffers, received]
        if out is None:
            return buffers
        self.finish(buffers, [out])
        return out

    def start(self, x: torch.Tensor | list[torch.Tensor] | Unreduced, fingerprint: int) -> Run:
        """Start the messages, and complete what they do not bring. Returns `Arriving`."""
        unreduced = x if isinstance(x, Unreduced) else None
        buffers = [unreduced.out] if unreduced else x if isinstance(x, list) else [cast("torch.Tensor", x)]
        out = self.empty()
        received = self.transport.empty((self.receive_elements,), self.dtype, self.device)
        started, more = None, None
        if self.sends or self.receives:
            messages = cast("Transfer", self.messages(buffers, out, received, fingerprint, unreduced))
            if unreduced is None or unreduced.later is None:
                started = yield StartTransfer(messages)
            else:
                started, more = yield from start_in_two(messages, self.sends_first, unreduced.later)
        if unreduced:
            self.reductions[-1](unreduced.buffers, [unreduced.out])
        buffers = [*buffers, received]
        self.finish(buffers, [out])
        return Arriving(started, buffers, out, more)

    def arrive(self, arriving: Arriving, then: Callable[[int], None] | None = None) -> Run:
        """Complete the output as messages arrive, and return it. `then` is called after each receive."""
        started, buffers, out, more = arriving
        output = out if self.last else None
        for k, complete in enumerate(self.on_arrival):
            yield AwaitTransfer(started, k + 1, output)
            complete(buffers, [out])
            if then is not None:
                then(k)
        for transfer in (started, more):
            if transfer is not None:
                yield AwaitTransfer(transfer, None, output)
        if not self.in_pieces:
            self.finish(buffers, [out])
        return out

    def messages(
        self,
        buffers: Sequence[torch.Tensor],
        out: torch.Tensor,
        received: torch.Tensor,
        fingerprint: int,
        unreduced: Unreduced | None = None,
    ) -> Transfer | AllToAll | AllGather:
        """The request for the exchange, packed unless it is in pieces. `unreduced`: the input, if it is reduced piece
        by piece."""
        send_buffer = self.transport.empty((self.send_elements,), self.dtype, self.device)
        self.pack(buffers, [send_buffer])
        packed_bytes, received_bytes = send_buffer.view(torch.uint8), received.view(torch.uint8)
        size = self.dtype.itemsize
        if self.is_all_to_all:
            return AllToAll(self.group, packed_bytes, received_bytes, self.send_sizes, self.receive_sizes, fingerprint)
        sends = []
        for rank, buffer, first, last in self.sends:
            if buffer == _PACKED:
                sends.append((rank, packed_bytes[first * size : last * size]))
                continue
            source = buffers[buffer]
            part = source.as_strided((last - first,), (1,), source.storage_offset() + first)
            sends.append((rank, part.view(torch.uint8)))
        out_bytes = out.view(-1).view(torch.uint8)
        if self.is_all_gather:
            receives_in_output = self.receives[0][3]
            return AllGather(self.group, sends[0][1], out_bytes if receives_in_output else received_bytes, fingerprint)
        receives = [
            (rank, (out_bytes if in_output else received_bytes)[first * size : last * size])
            for rank, first, last, in_output in self.receives
        ]

        def prepare_send(i: int) -> None:
            if unreduced:
                self.reductions[i](unreduced.buffers, [unreduced.out])
            self.pack_pieces[i](buffers, [send_buffer])

        before_send = prepare_send if self.in_pieces else None
        return Transfer(tuple(sends), tuple(receives), fingerprint, group=self.transfer_group, before_send=before_send)


def start_in_two(transfer: Transfer, sends: int, between: Run) -> Run:
    """Start a transfer with its first `sends` sends only, run `between`, and start the other sends. Returns both
    transfers, for `AwaitTransfer`."""
    before_send = transfer.before_send
    assert before_send is not None
    started = yield StartTransfer(transfer._replace(sends=transfer.sends[:sends]))
    yield from between
    others = transfer.sends_only()._replace(sends=transfer.sends[sends:], before_send=lambda i: before_send(sends + i))
    return started, (yield StartTransfer(others))


def _elements(rows: Iterable[Row]) -> int:
    return sum([math.prod(row.extent) for row in rows])


def _contiguous_source(moves: Sequence[Move]) -> tuple[int, int] | None:
    """The index of the buffer, and the element in it, where the data of moves already is as it would be packed; None if
    it has to be packed."""
    places = [place for _, (place,) in moves]
    if len({buffer for buffer, _ in places}) != 1 or contiguous_start(where for (_, where), _ in moves) is None:
        return None
    start = contiguous_start(where for _, where in places)
    return None if start is None else (places[0][0], start)


def can_stay_scattered(step: Step, next_step: Step) -> bool:
    """Whether `next_step` can read the output of `step` from its receive buffers."""
    reduces = step.reduce or next_step.reduce
    return not reduces and is_plain(step.boxes) and is_plain(next_step.boxes) and not (step.boxes.sender == FILL).any()
