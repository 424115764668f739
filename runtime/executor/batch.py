"""A batch bound to a transport: the exchanges of many tensors as one, round by round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch

from ...planner import Batch, Exchange, Program, title
from ..statistics import Summary
from ..transports.base import OneSidedTransport, Transport, WindowedTransport
from ..transports.comm_requests import AwaitTransfer, Barrier, CommRequest, StartTransfer, Transfer
from ..transports.symmetric_memory.window import Window
from .bind import AnyStep, step_type, traffic_of
from .choose_algorithm import Algorithm, choose_algorithm
from .copies import contiguous_strides
from .step_direct import DirectStep
from .step_hierarchical import HierarchicalStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep, SharedBuffers
from .step_window import WindowRegion, WindowStep, window_region

BatchRun = Generator[CommRequest, Any, list[torch.Tensor]]
RoundRun = Generator[CommRequest, Any, None]

_AS_MESSAGES = Algorithm("send and receive", "one message has parts of many tensors")
_HASH_FACTOR = 1000003  # odd, so that earlier values are not lost
_MOST_REQUESTS = 4  # in a title
_ALIGNMENT = 16  # bytes; of each tensor's part of a shared message


class _Round:
    """The next exchange of every program of a batch that this rank takes part in.

    Attributes:
        steps: by the index of the tensor.
    """

    def __init__(self, transport: Transport, rank: int, device: torch.device) -> None:
        self.transport, self.rank, self.device = transport, rank, device
        self.steps: Mapping[int, Any] = {}

    def peer_ranks(self) -> tuple[int, ...]:
        """The peers of all steps, beginning after this rank."""
        ranks = sorted({rank for step in self.steps.values() for rank in step.peer_ranks})
        return tuple([r for r in ranks if r > self.rank] + [r for r in ranks if r < self.rank])


class OneSidedRound(_Round):
    """Every tensor has a receive buffer of its own; a rank offers all of them in one barrier."""

    transport: OneSidedTransport
    steps: Mapping[int, PutStep]

    def bind(self, tensors: int) -> None:
        self.tensors = tensors
        self.peers = self.peer_ranks()

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> RoundRun:
        yield from self.exchange(xs, fingerprint, None, None)

    def exchange(
        self, xs: list[torch.Tensor], fingerprint: int, transfer: Transfer | None, received: torch.Tensor | None
    ) -> RoundRun:
        """Run the round, with a transfer into `received` at the same time, if there is one."""
        transport = self.transport
        receive_buffers = {i: step.new_receive_buffer() for i, step in self.steps.items()}
        address, offered = transport.offer([receive_buffers.get(i) for i in range(self.tensors)])
        replies = (yield Barrier(self.peers, fingerprint, address)) if self.peers else []
        addresses = {r: transport.offered(a, self.tensors) for r, a in zip(self.peers, replies, strict=True)}
        started = None if transfer is None else (yield StartTransfer(transfer))
        self._push(xs, addresses)
        own = partial(self._push_own, xs, receive_buffers)
        if self.peers:
            yield Barrier(self.peers, fingerprint + 1, None, own)
        else:
            own()
        if transfer is not None:
            yield AwaitTransfer(started)
        del offered  # every peer has read the table, if there was one
        for i, step in self.steps.items():
            messages = None if received is None else received.view(step.dtype)
            xs[i] = step.finish(xs[i], receive_buffers[i], step.output(receive_buffers[i]), messages)

    def _push(self, xs: list[torch.Tensor], addresses: dict[int, Sequence[Any]]) -> None:
        for i, step in self.steps.items():
            for index, nbytes, copies in step.pushes:
                step.push(xs[i], copies, addresses[step.peer_ranks[index]][i], nbytes)

    def _push_own(self, xs: list[torch.Tensor], receive_buffers: dict[int, torch.Tensor]) -> None:
        for i, step in self.steps.items():
            if step.own:
                step.push(xs[i], step.own, self.transport.address(receive_buffers[i]), step.own_nbytes)


class WindowedRound(_Round):
    """Tensors of the same ranks share a window: one set of signals for all of them, and the host waits for nothing.

    Tensors that also go to other nodes, or directly into outputs, follow, one at a time.
    """

    transport: WindowedTransport
    steps: Mapping[int, WindowStep | DirectStep | SendRecvStep]

    def bind(self) -> None:
        self.sharing: dict[int, WindowStep] = {}
        self.separate: dict[int, WindowStep | DirectStep | SendRecvStep] = {}
        # By window, the last tensor in it, in the order of the first tensors: the same order on all ranks.
        self.last_in: dict[Window, int] = {}
        self.directions: dict[Window, int] = defaultdict(int)
        """A hash of whether the steps of each window push or pull, for its fingerprint."""
        for i, step in self.steps.items():
            if type(step) is WindowStep and step.window is not None:
                self.sharing[i] = step
                self.last_in[step.window] = i
                mixed = self.directions[step.window] * _HASH_FACTOR + 1 + step.pulls
                self.directions[step.window] = mixed % (1 << 40)
            else:
                self.separate[i] = step

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> RoundRun:
        transport = self.transport
        outs = {i: step.empty() for i, step in self.sharing.items()}
        # The last tensor of a window signals; until then the others wait for what has come already.
        turns = {}
        for i, step in self.sharing.items():
            assert step.window is not None
            mixed = fingerprint ^ self.directions[step.window] << 16
            turns[i] = transport.turn(mixed, self.last_in[step.window] == i, outs[i])
        for i, step in self.sharing.items():
            step.fill_windows(xs[i], turns[i])
        for i, step in self.sharing.items():
            step.read_windows(xs[i], outs[i], turns[i])
        if self.sharing:
            transport.check()
        for i, alone in self.separate.items():
            outs[i] = yield from alone.run(xs[i], fingerprint)
        for i, out in outs.items():
            xs[i] = out


class TwoSidedRound(_Round):
    """One message to each peer and one from each, with the data of all tensors one after the other."""

    steps: Mapping[int, SendRecvStep]
    one_mesh = True
    """Whether all tensors of the batch are on one mesh. Otherwise ranks know different process groups of their meshes,
    and messages use that of the world."""

    def set_messages(self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> None:
        """Set rank, first and last byte of each message in the send buffer and in the receive buffer."""
        self.sends, self.receives = sends, receives
        self.send_bytes, self.receive_bytes = (max((end for _, _, end in x), default=0) for x in (sends, receives))

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> RoundRun:
        transfer, received = self.messages(xs, fingerprint)
        if self.sends or self.receives:
            yield transfer
        for i, step in self.steps.items():
            out = step.empty()
            step.finish([xs[i], received.view(step.dtype)], [out])
            xs[i] = out

    @cached_property
    def group(self) -> tuple[int, ...] | None:
        """The process group of all steps, if they have the same."""
        groups = {step.transfer_group for step in self.steps.values()}
        return next(iter(groups)) if self.one_mesh and len(groups) == 1 else None

    def messages(self, xs: list[torch.Tensor], fingerprint: int) -> tuple[Transfer, torch.Tensor]:
        """Pack all tensors. Returns the transfer and its receive buffer."""
        sizes = self.send_bytes, self.receive_bytes
        packed, received = (self.transport.empty((nbytes,), torch.uint8, self.device) for nbytes in sizes)
        for i, step in self.steps.items():
            step.pack([xs[i]], [packed.view(step.dtype)])
        sends = tuple((rank, packed[a:b]) for rank, a, b in self.sends)
        receives = tuple((rank, received[a:b]) for rank, a, b in self.receives)
        return Transfer(sends, receives, fingerprint, group=self.group), received


class HierarchicalRound(OneSidedRound):
    """One-sided inside a node, with one message to and from each peer of other nodes at the same time."""

    steps: Mapping[int, HierarchicalStep]
    remote: TwoSidedRound

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> RoundRun:
        yield from self.exchange(xs, fingerprint, *self.remote.messages(xs, fingerprint))


_AnyRound = OneSidedRound | TwoSidedRound | WindowedRound


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _title(batch: Batch) -> str:
    """The number of tensors and their requests; of many the first ones, and the digest, which tells batches apart."""
    number = len(batch.programs)
    runs = [(text, len(list(same))) for text, same in groupby(map(title, batch.programs))]
    requests = "; ".join(text if n == 1 else f"{n} times {text}" for text, n in runs[:_MOST_REQUESTS])
    rest = sum(n for _, n in runs[_MOST_REQUESTS:])
    more = f"; {rest} more, {batch.digest:#x}" if rest else ""
    return f"a batch of {number} tensor{'' if number == 1 else 's'}: {requests}{more}"


def _summary(batch: Batch, rank: int) -> Summary:
    at, bound = batch.ranks.index(rank), batch.bytes_bound
    return _title(batch), batch.bytes_received[at], None if bound is None else bound[at]


def _traffic(batch: Batch, rank: int) -> tuple[int, int]:
    positions = [(program, batch.position(i, rank)) for i, program in enumerate(batch.programs)]
    each = [traffic_of(program, position) for program, position in positions if position is not None]
    return sum(sent for sent, _ in each), sum(received for _, received in each)


class BoundBatch:
    """One rank's part of a batch on one transport, for inputs with the given strides.

    Tensors of programs without this rank are returned as they are.

    Attributes:
        fingerprint: compared by ranks in each exchange; differs for different batches.
        request, title, summary, traffic: as in `BoundProgram`.
    """

    def __init__(
        self,
        batch: Batch,
        rank: int,
        strides: Sequence[Sequence[int]],
        transport: Transport,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self.batch, self.rank, self.fingerprint = batch, rank, batch.digest & ~0xFFFF
        self.request, self.title, self.summary = batch.digest, partial(_title, batch), partial(_summary, batch, rank)
        self.traffic = partial(_traffic, batch, rank)
        self.transport, self.dtypes, self.device = transport, dtypes, device
        self.rounds: list[tuple[list[tuple[int, AnyStep]], _AnyRound | None]] = []
        """Local steps with the indices of their tensors, and the exchange after them."""
        nodes = {transport.node_of(rank) for rank in batch.participants(rank)}
        self.is_hierarchical = not transport.one_sided and len(nodes) < len(batch.participants(rank))
        """Whether some of the ranks share a node."""
        own_programs = [i for i in range(len(batch.programs)) if batch.position(i, rank) is not None]
        remaining = {i: list(batch.programs[i].steps) for i in own_programs}
        current_strides = {i: tuple(strides[i]) for i in own_programs}
        while any(remaining.values()):
            before: list[tuple[int, AnyStep]] = []
            exchanges: dict[int, Exchange] = {}
            for i, steps in remaining.items():
                while steps and i not in exchanges:
                    step = steps.pop(0)
                    if isinstance(step, Exchange):
                        exchanges[i] = step
                    else:
                        before.append((i, self._bound(i, step, current_strides)))
            self.rounds.append((before, self._round(exchanges, current_strides) if exchanges else None))

    def _bound(self, i: int, step: Any, strides: dict[int, tuple[int, ...]], shared: Any = None) -> Any:
        """Bind the next step of tensor `i` and update its strides.

        Args:
            shared: the part of the batch's buffers that is this tensor's: a `WindowRegion` or `SharedBuffers`.
        """
        program = self.batch.programs[i]
        position = self.batch.position(i, self.rank)
        assert position is not None
        arguments = program, step, position, strides[i], self.transport, self.dtypes[i], self.device
        if self.transport.windows:
            algorithm = choose_algorithm(program, step, position, self.transport)
            options = {"region": shared} if shared else {}
            bound: AnyStep = step_type(algorithm, self.transport)(*arguments, algorithm=algorithm, **options)
        elif self.transport.one_sided:
            bound = PutStep(*arguments)
        elif self.is_hierarchical and isinstance(step, Exchange):
            bound = HierarchicalStep(*arguments, algorithm=_AS_MESSAGES, shared=shared)
        else:
            bound = SendRecvStep(*arguments, algorithm=_AS_MESSAGES, shared=shared)
        strides[i] = contiguous_strides(bound.shape)
        return bound

    def _round(self, exchanges: dict[int, Exchange], strides: dict[int, tuple[int, ...]]) -> _AnyRound:
        if self.transport.windows:
            windowed = WindowedRound(self.transport, self.rank, self.device)
            regions = self._regions(exchanges)
            windowed.steps = {i: self._bound(i, step, strides, regions.get(i)) for i, step in exchanges.items()}
            windowed.bind()
            return windowed
        if self.transport.one_sided:
            one_sided = OneSidedRound(self.transport, self.rank, self.device)
            one_sided.steps = {i: self._bound(i, step, strides) for i, step in exchanges.items()}
            one_sided.bind(len(self.batch.programs))
            return one_sided
        # Each message has the data of all tensors in their order.
        sends, sent_at = self._messages(exchanges, elements_to)
        receives, received_at = self._messages(exchanges, elements_from)
        two_sided = TwoSidedRound(self.transport, self.rank, self.device)
        shared = {i: SharedBuffers(sent_at[i], received_at[i]) for i in exchanges}
        steps: dict[int, Any] = {i: self._bound(i, step, strides, shared[i]) for i, step in exchanges.items()}
        two_sided.one_mesh = len({program.mesh for program in self.batch.programs}) == 1
        two_sided.set_messages(sends, receives)
        if not self.is_hierarchical:
            two_sided.steps = steps
            return two_sided
        hierarchical = HierarchicalRound(self.transport, self.rank, self.device)
        hierarchical.remote, hierarchical.steps = two_sided, steps
        two_sided.steps = {i: step.remote for i, step in steps.items()}
        hierarchical.bind(len(self.batch.programs))
        return hierarchical

    def _regions(self, exchanges: dict[int, Exchange]) -> dict[int, WindowRegion]:
        """The region of its group's window for each tensor that is exchanged through windows only."""
        regions: dict[int, WindowRegion] = {}
        ends: dict[tuple[int, ...], int] = {}
        for i, step in exchanges.items():
            program, position = self.batch.programs[i], self.batch.position(i, self.rank)
            assert position is not None
            algorithm = choose_algorithm(program, step, position, self.transport)
            region = window_region(program, step, position, self.transport, algorithm)
            if region is not None and step_type(algorithm, self.transport) is WindowStep:
                first = ends.get(region.ranks, 0)
                regions[i] = region._replace(first=first)
                ends[region.ranks] = aligned(first + region.nbytes)
        # All regions of a group extend to the same end, so that they are in the same window.
        return {i: region._replace(nbytes=ends[region.ranks] - region.first) for i, region in regions.items()}

    def _messages(
        self, exchanges: dict[int, Exchange], elements_of: Callable[[Program, Exchange, int], list[tuple[int, int]]]
    ) -> tuple[list[tuple[int, int, int]], dict[int, dict[int, int]]]:
        """Lay out the messages of all tensors in one buffer. `elements_of` returns the elements of a tensor per peer.

        Returns:
            Rank, first and last byte of each message; and by tensor and peer the first element of the tensor's part.
        """
        lengths: dict[int, list[tuple[int, int, int]]] = {}
        for i, step in exchanges.items():
            program, position = self.batch.programs[i], self.batch.position(i, self.rank)
            assert position is not None
            for peer, elements in elements_of(program, step, position):
                rank = program.mesh.rank_at(peer)
                if not self.is_hierarchical or self.transport.node_of(rank) != self.transport.node_of(self.rank):
                    lengths.setdefault(rank, []).append((i, peer, elements))
        places: dict[int, dict[int, int]] = {i: {} for i in exchanges}
        messages, end = [], 0
        for rank, parts in sorted(lengths.items()):
            first = end
            for i, peer, elements in parts:
                places[i][peer] = end // self.dtypes[i].itemsize
                end = aligned(end + elements * self.dtypes[i].itemsize)
            if end > first:
                messages.append((rank, first, end))
        return messages, places

    def run(self, xs: Sequence[torch.Tensor], fingerprint: int | None = None) -> BatchRun:
        """Yields requests and returns the target shards. The inputs are only read.

        Args:
            fingerprint: compared by ranks in each exchange; None: that of the batch.
        """
        outs, fingerprint = list(xs), self.fingerprint if fingerprint is None else fingerprint
        for number, (before, exchange) in enumerate(self.rounds):
            for i, step in before:
                outs[i] = yield from step.run(outs[i], fingerprint)
            if exchange is not None:
                yield from exchange.run(outs, fingerprint + 2 * number)
        return outs


def elements_from(program: Program, step: Exchange, position: int) -> list[tuple[int, int]]:
    """Every peer of a position in a step, and the number of elements received from it, which may be 0."""
    boxes = step.boxes.select(step.boxes.receiver == position)
    sizes = boxes.elements
    return [
        (peer, int(((boxes.sender == peer).sum(axis=1) * sizes).sum()))
        for peer in program.members(step, position)
        if peer != position
    ]


def elements_to(program: Program, step: Exchange, position: int) -> list[tuple[int, int]]:
    """Every peer of a position in a step, and the number of elements sent to it, which may be 0."""
    sizes = (step.boxes.sender == position).sum(axis=1) * step.boxes.elements
    return [
        (peer, int(sizes[step.boxes.receiver == peer].sum()))
        for peer in program.members(step, position)
        if peer != position
    ]
