"""The transport of CPU ranks of one machine: they write into each other's outputs in shared memory."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from ....errors import DisagreementError, PeerError, TransportError
from ..comm_requests import Barrier, CommRequest, PendingCall
from ..own_limits import own_limit
from ..rendezvous.calls import CallRecord
from ..rendezvous.long_wait import FIRST_POLL, LongWait
from ..rendezvous.rendezvous import Rendezvous
from ..rendezvous.store_texts import malformed
from .receive_buffers import ReceiveBuffers
from .segments import (
    Segment,
    SegmentKey,
    bytes_of,
    is_running,
    open_segment,
    process_namespace,
    sleep_on,
    unlink_names,
    unlink_names_of_the_dead,
    uses_names,
    wake,
)
from .tensors import MAX_SEGMENTS, SharedPool

Address = tuple[int, int, int]  # rank, segment, offset
Offer = Address | tuple[int, int, int, int, int]  # of two buffers: then the segment and offset of the second

# The control page of a rank, in 8-byte words, which only this rank writes. It has a slot for each peer and parity of
# the barrier's number. The number is stored last (x86-64 keeps stores in order), so that a reader of it sees the rest.
_FAILED, _SLEEPS_FOR, _CALL = 0, 1, 2
_DIRECTORY = 8
_SLOTS = _DIRECTORY + 2 * MAX_SEGMENTS
_SLOT_WORDS = 8
_NUMBER, _FINGERPRINT, _SEGMENT, _OFFSET, _SECOND_OFFSET = range(5)
_NO_SEGMENT = MAX_SEGMENTS
_SECOND_SEGMENT = 16  # from this bit on `_SEGMENT` has the segment of a second buffer, plus 1; 0: there is none
_NO_BUFFER: Address = (0, _NO_SEGMENT, 0)
_REFUSED = 0  # in place of a fingerprint
_MOST_KEYS = (1 << 63) - 1
_EAGER_POLLS = 50
_CACHED_ADDRESSES = 4096
_SHORTEST_NAP, _LONGEST_NAP = 1e-3, 5e-2


def why_unsupported() -> str | None:
    """The reason why this machine does not support the transport; None if it does."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return "shared memory needs Linux (memfd_create)"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the barrier needs stores seen in order (x86-64); this is {platform.machine()}"
    return None


def machine_name() -> str:
    """The boot id and the process namespace: equal for processes that can map each other's memory.

    Raises:
        TransportError: this process has no free descriptors.
    """
    path = "/proc/sys/kernel/random/boot_id"
    try:
        with open(path) as file:
            return f"{file.read().strip()}/{process_namespace()}"
    except OSError as error:
        raise TransportError(f"reading {path}: {own_limit(error) or error}") from error


class _Peer:
    """A peer's control page and segments, mapped into this process, and a descriptor that is readable after its death.

    Attributes:
        barriers: the number of barriers with this peer so far.
        awaited: whether this rank has waited at the last of them; False after it refused.
        kept: memory that the peer may write until then.
    """

    def __init__(self, rank: int, key: SegmentKey) -> None:
        self.rank, self.pid, self.named, self._key = rank, key.pid, key.named, key
        try:
            self.pidfd: int | None = os.pidfd_open(key.pid)
        except (OSError, AttributeError):
            self.pidfd = None
        mapped = open_segment(key, str(self))
        self.page = memoryview(mapped).cast("Q")
        self.address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        self.barriers = 0
        self.awaited = True
        self.kept: object = None
        self.slots = tuple(_SLOTS + (2 * rank + parity) * _SLOT_WORDS for parity in (0, 1))
        self._segments: dict[int, torch.Tensor] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # globals may be gone when the interpreter ends
        descriptor = getattr(self, "pidfd", None)
        if descriptor is not None:
            try:
                close(descriptor)
            except OSError:
                pass

    def has_died(self) -> bool:
        if self.pidfd is None:
            return not is_running(self.pid)
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def segment(self, index: int) -> torch.Tensor:
        segment = self._segments.get(index)
        if segment is None:
            key = self._key._replace(handle=self.page[_DIRECTORY + index])
            try:
                mapped = open_segment(key, str(self))
            except (FileNotFoundError, PermissionError) as error:
                if isinstance(error, PermissionError) and is_running(self.pid):
                    raise TransportError(f"the memory of {self} may no longer be mapped: {error}") from error
                what = f"{self} is gone, and its memory with it" if self.has_died() else f"the memory of {self} is gone"
                raise PeerError(f"{what}: {error}") from error
            segment = self._segments[index] = bytes_of(mapped)
        return segment


