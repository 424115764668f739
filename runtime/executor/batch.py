"""A batch bound to a transport: the exchanges of many tensors as one, round by round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from ...planner import Batch, Exchange, Program
from ..statistics import Summary
from ..transports.requests import Barrier, CommRequest, HierarchicalExchange, Transfer
from ..transports.symmetric_memory.window import Window, WindowedTransport
from .bind import kind_of
from .copies import contiguous_strides
from .lower import Lowering, lower
from .step import Transport
from .step_collective import CollectiveReduction
from .step_hierarchical import HierarchicalStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep, SharedBuffers
from .step_window import Place, WindowStep, place_of

BatchRun = Generator[CommRequest, Any, list[torch.Tensor]]

_AS_MESSAGES = Lowering("send and receive", "one message has parts of many tensors")
_MIX = 1000003  # odd: what came before is not forgotten
_ALIGNMENT = 16  # bytes; of what a tensor sends or receives, in a message that others share


class _Round:
    """The next exchange of every program, as this rank takes part in it; `steps` by the number of the tensor."""

    def __init__(self, transport: Transport, rank: int, device: torch.device) -> None:
        self.transport, self.rank, self.device = transport, rank, device
        self.steps: Mapping[int, Any] = {}

    def meets(self) -> tuple[int, ...]:
        """The ranks that any of its steps meets, the one after this rank first."""
        ranks = sorted({rank for step in self.steps.values() for rank in step.peer_ranks})
        return tuple([r for r in ranks if r > self.rank] + [r for r in ranks if r < self.rank])


class OneSidedRound(_Round):
    """Every tensor has a buffer of its own; a rank tells its peers all of them at once."""

    steps: Mapping[int, PutStep]

    def bind(self, tensors: int) -> None:
        self.tensors = tensors
        self.peers = self.meets()

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> Generator[CommRequest, Any, None]:
        yield from self.exchange(xs, fingerprint, None, None)

    def exchange(
        self, xs: list[torch.Tensor], fingerprint: int, transfer: Transfer | None, received: torch.Tensor | None
    ) -> Generator[CommRequest, Any, None]:
        """Carry out the round, with a transfer under way meanwhile, if one is given, that fills `received`."""
        transport = self.transport
        receive_buffers = {i: step.new_receive_buffer() for i, step in self.steps.items()}
        address, book = transport.offer([receive_buffers.get(i) for i in range(self.tensors)])
        addresses = (yield Barrier(self.peers, fingerprint, address)) if self.peers else []
        books = {r: transport.offered(a, self.tensors) for r, a in zip(self.peers, addresses, strict=True)}
        push, own = partial(self._push, xs, books), partial(self._push_own, xs, receive_buffers)
        if transfer is not None:
            yield HierarchicalExchange(transfer, push, Barrier(self.peers, fingerprint + 1, None, own))
        else:
            push()
            if self.peers:
                yield Barrier(self.peers, fingerprint + 1, None, own)
            else:
                own()
        del book  # every peer has read it
        for i, step in self.steps.items():
            came = None if received is None else received.view(step.dtype)
            xs[i] = step.finish(xs[i], receive_buffers[i], step.output(receive_buffers[i]), came)

    def _push(self, xs: list[torch.Tensor], books: dict[int, Sequence[Any]]) -> None:
        for i, step in self.steps.items():
            for index, nbytes, copies in step.pushes:
                step.push(xs[i], copies, books[step.peer_ranks[index]][i], nbytes)

    def _push_own(self, xs: list[torch.Tensor], receive_buffers: dict[int, torch.Tensor]) -> None:
        for i, step in self.steps.items():
            if step.own:
                step.push(xs[i], step.own, self.transport.address(receive_buffers[i]), step.own_nbytes)


class WindowedRound(_Round):
    """Tensors of the same ranks share a window: ranks meet once on the device, and the host waits for none of them.

    What goes to other nodes as well goes tensor by tensor, after that.
    """

    steps: Mapping[int, WindowStep | SendRecvStep]

    def bind(self) -> None:
        self.together: dict[int, WindowStep] = {}
        self.apart: dict[int, WindowStep | SendRecvStep] = {}
        # In the order of the first tensors that take them: the same on all ranks.
        self.last_in: dict[Window, int] = {}
        self.ways: dict[Window, int] = defaultdict(int)
        for i, step in self.steps.items():
            if type(step) is WindowStep and step.window is not None:
                self.together[i] = step
                self.last_in[step.window] = i
                self.ways[step.window] = (self.ways[step.window] * _MIX + 1 + step.pulls) % (1 << 40)
            else:
                self.apart[i] = step

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> Generator[CommRequest, Any, None]:
        transport: WindowedTransport = self.transport  # type: ignore[assignment]
        outs = {i: step.empty() for i, step in self.together.items()}
        for window in self.last_in:
            transport.signal(window, "enter")
        for i, step in self.together.items():
            step.fill_windows(xs[i])
        for window in self.last_in:
            transport.signal(window, "meet", fingerprint ^ self.ways[window] << 16)
        for i, step in self.together.items():
            step.read_windows(xs[i], outs[i])
        for i, step in self.together.items():
            assert step.window is not None
            # Every output is overwritten where this rank has failed; after the last of a window it is left.
            transport.signal(step.window, "leave" if self.last_in[step.window] == i else "spoil", poison=outs[i])
        if self.together:
            transport.check()
        for i, alone in self.apart.items():
            outs[i] = yield from alone.run(xs[i], fingerprint)
        for i, out in outs.items():
            xs[i] = out


class TwoSidedRound(_Round):
    """One message to each peer and one from it: what each tensor has in it, one after the other."""

    steps: Mapping[int, SendRecvStep]
    one_mesh = True
    """All tensors of the batch are on one mesh. Else ranks know different ones of its process groups, and messages go
    by the group of everyone."""

    def meet(self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> None:
        """Rank, first and last byte of each message in a buffer of what is sent, and in one of what comes."""
        self.sends, self.receives = sends, receives
        self.packed, self.received = (max((end for _, _, end in x), default=0) for x in (sends, receives))

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> Generator[CommRequest, Any, None]:
        transfer, received = self.messages(xs, fingerprint)
        if self.sends or self.receives:
            yield transfer
        for i, step in self.steps.items():
            out = step.empty()
            step.finish([xs[i], received.view(step.dtype)], [out])
            xs[i] = out

    @cached_property
    def group(self) -> tuple[int, ...] | None:
        """The process group of all its steps, if it is one."""
        groups = {step.of_group for step in self.steps.values()}
        return next(iter(groups)) if self.one_mesh and len(groups) == 1 else None

    def messages(self, xs: list[torch.Tensor], fingerprint: int) -> tuple[Transfer, torch.Tensor]:
        """What is to be sent, all packed, and received, and the buffer for that."""
        packed, received = (
            torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in (self.packed, self.received)
        )
        for i, step in self.steps.items():
            step.pack([xs[i]], [packed.view(step.dtype)])
        sends = tuple((rank, packed[a:b]) for rank, a, b in self.sends)
        receives = tuple((rank, received[a:b]) for rank, a, b in self.receives)
        return Transfer(sends, receives, fingerprint, group=self.group), received


class MixedRound(OneSidedRound):
    """As one-sided inside a node; meanwhile one message to each peer of another node and one from it."""

    steps: Mapping[int, HierarchicalStep]
    far: TwoSidedRound

    def run(self, xs: list[torch.Tensor], fingerprint: int) -> Generator[CommRequest, Any, None]:
        yield from self.exchange(xs, fingerprint, *self.far.messages(xs, fingerprint))


_BoundStep = PutStep | SendRecvStep | WindowStep | CollectiveReduction
_BoundRound = OneSidedRound | TwoSidedRound | WindowedRound


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _title(batch: Batch) -> str:
    return f"a batch of {len(batch.programs)} tensors, {batch.digest:#x}"


def _summary(batch: Batch, rank: int) -> Summary:
    at, bound = batch.ranks.index(rank), batch.bytes_bound
    return _title(batch), batch.bytes_received[at], None if bound is None else bound[at]


class BoundBatch:
    """One rank's part of a batch on one transport, for inputs with the given strides.

    Tensors of programs that the rank has no part in pass through as they are.

    Attributes:
        fingerprint: what ranks compare when they meet; differs for different batches.
        asked, title, summary: as of `BoundProgram`.
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
        self.asked, self.title, self.summary = batch.digest, partial(_title, batch), partial(_summary, batch, rank)
        self.transport, self.dtypes, self.device = transport, dtypes, device
        self.rounds: list[tuple[list[tuple[int, _BoundStep]], _BoundRound | None]] = []
        """Steps without an exchange, by tensor, and the exchange after them."""
        nodes = {transport.node_of(rank) for rank in batch.participants(rank)}
        self.mixes = not transport.one_sided and len(nodes) < len(batch.participants(rank))
        """Whether some of the ranks share a node."""
        taking_part = [i for i in range(len(batch.programs)) if batch.position(i, rank) is not None]
        left = {i: list(batch.programs[i].steps) for i in taking_part}
        given = {i: tuple(strides[i]) for i in taking_part}
        while any(left.values()):
            before: list[tuple[int, _BoundStep]] = []
            exchanges: dict[int, Exchange] = {}
            for i, steps in left.items():
                while steps and i not in exchanges:
                    step = steps.pop(0)
                    if isinstance(step, Exchange):
                        exchanges[i] = step
                    else:
                        before.append((i, self._bound(i, step, given)))
            self.rounds.append((before, self._round(exchanges, given) if exchanges else None))

    def _bound(self, i: int, step: Any, given: dict[int, tuple[int, ...]], shared: Any = None) -> Any:
        """`shared`: the part of what tensors share that is this one's, of the kind that its step takes."""
        program = self.batch.programs[i]
        position = self.batch.position(i, self.rank)
        assert position is not None
        form = program, step, position, given[i], self.transport, self.dtypes[i], self.device
        if self.transport.windows:
            lowering = lower(program, step, position, self.transport)
            kind, options = kind_of(lowering, self.transport), {"place": shared} if shared else {}
            bound: _BoundStep = kind(*form, lowering=lowering, **options)
        elif self.transport.one_sided:
            bound = PutStep(*form)
        elif self.mixes and isinstance(step, Exchange):
            bound = HierarchicalStep(*form, lowering=_AS_MESSAGES, shared=shared)
        else:
            bound = SendRecvStep(*form, lowering=_AS_MESSAGES, shared=shared)
        given[i] = contiguous_strides(bound.shape)
        return bound

    def _round(self, exchanges: dict[int, Exchange], given: dict[int, tuple[int, ...]]) -> _BoundRound:
        if self.transport.windows:
            windowed = WindowedRound(self.transport, self.rank, self.device)
            parts = self._places(exchanges)
            windowed.steps = {i: self._bound(i, step, given, parts.get(i)) for i, step in exchanges.items()}
            windowed.bind()
            return windowed
        if self.transport.one_sided:
            one_sided = OneSidedRound(self.transport, self.rank, self.device)
            one_sided.steps = {i: self._bound(i, step, given) for i, step in exchanges.items()}
            one_sided.bind(len(self.batch.programs))
            return one_sided
        # What a peer gets of each tensor lies in its message in the order of tensors, and so does what comes from it.
        sends, sent_at = self._messages(exchanges, elements_to)
        receives, received_at = self._messages(exchanges, elements_from)
        two_sided = TwoSidedRound(self.transport, self.rank, self.device)
        places = {i: SharedBuffers(sent_at[i], received_at[i]) for i in exchanges}
        steps: dict[int, Any] = {i: self._bound(i, step, given, places[i]) for i, step in exchanges.items()}
        two_sided.one_mesh = len({program.mesh for program in self.batch.programs}) == 1
        two_sided.meet(sends, receives)
        if not self.mixes:
            two_sided.steps = steps
            return two_sided
        mixed = MixedRound(self.transport, self.rank, self.device)
        mixed.far, mixed.steps = two_sided, steps
        two_sided.steps = {i: step.far for i, step in steps.items()}
        mixed.bind(len(self.batch.programs))
        return mixed

    def _places(self, exchanges: dict[int, Exchange]) -> dict[int, Place]:
        """Where each tensor that goes through windows alone has its part of the one of its ranks."""
        found: dict[int, Place] = {}
        ends: dict[tuple[int, ...], int] = {}
        for i, step in exchanges.items():
            program, position = self.batch.programs[i], self.batch.position(i, self.rank)
            assert position is not None
            lowering = lower(program, step, position, self.transport)
            place = place_of(program, step, position, self.transport, lowering)
            if place is not None and kind_of(lowering, self.transport) is WindowStep:
                first = ends.get(place.ranks, 0)
                found[i] = place._replace(first=first)
                ends[place.ranks] = aligned(first + place.nbytes)
        # All of them in one: the window that the last of its ranks needs.
        return {i: place._replace(nbytes=ends[place.ranks] - place.first) for i, place in found.items()}

    def _messages(
        self, exchanges: dict[int, Exchange], elements_of: Callable[[Program, Exchange, int], list[tuple[int, int]]]
    ) -> tuple[list[tuple[int, int, int]], dict[int, dict[int, int]]]:
        """Messages with parts of all tensors, one after the other in a buffer: rank, first and last byte of each; and
        for each tensor the first element of every peer's part. `elements_of`: how long such a part is."""
        lengths: dict[int, list[tuple[int, int, int]]] = {}
        for i, step in exchanges.items():
            program, position = self.batch.programs[i], self.batch.position(i, self.rank)
            assert position is not None
            for peer, elements in elements_of(program, step, position):
                rank = program.mesh.rank_at(peer)
                if not self.mixes or self.transport.node_of(rank) != self.transport.node_of(self.rank):
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
        """Yields where ranks meet; returns the target shards. The inputs are only read.

        Args:
            fingerprint: what ranks compare; None: that of the request.
        """
        outs, fingerprint = list(xs), self.fingerprint if fingerprint is None else fingerprint
        for number, (before, exchange) in enumerate(self.rounds):
            for i, step in before:
                outs[i] = yield from step.run(outs[i], fingerprint)
            if exchange is not None:
                yield from exchange.run(outs, fingerprint + 2 * number)
        return outs


def elements_from(program: Program, step: Exchange, position: int) -> list[tuple[int, int]]:
    """Every peer of a position in a step, and the elements that it sends; 0 where it sends nothing."""
    boxes = step.boxes.select(step.boxes.receiver == position)
    sizes = boxes.elements
    return [
        (peer, int(((boxes.sender == peer).sum(axis=1) * sizes).sum()))
        for peer in program.members(step, position)
        if peer != position
    ]


def elements_to(program: Program, step: Exchange, position: int) -> list[tuple[int, int]]:
    """Every peer of a position in a step, and the elements that it gets; 0 where it gets nothing."""
    sizes = (step.boxes.sender == position).sum(axis=1) * step.boxes.elements
    return [
        (peer, int(sizes[step.boxes.receiver == peer].sum()))
        for peer in program.members(step, position)
        if peer != position
    ]
