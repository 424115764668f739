"""Programs and batches on real transports: what has to hold before a call, and the call itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from ...errors import ArgumentError, TransportError, UnsupportedError
from ...planner import Mesh
from ..statistics import stats
from ..transports.hierarchical import HierarchicalTransport
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyTransport, current_transports, why_not_backend
from ..transports.streams import order_on
from ..transports.symmetric_memory.transport import SymmetricMemoryTransport
from .async_work import Joined, Pending, Turn
from .batch import BoundBatch
from .bind import BoundProgram
from .dispatch_modes import below_modes
from .local_slice import BoundSlice


class Call:
    """A program or a batch bound to its transport, ready to be called; None and None where nothing is to be done.

    `participants` are the ranks that run it in step, this one included.
    """

    def __init__(
        self,
        bound: BoundProgram | BoundSlice | BoundBatch | None,
        transport: AnyTransport | None,
        participants: tuple[int, ...],
    ) -> None:
        self.bound, self.transport, self.participants = bound, transport, participants
        self.meets = len(participants) > 1
        self.order = None if bound is None else order_on(bound.device)
        if self.order is not None:
            self.order.join()  # binding has uploaded what calls on other streams read
        if bound is not None and transport is not None:
            self.kind = stats().kind(bound.asked, transport.name, bound.summary)

    def build(self, x: torch.Tensor) -> None:
        """Make ready what the first call with a tensor as aligned as this one would."""
        if isinstance(self.bound, BoundProgram):
            self.bound.build(x.data_ptr())
            if self.order is not None:
                self.order.join()

    def __call__(self, x: Any, later: bool = False) -> Any:
        """What the program makes of `x`; with `later`, where its last exchange can be waited for later, an
        `AsyncCollectiveTensor` that does so when it is first used."""
        if self.bound is None or self.transport is None:
            return x
        transport, bound = self.transport, self.bound
        while transport.pending is not None:
            transport.pending.finish()  # its meetings come before this call's
        if transport.error is not None:
            # Before anything is pushed: buffers that peers kept ready may have found another use. Where the call that
            # failed was in a part of this transport alone, ranks of the other part have not been told.
            error = transport.error
            transport.fail(error)
            raise error
        stats().calls[transport.name] += 1
        self.kind.calls += 1
        if self.order is not None:
            self.order.join(self)
        with Turn(transport, self.kind):
            reply: Any = None
            try:
                fingerprint = bound.fingerprint
                if self.meets:
                    fingerprint = transport.rendezvous.begin(self.participants, fingerprint, bound.title)
                run = bound.run(x, fingerprint)
                if later and isinstance(transport, SymmetricMemoryTransport):
                    return self._beside(run, x, transport)
                if later:
                    return self._begun(run, transport)
                if _profiler_enabled():
                    return self._profiled(run, transport)
                while True:
                    reply = transport.answer(run.send(reply))
            except StopIteration as end:
                return end.value

    def _beside(self, run: Any, x: torch.Tensor, transport: SymmetricMemoryTransport) -> AsyncCollectiveTensor:
        def call() -> torch.Tensor:
            try:
                run.send(None)
            except StopIteration as end:
                return end.value
            raise AssertionError("ranks meet on the device: a run asks nothing of the host")

        with record_function("shardweave::begin") if _profiler_enabled() else nullcontext():
            try:
                out, join = transport.side.run(x, call)
            finally:
                if self.order is not None:
                    self.order.went_on(transport.side.stream)
        transport.pending = Joined(transport, join)
        return transport.pending.as_tensor(out)

    def _begun(self, run: Any, transport: AnyTransport) -> AsyncCollectiveTensor:
        with record_function("shardweave::begin") if _profiler_enabled() else nullcontext():
            request = run.send(None)
            while request.output is None:
                request = run.send(transport.answer(request))
            transport.pending = Pending(run, transport, transport.begin(request), self.kind, request.output)
        return transport.pending.as_tensor(request.output)

    def _profiled(self, run: Any, transport: AnyTransport) -> Any:
        """The same with a named range for each phase, which costs time of its own."""
        reply: Any = None
        with record_function("shardweave::redistribute"):
            while True:
                with record_function("shardweave::copy"):
                    request = run.send(reply)
                with record_function("shardweave::exchange"):
                    reply = transport.answer(request)


def refuse(
    transport: AnyTransport, participants: tuple[int, ...], first_group: tuple[int, ...], error: ArgumentError
) -> None:
    """Tell the ranks that make a call in step that this one does not, because of an argument; wait for none of them.

    Where all ranks refuse alike, what they call next works.

    Args:
        first_group: those of `participants` that this rank would have met first.
    """
    error.peers_know = True
    with suppress(TransportError):  # peers that are gone need not be told
        while transport.pending is not None:
            transport.pending.finish()  # its meetings come before this call's
        transport.rendezvous.refuse(participants, str(error))
        transport.refuse(first_group, participants)


def refuse_unplanned(
    error: ArgumentError | UnsupportedError, meshes: Iterable[DeviceMesh]
) -> ArgumentError | UnsupportedError:
    """Tell the ranks of meshes that this one does not make a call of some of them, unless they know: it refused its
    arguments before it was known whose call it is. No mesh: all ranks. Returns the error."""
    if not error.peers_know and dist.is_initialized():
        error.peers_know = True
        with below_modes():  # which may take the mesh's own tensor for one of the user's
            ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()} or range(dist.get_world_size())
        current_transports().rendezvous.refuse_within(tuple(sorted(ranks)), str(error))
    return error


def check_backend(device: torch.device, mesh_size: int, asked: str | None = None) -> None:
    """
    Raises:
        UnsupportedError: the process group cannot carry programs on the device.
    """
    reason = why_not_backend(device, asked)
    if reason is not None and mesh_size > 1:
        raise UnsupportedError(f"programs cannot be carried out: {reason}; allowed: gloo or nccl among several ranks")


def check_ranks(mesh: Mesh) -> None:
    """
    Raises:
        ArgumentError: the mesh names a rank that there is not.
    """
    last, size = int(mesh.rank_array.max()), dist.get_world_size()
    if last >= size:
        raise ArgumentError(f"mesh: it names rank {last}, the process group has {size} ranks; allowed: 0..{size - 1}")


def transport_for(
    ranks: tuple[int, ...],
    device: torch.device,
    asked: str | None,
    *meshes: DeviceMesh,
    groups: Sequence[dist.ProcessGroup] = (),
) -> tuple[AnyTransport, str]:
    """The transport of some ranks, in which the program bound next may use process groups and those of meshes; and why
    it is that one."""
    transport, why = current_transports().choose(ranks, device, asked)
    if isinstance(transport, ProcessGroupTransport | HierarchicalTransport):
        distinct = {id(mesh): mesh for mesh in meshes}.values()
        transport.knows([*groups, *(group for mesh in distinct for group in _groups_of(mesh))])
    return transport, why


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Process groups that every rank of a mesh has had since the mesh was made: of each dim, and of everyone.

    Never of a flattened mesh: such groups are made later, and some ranks may bind a program before, some after.
    """
    everyone = dist.distributed_c10d.GroupMember.WORLD
    assert everyone is not None
    if mesh.get_coordinate() is None:
        return [everyone]
    try:
        return [everyone, *(mesh.get_group(m) for m in range(mesh.ndim))]
    except RuntimeError:  # a mesh that was made without process groups
        return [everyone]
