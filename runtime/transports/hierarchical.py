"""Transports of several nodes: ranks of a node share memory, ranks of different nodes use torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

from ...errors import TransportError
from .backend_limits import WindowPolicy
from .comm_requests import Barrier, CommRequest, PendingCall
from .process_group import ProcessGroupTransport
from .rendezvous.rendezvous import Rendezvous
from .shared_memory.transport import SharedMemoryTransport
from .symmetric_memory.transport import SymmetricMemoryTransport

Inside = TypeVar("Inside", SharedMemoryTransport, SymmetricMemoryTransport)


class HierarchicalTransport(Generic[Inside]):
    """A shared-memory or symmetric-memory transport inside each node, and process groups across nodes.

    Both parts are also used on their own, by programs of ranks of one node or of one rank per node. At most one call
    runs in both parts together, and a failure of either invalidates both.

    Args:
        nodes: the node of each rank; equal on all ranks.

    Raises:
        TransportError: from every call after the first failure of either part.
    """

    one_sided = False

    def __init__(self, inside: Inside, across: ProcessGroupTransport, nodes: Mapping[int, Hashable]) -> None:
        self.inside: Inside = inside
        self.across, self._nodes = across, nodes
        self.rank, self.size, self.timeout = across.rank, across.size, across.timeout
        self.backend = across.backend
        self.windows: WindowPolicy | None = inside.windows
        self.empty, self.group_order, self.use_groups = inside.empty, across.group_order, across.use_groups

    @property
    def rendezvous(self) -> Rendezvous:
        return self.across.rendezvous

    def check(self) -> None:
        """Raise the error of an earlier call.

        Raises:
            TransportError: an earlier call failed, as far as the host knows.
        """
        if (error := self.error) is not None:
            raise error

    def node_of(self, rank: int) -> Hashable:
        return self._nodes[rank]

    def answer(self, request: CommRequest) -> Any:
        return self.begin(request)()

    def begin(self, request: CommRequest) -> Callable[[], Any]:
        """Start a request. The returned function waits for the peers and returns the result."""
        return self.across.begin(request)

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...], all_meet: bool) -> None:
        """Notify peers of this node at their next barrier. Ranks of other nodes read it in the store."""
        if len(first_group) > 1:
            # The ranks that a step synchronises with depend on the step; those that wait for this rank participate.
            node_peers = tuple(rank for rank in participants if self._nodes[rank] == self._nodes[self.rank])
            self.inside.refuse(node_peers, participants, all_meet)

    def fail(self, error: TransportError) -> None:
        """Notify all peers that this rank has failed: those that wait for it raise, now or later."""
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


class HierarchicalSharedMemoryTransport(HierarchicalTransport[SharedMemoryTransport]):
    """One-sided inside a node: ranks write into each other's outputs."""

    name = "hierarchical"

    def __init__(
        self, inside: SharedMemoryTransport, across: ProcessGroupTransport, nodes: Mapping[int, Hashable]
    ) -> None:
        super().__init__(inside, across, nodes)
        self.recycles, self.addressable, self.address = inside.recycles, inside.addressable, inside.address
        self.open, self.offer, self.offered = inside.open, inside.offer, inside.offered
        self.receive_buffers = inside.receive_buffers

    def begin(self, request: CommRequest) -> Callable[[], Any]:
        return (self.inside if isinstance(request, Barrier) else self.across).begin(request)


class HierarchicalSymmetricMemoryTransport(HierarchicalTransport[SymmetricMemoryTransport]):
    """Windows inside a node, whose ranks synchronise on the device."""

    name = "hierarchical symmetric_memory"

    def __init__(
        self, inside: SymmetricMemoryTransport, across: ProcessGroupTransport, nodes: Mapping[int, Hashable]
    ) -> None:
        super().__init__(inside, across, nodes)
        self.window, self.signal, self.turn = inside.window, inside.signal, inside.turn
        self.outputs = inside.outputs
