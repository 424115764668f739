"""CPU ranks of one machine meet in shared memory: they push straight into each other's outputs."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from ....errors import PeerError, TransportError
from ..rendezvous import FIRST_LOOK, LongWait, Rendezvous
from ..requests import Barrier, CommRequest, PendingCall
from .receive_buffers import ReceiveBuffers
from .segments import (
    Segment,
    bytes_of,
    open_segment,
    process_namespace,
    segment_path,
    sleep_on,
    unlink_names,
    uses_names,
    wake,
)
from .tensors import MAX_SEGMENTS, SharedPool

Address = tuple[int, int, int]  # rank, segment, offset

# The control page of a rank, in 8-byte words, written by that rank alone. A slot per peer and parity of the meeting's
# number; its number is stored last (x86-64 keeps stores in order), so who sees it sees the rest.
_FAILED, _SLEEPS_FOR = 0, 1
_DIRECTORY = 8
_SLOTS = _DIRECTORY + 2 * MAX_SEGMENTS
_SLOT_WORDS = 8
_NUMBER, _TOKEN, _SEGMENT, _OFFSET = range(4)
_NO_SEGMENT = MAX_SEGMENTS
_NOWHERE: Address = (0, _NO_SEGMENT, 0)
_REFUSED = 0  # in place of a token
_EAGER_POLLS = 50
_KEPT_ADDRESSES = 4096
_SHORTEST_NAP, _LONGEST_NAP = 1e-3, 5e-2


def why_not_here() -> str | None:
    """Why this machine cannot carry the transport, or None if it can."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return "shared memory needs Linux (memfd_create)"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the barrier needs stores seen in order (x86-64); this is {platform.machine()}"
    return None


def machine_name() -> str:
    """Equal for processes that can map each other's memory: the boot and the process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{process_namespace()}"


def _is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than an exit status nobody has fetched yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class _Peer:
    """A rank's control page and segments as seen from another process, and a descriptor that tells when it dies."""

    def __init__(self, rank: int, pid: int, handle: int, named: bool) -> None:
        self.rank, self.pid, self.named = rank, pid, named
        try:
            self.pidfd: int | None = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self.pidfd = None
        mapped = open_segment(segment_path(pid, handle, named))
        self.page = memoryview(mapped).cast("Q")
        self.address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        self.meetings = 0
        self.awaited = True  # at the last of them; not where this rank came to refuse
        self.slots = tuple(_SLOTS + (2 * rank + parity) * _SLOT_WORDS for parity in (0, 1))
        self._segments: dict[int, torch.Tensor] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def __del__(self) -> None:
        descriptor = getattr(self, "pidfd", None)
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def has_died(self) -> bool:
        if self.pidfd is None:
            return not _is_running(self.pid)
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def segment(self, index: int) -> torch.Tensor:
        found = self._segments.get(index)
        if found is None:
            path = segment_path(self.pid, self.page[_DIRECTORY + index], self.named)
            try:
                mapped = open_segment(path)
            except (FileNotFoundError, PermissionError) as error:
                if isinstance(error, PermissionError) and _is_running(self.pid):
                    raise TransportError(f"the memory of {self} may no longer be mapped: {error}") from error
                raise PeerError(f"{self} is gone, and its memory with it: {path}") from error
            found = self._segments[index] = bytes_of(mapped)
        return found


