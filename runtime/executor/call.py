"""Calls of bound programs: checks before a call, the choice of a transport, notice of refused arguments, the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from ...errors import ArgumentError, TransportError, UnsupportedError
from ...kernels import on_device
from ...planner import Mesh, Topology
from ..convert_specs import mesh_of
from ..environment import requested_transport
from ..flight_recorder import Details
from ..process_group_cache import ProcessGroupCache
from ..statistics import stats
from ..transports.call_lock import CallLock
from ..transports.hierarchical import HierarchicalTransport
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyTransport, Transports, current_transports, transports_of, why_not_backend
from ..transports.streams import order_on
from ..transports.symmetric_memory.transport import SymmetricMemoryTransport
from .async_work import AsyncResult, AsyncRun, HostTransport, SideStreamRun
from .batch import BoundBatch
from .bind import BoundProgram
from .dispatch_modes import below_modes, is_fake
from .local_slice import BoundSlice
from .ranges import wants_ranges
from .run import ExclusiveCall, Run, finish_pending, run_profiled, run_to_end

_logger = logging.getLogger(__name__)


class Call:
    """A bound program or batch that is ready to be called.

    Args:
        bound, transport: None if there is nothing to do: a call then returns its input.
        participants: the ranks that make the call together, this one included.

    Attributes:
        replaces_torch: `install` has checked that such calls are carried out here rather than by torch.
    """

    def __init__(
        self,
        bound: BoundProgram | BoundSlice | BoundBatch | None,
        transport: AnyTransport | None,
        participants: tuple[int, ...],
    ) -> None:
        self.bound, self.transport, self.participants = bound, transport, participants
        self.has_peers = len(participants) > 1
        self.replaces_torch = False
        self.calls = stats().calls
        self.order = None if bound is None else order_on(bound.device)
        if self.order is not None:
            self.order.join()  # binding has uploaded tables that calls on other streams read
        if bound is not None and transport is not None:
            self.statistics = stats().kind(bound.request, transport.name, bound.summary)
            self.details = Details(transport.name, bound.device, bound.traffic)
            if _logger.isEnabledFor(logging.DEBUG):
                text, received, _ = bound.summary()
                _logger.debug("bound %s: receives %d bytes by %s", text, received, transport.name)

    def build(self, x: torch.Tensor) -> None:
        """Compile and upload what the first call with a tensor of the alignment of `x` needs."""
        if isinstance(self.bound, BoundProgram):
            self.bound.build(x.data_ptr())
            if self.order is not None:
                self.order.join()

    def __call__(self, x: Any, async_op: bool = False) -> Any:
        """Run on `x` and return the output: with `async_op`, if the last exchange can be awaited later, an
        `AsyncResult` that waits for it on first use. Waits for calls of other threads.

        Raises:
            MeetingTimeoutError: a peer did not begin the call in time.
            TransportError: a peer failed, timed out or made a different request, now or in an earlier call.
        """
        if self.bound is None or self.transport is None:
            return x
        transport, bound = self.transport, self.bound
        with ExclusiveCall(transport, self.statistics):
            self.calls[transport.name] += 1
            self.statistics.calls += 1
            if self.order is not None:
                self.order.join(self)
            fingerprint = bound.fingerprint
            if self.has_peers:
                fingerprint = transport.rendezvous.begin(self.participants, fingerprint, bound.title, self.details)
            run = bound.run(x, fingerprint)
            if async_op:
                if isinstance(transport, SymmetricMemoryTransport):
                    return self._run_on_side_stream(run, x, transport)
                return self._start(run, transport)
            if wants_ranges():
                return run_profiled(run, transport.answer)
            return run_to_end(run, transport.answer)

    def _run_on_side_stream(self, run: Run, x: torch.Tensor, transport: SymmetricMemoryTransport) -> Any:
        with record_function("shardweave::begin") if wants_ranges() else nullcontext():
            try:
                out, join = transport.side.run(x, lambda: run_to_end(run, transport.answer))
            finally:
                if self.order is not None:
                    self.order.moved_to(transport.side.stream)
        transport.pending = SideStreamRun(transport, join)
        return AsyncResult(out, transport.pending)

    def _start(self, run: Run, transport: HostTransport) -> torch.Tensor:
        """Run up to the last exchange and start it. Returns the output itself if there is no exchange."""
        try:
            with record_function("shardweave::begin") if wants_ranges() else nullcontext():
                request = run.send(None)
                while request.output is None:
                    request = run.send(transport.answer(request))
                output, complete = request.output, transport.begin(request)
        except StopIteration as end:
            return end.value
        transport.pending = AsyncRun(run, transport, complete, self.statistics, output.device)
        return AsyncResult(output, transport.pending)


def refuse(
    transport: AnyTransport,
    participants: tuple[int, ...],
    first_group: tuple[int, ...],
    error: ArgumentError,
    all_meet: bool,
) -> None:
    """Notify the participants of a call that this rank does not make it, because of an invalid argument. Waits for them
    only where they have not met, or have not learned of a refusal before.

    If all ranks refuse the same call, or all of them learn of it at once (`SharedMemoryTransport.refuse`), their next
    call works.

    Args:
        first_group: the participants of this rank's first exchange.
        all_meet: the participants make exactly one call in place of this one, and if this rank's first exchange is
            among all of them, so is theirs.
    """
    error.peers_know = True
    if len(participants) == 1:
        return
    rendezvous, calls = transport.rendezvous, transport.rendezvous.calls
    with suppress(TransportError), rendezvous.lock:  # peers that are gone need no notice
        finish_pending(transport)
        transport.check()  # else peers have been told of the failure
        before, calls.current = calls.current, calls.next_call(participants, f"a call that it refuses: {error}")
        try:
            transport.refuse(first_group, participants, all_meet)
        finally:
            calls.current = before
            # Afterwards, so that a peer that reads this finds what the transport tells.
            rendezvous.refuse(participants, str(error))


def refuse_unplanned(
    error: ArgumentError | UnsupportedError, meshes: Iterable[DeviceMesh]
) -> ArgumentError | UnsupportedError:
    """Notify the ranks of `meshes` (all ranks if there are none) as `refuse_among` does, and return the error."""
    if not error.peers_know and dist.is_initialized() and not is_fake():
        with below_modes():  # they may take the mesh's own tensor for one of the user's
            meshes = list(meshes)
            ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()} or range(dist.get_world_size())
            groups = named_groups(ranks, meshes)
        refuse_among(error, ranks, groups)
    return error


def refuse_among(
    error: ArgumentError | UnsupportedError, ranks: Iterable[int], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Notify `ranks` that this rank does not make a call of some of them, because its arguments were invalid before the
    participants were known. Does nothing if they have been notified. `groups`: as for `transports_of`."""
    if error.peers_know:
        return
    error.peers_know = True
    participants = tuple(sorted(ranks))
    with suppress(TransportError), binding():
        transports_of(participants, groups).rendezvous.refuse_within(participants, str(error))


