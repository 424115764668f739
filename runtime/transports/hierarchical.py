"""Ranks of several nodes: those of a node write into each other's memory, the others go by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import TransportError
from .policies import WindowPolicy
from .process_group import ProcessGroupTransport
from .rendezvous import Rendezvous
from .requests import Address, Barrier, CommRequest, HierarchicalExchange, PendingCall
from .shared_memory.receive_buffers import ReceiveBuffers
from .shared_memory.transport import SharedMemoryTransport
from .symmetric_memory.transport import SymmetricMemoryTransport
from .symmetric_memory.window import Use, Window

InsideNodes = SharedMemoryTransport | SymmetricMemoryTransport


class HierarchicalTransport:
    """A one-sided transport for the ranks of each node, and a collective one across nodes, as one.

    Ranks of both use them alone as well, so what holds for one call in turn, and for the first failure, holds for both
    together.

    Args:
        nodes: of each rank that meets here; alike on all ranks.

    Raises:
        TransportError: from every call after the first failure of either.
    """

    one_sided = False

    def __init__(self, inside: InsideNodes, across: ProcessGroupTransport, nodes: Mapping[int, Hashable]) -> None:
        self.inside, self.across, self._nodes = inside, across, nodes
        self.name = "hierarchical" if isinstance(inside, SharedMemoryTransport) else f"hierarchical {inside.name}"
        self.rank, self.size, self.timeout = across.rank, across.size, across.timeout
        self.backend, self.recycles = across.backend, inside.recycles

    @property
    def rendezvous(self) -> Rendezvous:
        return self.across.rendezvous

    @property
    def windows(self) -> WindowPolicy | None:
        return self.inside.windows

    def window(self, ranks: tuple[int, ...], nbytes: int) -> Window:
        assert isinstance(self.inside, SymmetricMemoryTransport)
        return self.inside.window(ranks, nbytes)

    def signal(self, window: Window, use: Use, fingerprint: int = 0, poison: torch.Tensor | None = None) -> None:
        assert isinstance(self.inside, SymmetricMemoryTransport)
        self.inside.signal(window, use, fingerprint, poison)

    def check(self) -> None:
        """
        Raises:
            TransportError: this transport is dead, as far as the host knows.
        """
        if (error := self.error) is not None:
            raise error

    def node_of(self, rank: int) -> Hashable:
        return self._nodes[rank]

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inside.empty(shape, dtype, device)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return self.inside.addressable(tensor)

    def address(self, buffer: torch.Tensor) -> Address:
        return self.inside.address(buffer)

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        return self.inside.open(address, nbytes)

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Address, object]:
        return self.inside.offer(buffers)

    def offered(self, address: Address, number: int) -> Sequence[Address]:
        return self.inside.offered(address, number)

    def receive_buffers(self, ranks: tuple[int, ...]) -> ReceiveBuffers | None:
        return self.inside.receive_buffers(ranks)

    def knows(self, groups: Iterable[dist.ProcessGroup]) -> None:
        self.across.knows(groups)

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        return self.across.group_order(ranks)

    def answer(self, request: CommRequest) -> Any:
        return self.begin(request)()

    def begin(self, request: CommRequest) -> Callable[[], Any]:
        """`answer`, but what it returns waits for the peers."""
        if isinstance(request, Barrier):
            return self.inside.begin(request)
        if not isinstance(request, HierarchicalExchange):
            return self.across.begin(request)
        received = self.across.begin(request.transfer)
        request.push()
        met = self.inside.begin(request.meet)

        def wait() -> Any:
            # Of a node's ranks it is seen when one fails; of the others when its connections close.
            found = met()
            received()
            return found

        return wait

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...]) -> None:
        """Tell peers of this node at their next meeting; wait for nobody."""
        if len(first_group) > 1:
            # Which of them are met first, or at all, depends on the step: who waits for this rank is of its
            # participants.
            near = tuple(rank for rank in participants if self._nodes[rank] == self._nodes[self.rank])
            self.inside.refuse(near, participants)

    def fail(self, error: TransportError) -> None:
        """Tell peers of this node and of others that wait for this rank, now or later, that it will not come."""
        self.inside.fail(error)
        self.across.fail(error)

    @property
    def error(self) -> TransportError | None:
        return self.inside.error or self.across.error

    @property
    def busy(self) -> bool:
        return self.inside.busy or self.across.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.inside.busy = self.across.busy = busy

    @property
    def pending(self) -> PendingCall | None:
        return self.inside.pending or self.across.pending

    @pending.setter
    def pending(self, pending: PendingCall | None) -> None:
        self.inside.pending = self.across.pending = pending
