"""The transport of ranks without common memory: torch.distributed, with exact message sizes from the plan."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...errors import PeerError, TransportError
from ..process_group_cache import watch
from .comm_requests import (
    AllGather,
    AllReduce,
    AllToAll,
    AwaitTransfer,
    Collective,
    CommRequest,
    PendingCall,
    ReduceScatter,
    StartTransfer,
    Transfer,
)
from .device_fingerprints import DeviceFingerprints
from .rendezvous.rendezvous import Rendezvous
from .shared_memory.private_pool import pooled
from .watchdog import Watchdog

_SHORTEST_WAIT = timedelta(milliseconds=1)
_ROUNDING = 2e-3  # seconds; gloo rounds timeouts down to milliseconds, so that waits would end before a deadline

_CLOSED = "gloo's connections are closed by that, so torch's own calls on the same process groups fail as well"

# Messages on gloo are matched by tags. Those of shardweave have this bit set; those of users are small numbers.
_OURS = 1 << 30
_NEVER_SENT = _OURS - 1
_PROBE = _OURS - 2


def message_tag(fingerprint: int, number: int) -> int:
    """The tag, of 31 bits, of messages at one point of a program in one call."""
    mixed = (fingerprint * 0x9E3779B97F4A7C15 + number * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return _OURS | (mixed ^ mixed >> 29) >> 20 & (_OURS - 1)


class GroupRanks(tuple[int, ...]):
    """The ranks of a process group in its order, with the group itself and the ranks but for this one."""

    process_group: dist.ProcessGroup
    others: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks: Iterable[int], own: int) -> GroupRanks:
        """`ranks`, in the order of `group`; `own`: this rank."""
        new = cls(ranks)
        new.process_group, new.others = group, tuple(rank for rank in new if rank != own)
        return new


class ProcessGroupTransport:
    """Exchanges between any ranks of a process group, by grouped sends and receives or by collectives.

    There is one such transport for each backend of the default process group, and further ones for groups that were
    made after a failure. Binding and running never create a process group; collectives use the groups of the meshes.

    **Every exchange compares the request and the number of the call.** On gloo, message tags contain both, so that
    data of another call is never received, whatever its size, and a rank whose wait is long reads in the store what its
    peers are doing. gloo's all-to-all has no tags: each message begins with a header of both, and receive buffers have
    room for the largest message of any request. Other backends have no tags at all: a fingerprint is sent with each
    message and compared on the receiver's device. The host learns of a mismatch one call later; the outputs are
    poisoned at once.

    Args:
        timeout: seconds that a wait may take.
        backend: one of `backend_limits.BACKENDS`.
        carrier: the group that carries messages. Ranks have their numbers in the default group.

    Raises:
        TransportError: from every call after the first failure.
    """

    one_sided = False
    windows = None
    name = "process_group"

    def __init__(
        self, rank: int, size: int, timeout: float, backend: str, rendezvous: Rendezvous, carrier: GroupRanks
    ) -> None:
        self.rank, self.size, self.timeout, self.backend = rank, size, timeout, backend
        self.rendezvous, self._carrier = rendezvous, carrier
        self._number = {member: number for number, member in enumerate(carrier)}
        self._groups: dict[tuple[int, ...], GroupRanks] = {}
        self._group_list: list[dist.ProcessGroup] | None = None
        # With their ranks, of which torch tells nothing any more once they are destroyed.
        self._used_groups: dict[dist.ProcessGroup, GroupRanks] = {carrier.process_group: carrier}
        self._has_ended = False
        self._error: TransportError | None = None
        self.busy = self._closed = False
        self.pending: PendingCall | None = None
        self._watchdog = Watchdog(rendezvous.errors, self._close_connections)
        self.has_tags = backend == "gloo"
        self._checks: dict[torch.device, DeviceFingerprints] = {}

    def check(self) -> None:
        """Raise the error of an earlier call.

        Raises:
            TransportError: an earlier call failed, as far as the host knows.
        """
        if (error := self.error) is not None:
            raise error

    def node_of(self, rank: int) -> int:
        return rank

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        try:
            return pooled(shape, dtype)
        except TransportError as error:
            self.rendezvous.fail_outside_call(self.fail, error)
            raise

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...], all_meet: bool) -> None:
        """Does nothing: the notice in the store is enough, because messages of other calls are never received."""

    def use_groups(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Set the process groups that the programs bound next may use. Of several with the same ranks the first is
        used.

        These depend on the request only, not on what was bound before, so that peers select the same.
        """
        if (group_list := list(groups)) == self._group_list:
            return
        self._group_list, self._groups = group_list, {}
        for group in group_list:
            watch(group)
            ranks = GroupRanks.of(group, dist.get_process_group_ranks(group), self.rank)
            self._groups.setdefault(tuple(sorted(ranks)), ranks)

    def forget_groups(self, living: Iterable[dist.ProcessGroup]) -> None:
        """Let go of the process groups that are not `living`: the connections of a group last as long as anything holds
        it."""
        for group in set(self._used_groups).difference(living):
            del self._used_groups[group]
        if set(self._group_list or ()).difference(living):
            self._group_list, self._groups = None, {}

    def group_order(self, ranks: Sequence[int]) -> GroupRanks | None:
        return self._groups.get(tuple(sorted(ranks)))

    def connect(self, ranks: tuple[int, ...], device: torch.device) -> None:
        """Exchange a byte with every rank and in every group that the programs bound next may use, because backends
        connect ranks on first use, which a captured graph cannot do. Collective among `ranks`.

        Raises:
            TransportError: a rank did not arrive.
        """
        self.rendezvous.begin(ranks, 0, "prepare")
        for group in (self.group_order(ranks), *self._groups.values()):
            members = ranks if group is None else group
            if len(members) > 1 and set(members) <= set(ranks):
                peers = [rank for rank in members if rank != self.rank]
                sent, received = (torch.zeros(len(peers), dtype=torch.uint8, device=device) for _ in range(2))
                sends, receives = (tuple((p, x[i : i + 1]) for i, p in enumerate(peers)) for x in (sent, received))
                self.answer(Transfer(sends, receives, 0, group=group))

    def answer(self, request: CommRequest) -> Any:
        return self.begin(request)()

    def begin(self, request: CommRequest) -> Callable[[], Any]:
        """Start a request. The returned function waits for the peers and returns the result."""
        if isinstance(request, AwaitTransfer):
            return partial(request.started, request.receives)
        if isinstance(request, StartTransfer):
            started = self._start(request.transfer)
            return lambda: started
        if isinstance(request, Transfer):
            return self._start(request)
        assert isinstance(request, Collective)
        if not self.has_tags:
            return self._with_fingerprints(request)
        if isinstance(request, AllToAll):
            return self._with_headers(request)
        self._check_neighbour(request)
        return self._collective(request)

    def _start(self, request: Transfer) -> Callable[..., None]:
        """Start messages. The returned function waits for the number of receives that it is given, or for all."""
        if not self.has_tags:
            return _once(self._with_fingerprints(request))
        if self._has_ended:
            current = self.rendezvous.calls.current
            raise TransportError(f"the process group was destroyed during {current}; allowed: after it")
        group: Any = self._carrier.process_group
        number = self._number
        tag = message_tag(request.fingerprint, self.rendezvous.calls.current.number)
        peers, works = [], []
        for peer, buffer in request.receives:
            works.append(self._posted(group.recv, buffer, number[peer], tag))
            peers.append(peer)
        for i, (peer, buffer) in enumerate(request.sends):
            if request.before_send is not None:
                request.before_send(i)
            works.append(self._posted(group.send, buffer, number[peer], tag))
            peers.append(peer)
        if request.during_wait is not None:
            request.during_wait()
        done = 0

        def wait(receives: int | None = None) -> None:
            nonlocal done
            end = len(works) if receives is None else receives
            self._wait(tuple(peers[done:end]), works[done:end])
            done = max(done, end)

        return wait

    def _posted(self, post: Callable[..., dist.Work], buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """A send to, or a receive from, a peer, which is given by its number in the carrier."""
        try:
            return post([buffer], peer, tag)
        except RuntimeError as error:
            raise self._connection_error((self._carrier[peer],), error) from error

    def _wait(self, peers: tuple[int, ...], works: Sequence[dist.Work]) -> None:
        """Wait for works, one per peer or one collective with all peers."""
        if not works:
            return
        watchdog, deadline = self._watchdog, time.monotonic() + self.timeout
        try:
            for i, work in enumerate(works):
                # Only this peer: others may have finished this exchange, and be in a later call.
                watched = peers[i : i + 1] if len(works) > 1 else peers
                late = partial(tuple, watched)
                watchdog.update(late) if i else watchdog.start(late)
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.0) + _ROUNDING))
                except RuntimeError as error:
                    watchdog.stop()
                    if watchdog.error is not None:
                        raise self._explained(watchdog.error) from error
                    if time.monotonic() >= deadline:
                        self._closed = self._closed or self.backend == "gloo"  # by gloo
                        raise self._explained(self.rendezvous.errors.timed_out(*watched)) from error
                    raise self._connection_error(watched, error) from error
        finally:
            watchdog.stop()

    def _explained(self, error: TransportError) -> TransportError:
        """An error that ended a wait, with what that has done to torch's own calls."""
        return type(error)(f"{error}; {_CLOSED}") if self._closed and _CLOSED not in str(error) else error

    def _with_headers(self, request: AllToAll) -> Callable[[], None]:
        """An all-to-all on gloo, with a header before each message, because it has no tags."""
        header, address = [request.fingerprint, self.rendezvous.calls.current.number], request.sends.data_ptr()
        for nbytes in request.send_sizes:
            if nbytes:
                _Header.from_address(address)[:] = header  # type: ignore[assignment]
            address += nbytes
        finish = self._collective(request)

        def wait() -> None:
            finish()
            address = request.receives.data_ptr()
            for rank, nbytes in zip(request.group, request.receive_sizes, strict=True):
                if nbytes and list(_Header.from_address(address)) != header:
                    raise self.rendezvous.errors.disagreement(rank)
                address += nbytes

        return wait

    def _check_neighbour(self, request: Collective) -> None:
        """Before a collective on gloo, which has no tags, send a message with this call's tag to the next rank of the
        group, and receive one from the previous rank. If all neighbours agree, all ranks do."""
        group = request.group
        at, message = group.index(self.rank), torch.zeros(1, dtype=torch.uint8, device="cpu")
        next_rank, previous_rank = group[(at + 1) % len(group)], group[at - 1]
        if len(group) > 1:
            received = torch.empty(1, dtype=torch.uint8, device="cpu")
            self.begin(Transfer(((next_rank, message),), ((previous_rank, received),), request.fingerprint))()

    def _collective(self, request: Collective) -> Callable[[], object]:
        assert isinstance(request.group, GroupRanks)
        group, peers = request.group.process_group, request.group.others
        self._used_groups[group] = request.group
        work = _started(request, group)
        if request[1].device.type == "cpu":
            return partial(self._wait, peers, [work])
        return lambda: work.wait()  # the stream waits, not this process

    def _with_fingerprints(self, request: Transfer | Collective) -> Callable[[], None]:
        """Exchange data, and a fingerprint with each peer that the device compares."""
        device = request[1].device if isinstance(request, Collective) else _device_of(request)
        if device is None:
            if isinstance(request, Transfer) and request.during_wait is not None:
                request.during_wait()
            return lambda: None
        check = self._checks.get(device)
        if check is None:
            check = self._checks[device] = DeviceFingerprints(self.rank, self.size, device)
        expected = message_tag(request.fingerprint, self.rendezvous.calls.current.number)
        fingerprints = check.new(expected)
        # A backend may connect all ranks of a group on its first use, so the group of exactly these ranks is used if
        # there is one.
        group = (request.group if isinstance(request.group, GroupRanks) else self._carrier).process_group
        if isinstance(request, Transfer):
            sends, receives = list(request.sends), list(request.receives)
        else:
            sends = receives = []
        senders = {p: None for p, _ in receives} if isinstance(request, Transfer) else dict.fromkeys(request.group)
        receivers = {p: None for p, _ in sends} if isinstance(request, Transfer) else dict.fromkeys(request.group)
        own = fingerprints[self.rank : self.rank + 1]
        sends = [*sends, *((p, own) for p in receivers if p != self.rank)]
        incoming = [*receives, *((p, fingerprints[p : p + 1]) for p in senders if p != self.rank)]
        if isinstance(request, Transfer) and request.before_send is not None:
            for i in range(len(request.sends)):
                request.before_send(i)
        operations = [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in incoming]
        operations += [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        if isinstance(request, Collective):
            works.append(_started(request, group))
        if isinstance(request, Transfer) and request.during_wait is not None:
            request.during_wait()
        outputs = [b for _, b in receives] if isinstance(request, Transfer) else [_result(request)]

        def wait() -> None:
            for work in works:
                work.wait()  # the stream waits, not this process
            check.compare(fingerprints, expected, outputs)

        return wait

    @property
    def error(self) -> TransportError | None:
        """The error that invalidated this transport, as far as the host knows. Does not wait."""
        if self._error is None:
            for check in self._checks.values():
                peer = check.mismatch()
                if peer is not None:
                    self._error = self.rendezvous.errors.disagreement(peer)
        return self._error

    def _connection_error(self, peers: tuple[int, ...], error: RuntimeError) -> TransportError:
        """The error after the connection to one of `peers` was lost: from the store, or that of torch.distributed."""
        errors, call = self.rendezvous.errors, self.rendezvous.calls.current
        with suppress(dist.DistError):  # the rank that hosts the store is gone
            for peer in peers:
                if disagreement := errors.refusal(peer) or errors.call_mismatch(peer, True):
                    return disagreement
            for peer in peers:
                if known := errors.failed(peer) or errors.left(peer):
                    return known
            if len(peers) == 1:
                # A peer whose wait timed out has lost its connections too, before it writes so.
                return errors.lost(peers[0], f": {error}")
        who = " or ".join(f"rank {peer}" for peer in peers)
        return PeerError(f"{who} is gone; rank {self.rank} was waiting for it in {call}: {error}")

    def fail(self, error: TransportError) -> None:
        """Notify ranks that wait for this one, now or later, that it has failed. The first error is kept."""
        self._error = self.error or error
        self.rendezvous.reports.fail(f"rank {self.rank} failed: {self._error}")

    def _close_connections(self) -> None:
        """End the waits of this process and of its peers: gloo closes connections after a timeout. Other backends have
        only their own timeouts."""
        if self.backend != "gloo" or self._closed:
            return
        self._closed = True
        for ranks in list(self._used_groups.values()):
            for number, peer in enumerate(ranks):
                if peer != self.rank and _close(ranks.process_group, number):
                    break

    def is_gone(self, rank: int) -> bool:
        """Whether gloo has lost its connection to a rank. Posts a receive that is never matched, and drops it."""
        if self.backend != "gloo" or self._closed or rank not in self._number:
            return False
        try:
            _receive(self._carrier.process_group, self._number[rank], _PROBE)
        except RuntimeError:
            return True
        return False

    def end(self) -> None:
        """The process group has been destroyed: no more messages are sent."""
        self._has_ended = True


_Header = ctypes.c_int64 * 2


def _once(finish: Callable[[], None]) -> Callable[..., None]:
    """A function that calls `finish` the first time, whatever it is given."""
    waits = [finish]
    return lambda receives=None: waits.pop()() if waits else None


def _device_of(request: Transfer) -> torch.device | None:
    for _, buffer in (*request.receives, *request.sends):
        return buffer.device
    return None


def _result(request: Collective) -> torch.Tensor:
    """The output of a collective, as flat bytes."""
    return (request.values if isinstance(request, AllReduce) else request.receives).view(-1).view(torch.uint8)


def _receive(group: Any, peer: int, tag: int) -> dist.Work:
    """Start to receive a byte from a rank, given by its number in the group, which may have been destroyed."""
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, tag)


def _close(group: dist.ProcessGroup, peer: int) -> bool:
    """Close all connections of a group by a wait that times out. Returns False if the one to `peer` was closed."""
    try:
        _receive(group, peer, _NEVER_SENT).wait(_SHORTEST_WAIT)
    except RuntimeError as error:
        return "timed out" in str(error).lower()
    return False


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _started(request: Collective, group: dist.ProcessGroup) -> dist.Work:
    if isinstance(request, AllToAll):
        # The backend's own method: around it dist.all_to_all_single takes as long again.
        backend: Any = group._get_backend(request.sends.device)
        return backend.alltoall_base(request.receives, request.sends, request.receive_sizes, request.send_sizes)
    options: Any = {"group": group, "async_op": True}
    if isinstance(request, AllGather):
        return dist.all_gather_into_tensor(request.receives, request.sends, **options)
    if isinstance(request, ReduceScatter):
        return dist.reduce_scatter_tensor(request.receives, request.sends, op=_OPS[request.op], **options)
    return dist.all_reduce(request.values, op=_OPS[request.op], **options)