def binding() -> CallLock:
    """A context in which a call is bound: other threads neither bind nor call, since bound calls and the process groups
    that they may use are common to all.

    Raises:
        UnsupportedError: torch.distributed is not initialised.
        MeetingTimeoutError: another thread was in calls for longer than the timeout.
    """
    return current_transports().rendezvous.lock


@contextmanager
def naming(
    ranks: Iterable[int],
    request: Callable[[], str],
    *meshes: DeviceMesh,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Iterator[None]:
    """A context, inside that of `binding`, in which errors of waits for peers name the request of these ranks that is
    being bound, for a call that names process groups as for `transport_for`. `request` returns its text."""
    ranks = tuple(sorted(ranks))
    calls = transports_of(ranks, [*groups, *named_groups(ranks, meshes)]).rendezvous.calls
    before = calls.current
    calls.current = calls.next_call(ranks, request)
    try:
        yield
    finally:
        calls.current = before


ON_META = "on the meta device, which has no data"


def why_no_data(x: torch.Tensor) -> str | None:
    """Why programs cannot move the memory of a tensor, as in "it is …"; None if they can."""
    if x.is_meta:
        return ON_META
    if x.layout is not torch.strided:
        return f"{x.layout} on {x.device}"
    return f"quantized, of {x.dtype}" if x.is_quantized else None


def check_data(name: str, x: torch.Tensor) -> None:
    """Check that programs can move the memory of the local tensor of the DTensor `name`.

    Raises:
        UnsupportedError: they cannot.
    """
    if (obstacle := why_no_data(x)) is not None:
        raise UnsupportedError(f"{name}: its local tensor is {obstacle}; allowed: a strided tensor with data")


def check_backend(device: torch.device, mesh_size: int, requested: str | None = None) -> None:
    """Check that the default process group can exchange data on a device.

    Raises:
        UnsupportedError: it cannot.
    """
    reason = why_not_backend(device, requested)
    if reason is not None and mesh_size > 1:
        raise UnsupportedError(f"programs cannot run: {reason}; allowed: gloo or nccl among several ranks")


def check_ranks(mesh: Mesh) -> None:
    """Check that the default process group has all ranks of a mesh.

    Raises:
        ArgumentError: it does not.
    """
    last, size = int(mesh.rank_array.max()), dist.get_world_size()
    if last >= size:
        raise ArgumentError(f"mesh: it names rank {last}, the process group has {size} ranks; allowed: 0..{size - 1}")


def transport_for(
    ranks: tuple[int, ...],
    device: torch.device,
    requested: str | None,
    *meshes: DeviceMesh,
    groups: Sequence[dist.ProcessGroup] = (),
) -> tuple[AnyTransport, str]:
    """The transport of some ranks and the reason for it. The program that is bound next may use the process groups
    `groups` and those of `meshes`."""
    requested = requested or requested_transport()
    with binding():
        named = [*groups, *named_groups(ranks, meshes)]
        key = ranks, device, requested, tuple(named)
        chosen = _chosen.get(key)
        if chosen is None:
            with on_device(device):  # whose pinned memory and streams a new transport has
                transports = transports_of(ranks, named)
                chosen = _chosen[key] = (transports, *transports.choose(ranks, device, requested, named))
        transports, transport, why = chosen
        if isinstance(transport, ProcessGroupTransport | HierarchicalTransport):
            distinct = {id(mesh): mesh for mesh in meshes}.values()
            known = [*groups, *(group for mesh in distinct for group in _groups_of(mesh))]
            transport.use_groups([group for group in known if transports.has(group)])
    return transport, why


def found_topology_of(
    ranks: Iterable[int], device: torch.device, *meshes: DeviceMesh, groups: Sequence[dist.ProcessGroup] = ()
) -> Topology | None:
    """The topology of some ranks (`Transports.find_topology`), for a call that names process groups, as for
    `transport_for`."""
    with binding():
        ranks = tuple(sorted(ranks))
        named = [*groups, *named_groups(ranks, meshes)]
        return transports_of(ranks, named).machines.find_topology(ranks, device)


def named_groups(ranks: Iterable[int], meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """The process groups that a call of `ranks` names by its meshes: those of each mesh that has all of the ranks, and
    that all of them therefore know."""
    distinct = {id(mesh): mesh for mesh in meshes}.values()
    having_all = [mesh for mesh in distinct if set(ranks) <= set(mesh_of(mesh).rank_array.tolist())]
    return [group for mesh in having_all for group in _groups_of(mesh)]


# By ranks, device, requested transport, and the process groups that the call names.
_chosen: ProcessGroupCache[
    tuple[tuple[int, ...], torch.device, str | None, tuple[dist.ProcessGroup, ...]],
    tuple[Transports, AnyTransport, str],
] = ProcessGroupCache(2048)


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups that every rank of a mesh has had since the mesh was made: of each dim, and of the world.

    Never of a flattened mesh: such groups are made later, and some ranks may bind a program before, some after.
    """
    world = dist.distributed_c10d.GroupMember.WORLD
    assert world is not None
    if mesh.get_coordinate() is None:
        return [world]
    try:
        return [world, *(mesh.get_group(m) for m in range(mesh.ndim))]
    except RuntimeError:  # the mesh was made without process groups
        return [world]
