"""Ranks that share no memory exchange through torch.distributed, with the exact sizes the plan states."""

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
from .device_fingerprints import WordCheck
from .rendezvous import Rendezvous
from .requests import AllGather, AllReduce, AllToAll, Collective, CommRequest, PendingCall, ReduceScatter, Transfer
from .watchdog import WaitWatcher

_SHORTEST_WAIT = timedelta(milliseconds=1)
_ROUNDING = 2e-3  # gloo drops what is less than a millisecond: its waits would end before a deadline

# Messages on gloo, which pairs sends with receives by their tags. Ours have this bit: those of users are small numbers.
_OURS = 1 << 30
_NEVER_SENT = _OURS - 1
_PROBE = _OURS - 2


def message_tag(fingerprint: int, number: int) -> int:
    """Of the messages of one point of a program in one call: 31 bits that differ for other points and calls."""
    mixed = (fingerprint * 0x9E3779B97F4A7C15 + number * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return _OURS | (mixed ^ mixed >> 29) >> 20 & (_OURS - 1)


class Members(tuple[int, ...]):
    """The ranks of a process group in its order, and the group itself."""

    process_group: dist.ProcessGroup


class ProcessGroupTransport:
    """The ranks of the default process group, in any subsets: grouped sends and receives need no group of their own.

    One for each backend that the group has. Compiling and running never make a group; collectives use those that the
    meshes have.

    **Ranks agree in every exchange on the request and on the number of the call.** On gloo both are in the tags of
    messages, so that data of another call is never received, whatever its size; who waits in vain finds out from the
    store what its peers are doing. Its all-to-all has no tags: there both stand before the data of each message, and
    the room for it is that of the largest that there may be. Other backends have no tags at all: each message is sent
    together with a word that the receiver's device compares, which the host learns one call later; outputs are
    overwritten then.
    """

    one_sided = False
    recycles = False
    windows = None
    name = "process_group"

    def __init__(self, rank: int, size: int, timeout: float, backend: str, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.timeout, self.backend = rank, size, timeout, backend
        self.rendezvous = rendezvous
        self._groups: dict[tuple[int, ...], Members] = {}
        self._known: list[dist.ProcessGroup] = []
        self._used: set[dist.ProcessGroup] = set()
        self._error: TransportError | None = None
        self.busy = self._left = False
        self.pending: PendingCall | None = None
        self._watcher = WaitWatcher(rendezvous, self._close_connections)
        self.has_tags = backend == "gloo"
        self._checks: dict[torch.device, WordCheck] = {}

    def check(self) -> None:
        """
        Raises:
            TransportError: this transport is dead, as far as the host knows.
        """
        if (error := self.error) is not None:
            raise error

    def node_of(self, rank: int) -> int:
        return rank

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return False

    def address(self, buffer: torch.Tensor) -> object:
        raise NotImplementedError("a two-sided transport has no addresses")

    def open(self, address: object, nbytes: int) -> torch.Tensor:
        raise NotImplementedError("a two-sided transport has no addresses")

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[object, object]:
        raise NotImplementedError("a two-sided transport has no addresses")

    def offered(self, address: object, number: int) -> Sequence[object]:
        raise NotImplementedError("a two-sided transport has no addresses")

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...]) -> None:
        """What the rendezvous tells is enough: this rank's messages of later calls are never taken for this one's."""

    def knows(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Process groups that the programs bound next may use, of several with the same ranks the first.

        Those of one request, whatever was bound before: what a rank has seen is its own, and its peers choose alike.
        """
        if (given := list(groups)) == self._known:
            return
        self._known, self._groups = given, {}
        for group in given:
            members = Members(dist.get_process_group_ranks(group))
            members.process_group = group
            self._groups.setdefault(tuple(sorted(members)), members)

    def group_order(self, ranks: Sequence[int]) -> Members | None:
        return self._groups.get(tuple(sorted(ranks)))

    def connect(self, ranks: tuple[int, ...], device: torch.device) -> None:
        """Exchange a byte with every rank and in every group that programs bound next may use: backends connect ranks
        when they first meet, which no captured graph can do. Collective among `ranks`.

        Raises:
            TransportError: a rank did not come.
        """
        self.rendezvous.begin(ranks, 0, "prepare")
        for group in (self.group_order(ranks), *self._groups.values()):
            members = ranks if group is None else group
            if len(members) > 1 and set(members) <= set(ranks):
                peers = [rank for rank in members if rank != self.rank]
                sent, came = (torch.zeros(len(peers), dtype=torch.uint8, device=device) for _ in range(2))
                sends, receives = (tuple((p, x[i : i + 1]) for i, p in enumerate(peers)) for x in (sent, came))
                self.answer(Transfer(sends, receives, 0, group=group))

    def answer(self, request: CommRequest) -> None:
        self.begin(request)()

    def begin(self, request: CommRequest) -> Callable[[], None]:
        """`answer`, but what it returns waits for the peers."""
        assert isinstance(request, Transfer | Collective)
        if not self.has_tags:
            return self._with_words(request)
        if isinstance(request, AllToAll):
            return self._with_headers(request)
        if isinstance(request, Collective):
            self._agree(request)
            return self._collective(request)
        everyone: Any = dist.distributed_c10d.GroupMember.WORLD
        tag = message_tag(request.fingerprint, self.rendezvous.call.number)
        peers, works = [], []
        try:
            for peer, buffer in request.receives:
                works.append(everyone.recv([buffer], peer, tag))
                peers.append(peer)
            for peer, buffer in request.sends:
                works.append(everyone.send([buffer], peer, tag))
                peers.append(peer)
        except RuntimeError as error:
            raise self._lost((peer,), error) from error
        return partial(self._wait, tuple(peers), works)

    def _wait(self, peers: tuple[int, ...], works: Sequence[dist.Work]) -> None:
        """Wait for one peer after the other, or for a collective of all of them."""
        if not works:
            return
        watcher, deadline = self._watcher, time.monotonic() + self.timeout
        try:
            for i, work in enumerate(works):
                # This peer alone: others may have had all that they need, and be in a later call.
                watched = peers[i : i + 1] if len(works) > 1 else peers
                late = partial(tuple, watched)
                watcher.awaits(late) if i else watcher.began(late)
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.0) + _ROUNDING))
                except RuntimeError as error:
                    watcher.ended()
                    if watcher.error is not None:
                        raise watcher.error from error
                    if time.monotonic() >= deadline:
                        raise self.rendezvous.late(*watched) from error
                    raise self._lost(watched, error) from error
        finally:
            watcher.ended()

    def _with_headers(self, request: AllToAll) -> Callable[[], None]:
        """An all-to-all of gloo, which has no tags: each message begins with two words that say what it is of."""
        words, address = [request.fingerprint, self.rendezvous.call.number], request.sends.data_ptr()
        for nbytes in request.send_sizes:
            if nbytes:
                _Header.from_address(address)[:] = words  # type: ignore[assignment]
            address += nbytes
        received = self._collective(request)

        def wait() -> None:
            received()
            address = request.receives.data_ptr()
            for rank, nbytes in zip(request.group, request.receive_sizes, strict=True):
                if nbytes and list(_Header.from_address(address)) != words:
                    raise self.rendezvous.disagreement(rank)
                address += nbytes

        return wait

    def _agree(self, request: Collective) -> None:
        """Before a collective of gloo, which has no tags: each rank tells the next one of the group its call.

        Where all neighbours agree, all ranks do.
        """
        group = request.group
        at, word = group.index(self.rank), torch.zeros(1, dtype=torch.uint8, device="cpu")
        following, preceding = group[(at + 1) % len(group)], group[at - 1]
        if len(group) > 1:
            came = torch.empty(1, dtype=torch.uint8, device="cpu")
            self.begin(Transfer(((following, word),), ((preceding, came),), request.fingerprint))()

    def _collective(self, request: Collective) -> Callable[[], None]:
        assert isinstance(request.group, Members)
        group = request.group.process_group
        peers = tuple(rank for rank in request.group if rank != self.rank)
        self._used.add(group)
        work = _started(request, group)

        def wait() -> None:
            if request[1].device.type == "cpu":
                self._wait(peers, [work])
            else:
                work.wait()  # the stream waits, not this process

        return wait

    def _with_words(self, request: Transfer | Collective) -> Callable[[], None]:
        """Exchange, and beside it a word with each peer that the device compares."""
        device = request[1].device if isinstance(request, Collective) else _device_of(request)
        if device is None:
            return lambda: None
        check = self._checks.get(device)
        if check is None:
            check = self._checks[device] = WordCheck(self.rank, self.size, device)
        expected = message_tag(request.fingerprint, self.rendezvous.call.number)
        words = check.words(expected)
        # A backend may connect the ranks of a group when it is first used, all of them at once: so it is the group of
        # exactly those that exchange, where there is one.
        group = request.group.process_group if isinstance(request.group, Members) else None
        if group is not None:
            self._used.add(group)
        if isinstance(request, Transfer):
            sends, receives = list(request.sends), list(request.receives)
        else:
            sends = receives = []
        senders = {p: None for p, _ in receives} if isinstance(request, Transfer) else dict.fromkeys(request.group)
        receivers = {p: None for p, _ in sends} if isinstance(request, Transfer) else dict.fromkeys(request.group)
        own = words[self.rank : self.rank + 1]
        sends = [*sends, *((p, own) for p in receivers if p != self.rank)]
        came = [*receives, *((p, words[p : p + 1]) for p in senders if p != self.rank)]
        operations = [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in came]
        operations += [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        if isinstance(request, Collective):
            assert group is not None
            works.append(_started(request, group))
        into = [b for _, b in receives] if isinstance(request, Transfer) else [_result(request)]

        def wait() -> None:
            for work in works:
                work.wait()  # the stream waits, not this process
            check.compare(words, expected, into)

        return wait

    @property
    def error(self) -> TransportError | None:
        """What ended this transport, as far as the host knows; nothing is waited for."""
        if self._error is None:
            for check in self._checks.values():
                peer = check.disagrees()
                if peer is not None:
                    self._error = self.rendezvous.disagreement(peer)
        return self._error

    def _lost(self, peers: tuple[int, ...], error: RuntimeError) -> TransportError:
        """Of peers, one of which is not connected any more: what it wrote, or what torch.distributed says."""
        with suppress(dist.DistError):  # the store went with its rank
            for peer in peers:
                if elsewhere := self.rendezvous.refused(peer) or self.rendezvous.misplaced(peer, True):
                    return elsewhere
            for peer in peers:
                if why := self.rendezvous.failure(peer):
                    return PeerError(f"rank {peer} is gone; rank {self.rank} was waiting for it: {why}")
        who = " or ".join(f"rank {peer}" for peer in peers)
        return PeerError(f"{who} is gone; rank {self.rank} was waiting for it: {error}")

    def fail(self, error: TransportError) -> None:
        """Tell ranks that wait for this one, now or later, that it will not come. The first error stays."""
        self._error = self.error or error
        self.rendezvous.fail(f"rank {self.rank} failed: {self._error}")

    def _close_connections(self) -> None:
        """Have waits of this process and of its peers end: gloo closes connections when a wait takes too long; other
        backends have timeouts of their own alone."""
        if self.backend != "gloo" or self._left:
            return
        self._left = True
        everyone: Any = dist.distributed_c10d.GroupMember.WORLD
        for group in (everyone, *self._used):
            for peer in dist.get_process_group_ranks(group):
                if peer != self.rank and _close(group, peer):
                    break

    def is_gone(self, rank: int) -> bool:
        """Whether gloo has lost its connection to a rank. Of a rank that lives this asks for a message that nobody
        sends, and forgets it."""
        if self.backend != "gloo":
            return False
        everyone: Any = dist.distributed_c10d.GroupMember.WORLD
        try:
            everyone.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _PROBE)
        except RuntimeError:
            return True
        return False


_Header = ctypes.c_int64 * 2


def _device_of(request: Transfer) -> torch.device | None:
    for _, buffer in (*request.receives, *request.sends):
        return buffer.device
    return None


def _result(request: Collective) -> torch.Tensor:
    """What a collective writes, as flat bytes."""
    return (request.values if isinstance(request, AllReduce) else request.receives).view(-1).view(torch.uint8)


def _close(group: dist.ProcessGroup, peer: int) -> bool:
    """Wait too long for what nobody sends: this closes all connections of a group, unless that to `peer` is closed."""
    try:
        dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=_NEVER_SENT).wait(_SHORTEST_WAIT)  # type: ignore[union-attr]
    except RuntimeError as error:
        return "timed out" in str(error).lower()
    return False


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _started(request: Collective, group: dist.ProcessGroup) -> dist.Work:
    options: Any = {"group": group, "async_op": True}
    if isinstance(request, AllToAll):
        sizes = request.receive_sizes, request.send_sizes
        return dist.all_to_all_single(request.receives, request.sends, *sizes, **options)
    if isinstance(request, AllGather):
        return dist.all_gather_into_tensor(request.receives, request.sends, **options)
    if isinstance(request, ReduceScatter):
        return dist.reduce_scatter_tensor(request.receives, request.sends, op=_OPS[request.op], **options)
    return dist.all_reduce(request.values, op=_OPS[request.op], **options)
