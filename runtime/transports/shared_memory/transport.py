"""The transport of CPU ranks of one machine: they write into each other's outputs in shared memory."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from ....errors import DisagreementError, PeerError, TransportError
from ..comm_requests import Barrier, CommRequest, PendingCall
from ..own_limits import own_limit
from ..rendezvous.calls import CallRecord
from ..rendezvous.long_wait import FIRST_POLL, LongWait
from ..rendezvous.rendezvous import Rendezvous
from ..rendezvous.store_texts import malformed
from .control_page import (
    CALL,
    DIRECTORY,
    FAILED,
    FINGERPRINT,
    NO_BUFFER,
    NO_SEGMENT,
    NUMBER,
    OFFSET,
    REFUSED,
    SECOND_OFFSET,
    SECOND_SEGMENT,
    SEGMENT,
    SLEEPS_FOR,
    SLOT_WORDS,
    SLOTS,
    Address,
    Offer,
)
from .peer_process import PeerProcess
from .receive_buffers import ReceiveBuffers
from .segments import (
    Segment,
    SegmentKey,
    is_running,
    process_namespace,
    sleep_on,
    unlink_names,
    unlink_names_of_the_dead,
    uses_names,
    wake,
)
from .shared_pool import SharedPool

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
        self._control = Segment("shardweave-control", 8 * (SLOTS + 2 * SLOT_WORDS * size), named)
        self._page = memoryview(self._control.map).cast("Q")
        self._pool = SharedPool("shardweave-pool", named)
        self._slots = tuple(SLOTS + (2 * rank + parity) * SLOT_WORDS for parity in (0, 1))
        self._peers: dict[int, PeerProcess] = {}
        self._peers_of: dict[tuple[int, ...], list[PeerProcess]] = {}
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
        entry = DIRECTORY + segment
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
            return NO_BUFFER if buffer is None else self.address(buffer), None
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
        self._page[FAILED] = 1
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
        mark = NO_BUFFER
        if all_meet:
            self.rendezvous.session(participants)  # where peers that have not met this rank wait for it
            mark = self.rank, NO_SEGMENT, _key_of(self.rendezvous.calls.current)
        peers = tuple(rank for rank in first_group if rank != self.rank)
        connected = self._peers_of.get(peers) or self._connect_all(peers)
        self._notify(connected, REFUSED, mark)
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
        self._page[CALL] = key

    def late_peers(self) -> list[tuple[int, int]]:
        """The peers in the same call that have not arrived at the last barrier with this rank, with the number of that
        barrier. May be called on any thread."""
        key = self._page[CALL]
        late = []
        for peer in list(self._peers.values()):
            number = peer.barriers
            if key and peer.page[CALL] == key and peer.page[self._slots[number & 1] + NUMBER] < number:
                late.append((peer.rank, number))
        return late

    def _notify(self, peers: list[PeerProcess], fingerprint: int, offer: Offer) -> None:
        """Notify peers that this rank has arrived at the next barrier with them."""
        page, me = self._page, self.rank + 1
        segment, offset, second_offset = offer[1], offer[2], 0
        if len(offer) == 5:
            segment, second_offset = segment | (offer[3] + 1) << SECOND_SEGMENT, offer[4]
        for peer in peers:
            if not peer.awaited:
                # There are two slots: the peer has read the one to overwrite only when it arrives at the last barrier.
                self._wait(peer, self._slots[peer.barriers & 1])
                peer.awaited, peer.kept = True, None
            number = peer.barriers = peer.barriers + 1
            slot = peer.slots[number & 1]
            page[slot + FINGERPRINT] = fingerprint
            page[slot + SEGMENT] = segment
            page[slot + OFFSET] = offset
            page[slot + SECOND_OFFSET] = second_offset
            page[slot + NUMBER] = number
            if peer.page[SLEEPS_FOR] == me:
                wake(self._control.address + 8 * slot)

    def _arrive(self, request: Barrier) -> list[PeerProcess]:
        peers = self._peers_of.get(request.peers) or self._connect_all(request.peers)
        self._notify(peers, request.fingerprint, request.offer or NO_BUFFER)
        if request.during_wait is not None:
            request.during_wait()
        return peers

    def _wait_all(self, peers: list[PeerProcess], fingerprint: int) -> list[Offer | None]:
        """Wait for peers at the current barrier. Returns what they offer."""
        offers: list[Offer | None] = []
        refused: PeerProcess | None = None
        for peer in peers:
            number, theirs = peer.barriers, peer.page
            slot = self._slots[number & 1]
            if theirs[slot + NUMBER] != number:
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
            if theirs[slot + FINGERPRINT] != fingerprint:
                if self._has_refused_recoverably(peer, peers):
                    refused = peer  # raised once all have arrived
                    continue
                self._check_fingerprint(peer, fingerprint)
            segment = theirs[slot + SEGMENT]
            if segment == NO_SEGMENT:
                offers.append(None)
            elif segment < NO_SEGMENT:
                offers.append((peer.rank, segment, theirs[slot + OFFSET]))
            else:
                first, second = segment & ((1 << SECOND_SEGMENT) - 1), (segment >> SECOND_SEGMENT) - 1
                offers.append((peer.rank, first, theirs[slot + OFFSET], second, theirs[slot + SECOND_OFFSET]))
        if refused is not None:
            self._drop_kept(self.rendezvous.calls.current.ranks)
            raise self.rendezvous.errors.refused(refused.rank, recoverable=True)
        return offers

    def _has_refused_recoverably(self, peer: PeerProcess, peers: list[PeerProcess]) -> bool:
        """Whether a peer that has arrived at the current barrier refused exactly this call, all ranks of which meet in
        this barrier. Then no rank is in it any longer once all have arrived."""
        call, theirs, slot = self.rendezvous.calls.current, peer.page, self._slots[peer.barriers & 1]
        return (
            theirs[slot + FINGERPRINT] == REFUSED
            and theirs[slot + OFFSET] == _key_of(call)
            and len(peers) + 1 == len(call.ranks)
        )

    def _check_fingerprint(self, peer: PeerProcess, fingerprint: int) -> None:
        """
        Raises:
            DisagreementError: a peer arrived at the current barrier with another fingerprint.
        """
        slot = self._slots[peer.barriers & 1]
        theirs = peer.page[slot + FINGERPRINT]
        # A rank that refuses does not wait: its number may be larger.
        if peer.page[slot + NUMBER] < peer.barriers or theirs == fingerprint:
            return
        errors = self.rendezvous.errors
        raise errors.refused(peer.rank, recoverable=False) if theirs == REFUSED else errors.disagreement(peer.rank)

    def _wait(self, peer: PeerProcess, slot: int) -> None:
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
        self._page[SLEEPS_FOR] = peer.rank + 1
        try:
            while (seen := page[slot]) < number:
                waited = time.monotonic() - start
                # A peer that failed or died may have arrived at this barrier before.
                if page[FAILED] and page[slot] < number:
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
            self._page[SLEEPS_FOR] = 0
            if wait is not None:
                wait.close()

    def _waiting(self) -> str:
        """For the error of a peer: that this rank was waiting for it, and in which call."""
        return f"; rank {self.rank} was waiting for it in {self.rendezvous.calls.current}"

    def _connect_all(self, ranks: tuple[int, ...]) -> list[PeerProcess]:
        self._peers_of[ranks] = [self._peers.get(rank) or self._connect(rank) for rank in ranks]
        return self._peers_of[ranks]

    def _connect(self, rank: int) -> PeerProcess:
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
            peer = self._peers[rank] = PeerProcess(rank, key)
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