class SharedMemoryTransport:
    """Ranks of a process group on one machine that write into each other's shared memory.

    The constructor writes this rank's process id and control page to the store and does not wait; a peer's page is
    mapped at the first barrier with it. A barrier is a counter per pair of ranks, so that any ranks can synchronise
    without a group of their own, as long as both ranks of each pair do so in the same order.

    Args:
        timeout: seconds that a wait may take.

    Raises:
        TransportError: from every call after the first failure; there is not enough shared memory.
    """

    one_sided = True
    recycles = True
    windows = None
    name = "shared_memory"

    def __init__(self, rank: int, size: int, timeout: float, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.timeout, self.rendezvous = rank, size, timeout, rendezvous
        named = uses_names()
        if named:
            unlink_names_of_the_dead()
        self._control = Segment("shardweave-control", 8 * (_SLOTS + 2 * _SLOT_WORDS * size), named)
        self._page = memoryview(self._control.map).cast("Q")
        self._pool = SharedPool("shardweave-pool", named)
        self._slots = tuple(_SLOTS + (2 * rank + parity) * _SLOT_WORDS for parity in (0, 1))
        self._peers: dict[int, _Peer] = {}
        self._peers_of: dict[tuple[int, ...], list[_Peer]] = {}
        self._addresses: dict[int, Address] = {}  # a place in the pool never changes
        self._opened: dict[tuple[Address, int], torch.Tensor] = {}  # of peers, likewise
        self._receive_buffers: dict[tuple[int, ...], ReceiveBuffers] = {}
        self.error: TransportError | None = None
        self.busy = False
        self.pending: PendingCall | None = None
        rendezvous.write(_process_key(rank), str(self._control.key))

    def check(self) -> None:
        """
        Raises:
            TransportError: an earlier call failed.
        """
        if self.error is not None:
            raise self.error

    def has_died(self, rank: int) -> bool:
        """Whether the process of a rank is gone; False if this rank never synchronised with it."""
        peer = self._peers.get(rank)
        return peer is not None and peer.has_died()

    def node_of(self, rank: int) -> int:
        return 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return self._pool.empty(shape, dtype)
        except TransportError as error:
            self.rendezvous.fail_outside_call(self.fail, error)
            raise

    def addressable(self, tensor: torch.Tensor) -> bool:
        return self._pool.holds(tensor)

    def address(self, buffer: torch.Tensor) -> Address:
        pointer = buffer.data_ptr()
        return self._addresses.get(pointer) or self._first_address(buffer, pointer)

    def _first_address(self, buffer: torch.Tensor, pointer: int) -> Address:
        segment, offset = self._pool.place(buffer)
        entry = _DIRECTORY + segment
        if self._page[entry] == 0:
            self._page[entry] = self._pool.segments[segment].key.handle
        if pointer:  # else it has no elements
            if len(self._addresses) >= _CACHED_ADDRESSES:
                self._addresses.clear()
            self._addresses[pointer] = self.rank, segment, offset
        return self.rank, segment, offset

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        rank, segment, offset = address
        if rank == self.rank:
            return self._pool.segments[segment].bytes[offset : offset + nbytes]
        opened = self._opened.get((address, nbytes))
        if opened is not None:
            return opened
        try:
            whole = self._peers[rank].segment(segment)
        except PeerError as error:  # a peer that fails removes its names
            raise PeerError(f"{error}{self._waiting()}{self.rendezvous.errors.why_late(rank)}") from error
        if len(self._opened) >= _CACHED_ADDRESSES:
            self._opened.clear()
        opened = self._opened[address, nbytes] = whole[offset : offset + nbytes]
        return opened

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Offer, object]:
        if len(buffers) == 1:
            (buffer,) = buffers
            return _NO_BUFFER if buffer is None else self.address(buffer), None
        if len(buffers) == 2:
            first, second = buffers
            if first is not None and second is not None:
                return self.address(first) + self.address(second)[1:], None
        table = self._pool.empty((len(buffers), 2), torch.int64)
        words = _words(table, len(buffers))
        for i, buffer in enumerate(buffers):
            if buffer is not None:
                _, words[2 * i], words[2 * i + 1] = self.address(buffer)
        return self.address(table), table

    def offered(self, address: Offer, number: int) -> list[Address]:
        if number == 1:
            return [cast("Address", address)]
        if len(address) == 5:
            return [address[:3], (address[0], *address[3:])]
        # Read by the host: an address table of the transport, no values of a user's tensor.
        words = _words(self.open(address, 16 * number), number)
        return [(address[0], words[i], words[i + 1]) for i in range(0, 2 * number, 2)]

    def receive_buffers(self, ranks: tuple[int, ...]) -> ReceiveBuffers:
        return self._receive_buffers.setdefault(ranks, ReceiveBuffers(self._pool.allocator))

    def answer(self, request: CommRequest) -> list[Offer | None]:
        assert isinstance(request, Barrier)
        return self._wait_all(self._arrive(request), request.fingerprint)

    def begin(self, request: CommRequest) -> Callable[[], list[Offer | None]]:
        """Start a barrier. The returned function waits for the peers and returns what they offer."""
        assert isinstance(request, Barrier)
        return partial(self._wait_all, self._arrive(request), request.fingerprint)

    def fail(self, error: TransportError) -> None:
        """Notify every peer that waits for this rank, now or later, that it has failed. The first error is kept."""
        self._page[_FAILED] = 1
        self.error = self.error or error
        self.rendezvous.reports.fail(f"rank {self.rank} failed: {self.error}")
        self._pool.freeze()
        if self._pool.named:
            # A rank that failed may end without cleaning up; peers that have mapped its memory keep it.
            unlink_names(os.getpid())
            unlink_names_of_the_dead()  # among them peers whose memory this rank has not mapped

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...], all_meet: bool) -> None:
        """Notify the peers at the first barrier of the current call that this rank refuses its arguments.

        If all ranks refuse the same call, the transport stays valid; and if one of them does, where all ranks of the
        call meet in that barrier (`all_meet`), which then ends the call on each of them. Waits for peers only before
        the first call with them, and for those that have not arrived where it refused before.
        """
        all_meet = all_meet and first_group == participants
        mark = _NO_BUFFER
        if all_meet:
            self.rendezvous.session(participants)  # where peers that have not met this rank wait for it
            mark = self.rank, _NO_SEGMENT, _key_of(self.rendezvous.calls.current)
        peers = tuple(rank for rank in first_group if rank != self.rank)
        connected = self._peers_of.get(peers) or self._connect_all(peers)
        self._notify(connected, _REFUSED, mark)
        # Peers that have not arrived may still push into what was kept for the call.
        kept = self._drop_kept(participants) if all_meet else None
        for peer in connected:
            peer.awaited, peer.kept = False, kept

    def _drop_kept(self, ranks: tuple[int, ...]) -> object:
        """Keep no receive buffers of a group any longer; return those that were. After a refused call some ranks have
        used theirs, and those that refused have not."""
        receive_buffers = self._receive_buffers.get(ranks)
        return None if receive_buffers is None else receive_buffers.drop_all()

    def enter_call(self, key: int) -> None:
        """Tell peers which call this rank is in; 0: none. For the flight recorder, which peers may not have."""
        self._page[_CALL] = key

    def late_peers(self) -> list[tuple[int, int]]:
        """The peers in the same call that have not arrived at the last barrier with this rank, with the number of that
        barrier. May be called on any thread."""
        key = self._page[_CALL]
        late = []
        for peer in list(self._peers.values()):
            number = peer.barriers
            if key and peer.page[_CALL] == key and peer.page[self._slots[number & 1] + _NUMBER] < number:
                late.append((peer.rank, number))
        return late

    def _notify(self, peers: list[_Peer], fingerprint: int, offer: Offer) -> None:
        """Notify peers that this rank has arrived at the next barrier with them."""
        page, me = self._page, self.rank + 1
        segment, offset, second_offset = offer[1], offer[2], 0
        if len(offer) == 5:
            segment, second_offset = segment | (offer[3] + 1) << _SECOND_SEGMENT, offer[4]
        for peer in peers:
            if not peer.awaited:
                # There are two slots: the peer has read the one to overwrite only when it arrives at the last barrier.
                self._wait(peer, self._slots[peer.barriers & 1])
                peer.awaited, peer.kept = True, None
            number = peer.barriers = peer.barriers + 1
            slot = peer.slots[number & 1]
            page[slot + _FINGERPRINT] = fingerprint
            page[slot + _SEGMENT] = segment
            page[slot + _OFFSET] = offset
            page[slot + _SECOND_OFFSET] = second_offset
            page[slot + _NUMBER] = number
            if peer.page[_SLEEPS_FOR] == me:
                wake(self._control.address + 8 * slot)

    def _arrive(self, request: Barrier) -> list[_Peer]:
        peers = self._peers_of.get(request.peers) or self._connect_all(request.peers)
        self._notify(peers, request.fingerprint, request.offer or _NO_BUFFER)
        if request.during_wait is not None:
            request.during_wait()
        return peers

    def _wait_all(self, peers: list[_Peer], fingerprint: int) -> list[Offer | None]:
        """Wait for peers at the current barrier. Returns what they offer."""
        offers: list[Offer | None] = []
        refused: _Peer | None = None
        for peer in peers:
            number, theirs = peer.barriers, peer.page
            slot = self._slots[number & 1]
            if theirs[slot + _NUMBER] != number:
                try:
                    self._wait(peer, slot)
                except PeerError:
                    # A peer that refused, or arrived with a different request, explains more.
                    with suppress(dist.DistError):  # the peer may have hosted the store
                        if refusal := self.rendezvous.errors.refusal(peer.rank):
                            raise refusal from None
                    for other in peers:
                        self._check_fingerprint(other, fingerprint)
                    raise
            if theirs[slot + _FINGERPRINT] != fingerprint:
                if self._has_refused_recoverably(peer, peers):
                    refused = peer  # raised once all have arrived
                    continue
                self._check_fingerprint(peer, fingerprint)
            segment = theirs[slot + _SEGMENT]
            if segment == _NO_SEGMENT:
                offers.append(None)
            elif segment < _NO_SEGMENT:
                offers.append((peer.rank, segment, theirs[slot + _OFFSET]))
            else:
                first, second = segment & ((1 << _SECOND_SEGMENT) - 1), (segment >> _SECOND_SEGMENT) - 1
                offers.append((peer.rank, first, theirs[slot + _OFFSET], second, theirs[slot + _SECOND_OFFSET]))
        if refused is not None:
            self._drop_kept(self.rendezvous.calls.current.ranks)
            raise self.rendezvous.errors.refused(refused.rank, recoverable=True)
        return offers

    def _has_refused_recoverably(self, peer: _Peer, peers: list[_Peer]) -> bool:
        """Whether a peer that has arrived at the current barrier refused exactly this call, all ranks of which meet in
        this barrier. Then no rank is in it any longer once all have arrived."""
        call, theirs, slot = self.rendezvous.calls.current, peer.page, self._slots[peer.barriers & 1]
        return (
            theirs[slot + _FINGERPRINT] == _REFUSED
            and theirs[slot + _OFFSET] == _key_of(call)
            and len(peers) + 1 == len(call.ranks)
        )

    def _check_fingerprint(self, peer: _Peer, fingerprint: int) -> None:
        """
        Raises:
            DisagreementError: a peer arrived at the current barrier with another fingerprint.
        """
        slot = self._slots[peer.barriers & 1]
        theirs = peer.page[slot + _FINGERPRINT]
        # A rank that refuses does not wait: its number may be larger.
        if peer.page[slot + _NUMBER] < peer.barriers or theirs == fingerprint:
            return
        errors = self.rendezvous.errors
        raise errors.refused(peer.rank, recoverable=False) if theirs == _REFUSED else errors.disagreement(peer.rank)

    def _wait(self, peer: _Peer, slot: int) -> None:
        """Wait until a peer has arrived at the current barrier.

        Raises:
            PeerError: the peer failed or died.
            DisagreementError: the peer refused the call or makes another one.
            MeetingTimeoutError: the peer did not arrive within the timeout.
        """
        page, number, yield_cpu = peer.page, peer.barriers, os.sched_yield
        for _ in range(_EAGER_POLLS):
            yield_cpu()
            if page[slot] >= number:
                return
        start, wait = time.monotonic(), None
        # The peer wakes this rank if it sees that it sleeps for it; each sleep is bounded in any case.
        self._page[_SLEEPS_FOR] = peer.rank + 1
        try:
            while (seen := page[slot]) < number:
                waited = time.monotonic() - start
                # A peer that failed or died may have arrived at this barrier before.
                if page[_FAILED] and page[slot] < number:
                    why = self.rendezvous.errors.why_late(peer.rank)
                    raise PeerError(f"{peer} failed{self._waiting()}{why}")
                if waited > _SHORTEST_NAP and peer.has_died() and page[slot] < number:
                    if peer.named:
                        unlink_names(peer.pid)
                    raise PeerError(f"{peer} is gone{self._waiting()}")
                if waited > self.timeout:
                    raise self.rendezvous.errors.timed_out(peer.rank)
                if waited > FIRST_POLL:
                    wait = wait or LongWait(self.rendezvous.errors)
                    try:
                        wait.poll([peer.rank])
                    except (DisagreementError, PeerError):
                        # A peer that refuses arrives here first; one that left may have arrived before.
                        if page[slot] < number:
                            raise
                sleep_on(peer.address + 8 * slot, seen, min(max(waited / 4, _SHORTEST_NAP), _LONGEST_NAP))
        finally:
            self._page[_SLEEPS_FOR] = 0
            if wait is not None:
                wait.close()

    def _waiting(self) -> str:
        """For the error of a peer: that this rank was waiting for it, and in which call."""
        return f"; rank {self.rank} was waiting for it in {self.rendezvous.calls.current}"

    def _connect_all(self, ranks: tuple[int, ...]) -> list[_Peer]:
        self._peers_of[ranks] = [self._peers.get(rank) or self._connect(rank) for rank in ranks]
        return self._peers_of[ranks]

    def _connect(self, rank: int) -> _Peer:
        """Map a peer's control page.

        Raises:
            PeerError: its process is gone.
            TransportError: this process may not map its memory.
        """
        text = self.rendezvous.read(_process_key(rank), rank)
        key = SegmentKey.parse(text)
        if key is None:
            raise malformed(rank, text)
        try:
            peer = self._peers[rank] = _Peer(rank, key)
        except (FileNotFoundError, PermissionError) as error:
            if isinstance(error, FileNotFoundError) or not is_running(key.pid):
                raise PeerError(
                    f"rank {rank} (process {key.pid}) is gone{self._waiting()}: {error}"
                    f"{self.rendezvous.errors.why_late(rank)}"
                ) from error
            raise TransportError(
                f"rank {self.rank} may not map the memory of rank {rank} (process {key.pid}): {error}; "
                f"SHARDWEAVE_SEGMENTS=named has it opened by name, SHARDWEAVE_TRANSPORT=process_group does without"
            ) from error
        return peer


def _key_of(call: CallRecord) -> int:
    """A positive number that tells calls apart, equal on all ranks, as hashes of ints are."""
    return hash((call.ranks, call.number)) & _MOST_KEYS or 1


def _words(table: torch.Tensor, number: int) -> ctypes.Array[ctypes.c_int64]:
    """The segments and offsets of a table of `number` addresses."""
    return (ctypes.c_int64 * (2 * number)).from_address(table.data_ptr())


def _process_key(rank: int) -> str:
    return f"process/{rank}"