class SharedMemoryTransport:
    """The ranks of a process group on one machine.

    Starting writes this rank's process and control page to the store and waits for nobody; peers are mapped when first
    met. A meeting is a counter per pair of ranks, so any subset of ranks can meet without a group having been made for
    it, as long as each pair meets in the same order on both sides.

    Raises:
        TransportError: from every call after the first failure.
    """

    one_sided = True
    recycles = True
    windows = None
    name = "shared_memory"
    backend = ""

    def __init__(self, rank: int, size: int, timeout: float, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.timeout, self.rendezvous = rank, size, timeout, rendezvous
        named = uses_names()
        self._control = Segment("shardweave-control", 8 * (_SLOTS + 2 * _SLOT_WORDS * size), named)
        self._page = memoryview(self._control.map).cast("Q")
        self._pool = SharedPool("shardweave-pool", named)
        self._slots = tuple(_SLOTS + (2 * rank + parity) * _SLOT_WORDS for parity in (0, 1))
        self._peers: dict[int, _Peer] = {}
        self._met: dict[tuple[int, ...], list[_Peer]] = {}
        self._addresses: dict[int, Address] = {}  # a place in the pool is the same for ever
        self._landings: dict[tuple[int, ...], ReceiveBuffers] = {}
        self.error: TransportError | None = None
        self.busy = False
        self.pending: PendingCall | None = None
        kind = "named" if named else "anonymous"
        rendezvous.store.set(_post_key(rank), f"{os.getpid()} {self._control.handle} {kind}")

    def check(self) -> None:
        """
        Raises:
            TransportError: this transport is dead.
        """
        if self.error is not None:
            raise self.error

    def has_died(self, rank: int) -> bool:
        """Whether the process of a rank that was met is gone."""
        peer = self._peers.get(rank)
        return peer is not None and peer.has_died()

    def node_of(self, rank: int) -> int:
        return 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._pool.empty(shape, dtype)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return self._pool.holds(tensor)

    def address(self, buffer: torch.Tensor) -> Address:
        pointer = buffer.data_ptr()
        return self._addresses.get(pointer) or self._first_address(buffer, pointer)

    def _first_address(self, buffer: torch.Tensor, pointer: int) -> Address:
        segment, offset = self._pool.place(buffer)
        entry = _DIRECTORY + segment
        if self._page[entry] == 0:
            self._page[entry] = self._pool.segments[segment].handle
        if pointer:  # else it has no elements
            if len(self._addresses) >= _KEPT_ADDRESSES:
                self._addresses.clear()
            self._addresses[pointer] = self.rank, segment, offset
        return self.rank, segment, offset

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        rank, segment, offset = address
        whole = self._pool.segments[segment].bytes if rank == self.rank else self._peers[rank].segment(segment)
        return whole[offset : offset + nbytes]

    def group_order(self, ranks: Sequence[int]) -> None:
        return None

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Address, object]:
        book = self._pool.empty((len(buffers), 2), torch.int64)
        for row, buffer in enumerate(buffers):
            if buffer is not None:
                _, book[row, 0], book[row, 1] = self.address(buffer)
        return self.address(book), book

    def offered(self, address: Address, number: int) -> list[Address]:
        # The host's own words, no tensor's values.
        words = (ctypes.c_int64 * (2 * number)).from_address(self.open(address, 16 * number).data_ptr())
        return [(address[0], words[i], words[i + 1]) for i in range(0, 2 * number, 2)]

    def receive_buffers(self, ranks: tuple[int, ...]) -> ReceiveBuffers:
        return self._landings.setdefault(ranks, ReceiveBuffers(self._pool.allocator))

    def answer(self, request: CommRequest) -> list[Address | None]:
        assert isinstance(request, Barrier)
        return self._arrived(self._come_to(request), request.fingerprint)

    def begin(self, request: CommRequest) -> Callable[[], list[Address | None]]:
        """`answer`, but what it returns waits for the peers."""
        assert isinstance(request, Barrier)
        return partial(self._arrived, self._come_to(request), request.fingerprint)

    def fail(self, error: TransportError) -> None:
        """Tell every peer that waits for this rank, now or later, that it will not come. The first error stays."""
        self._page[_FAILED] = 1
        self.error = self.error or error
        self.rendezvous.fail(f"rank {self.rank} failed: {self.error}")
        self._pool.freeze()
        if self._pool.named:
            # Who fails may end without a word; those who have mapped this rank's memory keep it.
            unlink_names(os.getpid())

    def refuse(self, first_group: tuple[int, ...], participants: tuple[int, ...]) -> None:
        """Come to the first meeting of a program to say that this rank's argument is wrong, and wait for nobody.

        Where all ranks refuse alike their transport lives on.
        """
        peers = tuple(rank for rank in first_group if rank != self.rank)
        found = self._met.get(peers) or self._find_all(peers)
        self._come(found, _REFUSED, _NOWHERE)
        for peer in found:
            peer.awaited = False

    def _come(self, peers: list[_Peer], fingerprint: int, offer: Address) -> None:
        """Tell peers that this rank has come to their next meeting."""
        page, me = self._page, self.rank + 1
        _, segment, offset = offer
        for peer in peers:
            if not peer.awaited:
                # There are two slots: the word of the meeting before the last may not have been read until it comes.
                self._wait(peer, self._slots[peer.meetings & 1])
                peer.awaited = True
            number = peer.meetings = peer.meetings + 1
            slot = peer.slots[number & 1]
            page[slot + _TOKEN] = fingerprint
            page[slot + _SEGMENT] = segment
            page[slot + _OFFSET] = offset
            page[slot + _NUMBER] = number
            if peer.page[_SLEEPS_FOR] == me:
                wake(self._control.address + 8 * slot)

    def _come_to(self, request: Barrier) -> list[_Peer]:
        peers = self._met.get(request.peers) or self._find_all(request.peers)
        self._come(peers, request.fingerprint, request.offer or _NOWHERE)
        if request.meanwhile is not None:
            request.meanwhile()
        return peers

    def _arrived(self, peers: list[_Peer], fingerprint: int) -> list[Address | None]:
        """Wait for peers at the meeting that this rank has come to; what they offer."""
        addresses: list[Address | None] = []
        for peer in peers:
            number, theirs = peer.meetings, peer.page
            slot = self._slots[number & 1]
            if theirs[slot + _NUMBER] != number:
                try:
                    self._wait(peer, slot)
                except PeerError:
                    # A peer that refused, or came and asked for something else, is the better explanation.
                    with suppress(dist.DistError):  # the store may have gone with the peer
                        if refused := self.rendezvous.refused(peer.rank):
                            raise refused from None
                    for other in peers:
                        self._compare(other, fingerprint)
                    raise
            if theirs[slot + _TOKEN] != fingerprint:
                self._compare(peer, fingerprint)
            segment = theirs[slot + _SEGMENT]
            addresses.append(None if segment == _NO_SEGMENT else (peer.rank, segment, theirs[slot + _OFFSET]))
        return addresses

    def _compare(self, peer: _Peer, fingerprint: int) -> None:
        """Raises DisagreementError if a peer came to this meeting with another token."""
        slot = self._slots[peer.meetings & 1]
        theirs = peer.page[slot + _TOKEN]
        # A rank that refuses waits for nobody: its number may have gone beyond.
        if peer.page[slot + _NUMBER] < peer.meetings or theirs == fingerprint:
            return
        raise self.rendezvous.disagreement(peer.rank, theirs == _REFUSED)

    def _wait(self, peer: _Peer, slot: int) -> None:
        page, number, give_way = peer.page, peer.meetings, os.sched_yield
        for _ in range(_EAGER_POLLS):
            give_way()
            if page[slot] >= number:
                return
        start, wait = time.monotonic(), None
        # The peer rings when it comes, if it sees that this rank sleeps for it; a nap ends in any case.
        self._page[_SLEEPS_FOR] = peer.rank + 1
        try:
            while (seen := page[slot]) < number:
                waited = time.monotonic() - start
                # A peer that failed or died may have come to this meeting before.
                if page[_FAILED] and page[slot] < number:
                    raise PeerError(f"{peer} failed; rank {self.rank} was waiting for it")
                if waited > _SHORTEST_NAP and peer.has_died() and page[slot] < number:
                    if peer.named:
                        unlink_names(peer.pid)
                    raise PeerError(f"{peer} is gone; rank {self.rank} was waiting for it")
                if waited > self.timeout:
                    raise self.rendezvous.late(peer.rank)
                if waited > FIRST_LOOK:
                    wait = wait or LongWait(self.rendezvous)
                    wait.look([peer.rank])
                sleep_on(peer.address + 8 * slot, seen, min(max(waited / 4, _SHORTEST_NAP), _LONGEST_NAP))
        finally:
            self._page[_SLEEPS_FOR] = 0
            if wait is not None:
                wait.over()

    def _find_all(self, ranks: tuple[int, ...]) -> list[_Peer]:
        self._met[ranks] = [self._peers.get(rank) or self._find(rank) for rank in ranks]
        return self._met[ranks]

    def _find(self, rank: int) -> _Peer:
        pid, handle, kind = self.rendezvous.read(_post_key(rank), rank).split()
        try:
            peer = self._peers[rank] = _Peer(rank, int(pid), int(handle), kind == "named")
        except FileNotFoundError as error:
            raise PeerError(f"rank {rank} (process {pid}) is gone; rank {self.rank} was waiting for it") from error
        except PermissionError as error:
            if not _is_running(int(pid)):
                raise PeerError(f"rank {rank} (process {pid}) is gone; rank {self.rank} was waiting for it") from error
            raise TransportError(
                f"rank {self.rank} may not map the memory of rank {rank} (process {pid}): {error}; "
                f"SHARDWEAVE_SEGMENTS=named has it opened by name, SHARDWEAVE_TRANSPORT=process_group does without"
            ) from error
        return peer


def _post_key(rank: int) -> str:
    return f"process/{rank}"
