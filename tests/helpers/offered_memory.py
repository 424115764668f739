"""Ranks of tests check that memory which `SharedMemoryTransport.offer` has made known to peers is not freed while peers
may still use it: until the next barrier that offers nothing, or a peer refuses. A rank that frees it too early goes
wrong only at times, when its pages are returned to the system or used again before a slower peer has read them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from shardweave.errors import DisagreementError
from shardweave.runtime.transports.comm_requests import Barrier
from shardweave.runtime.transports.shared_memory.allocator import Allocator, Piece
from shardweave.runtime.transports.shared_memory.transport import SharedMemoryTransport

Range = tuple[int, int]
"""The first address, and the first one behind."""


class _Group(NamedTuple):
    """Barriers of the same ranks follow each other in order of the calls of one thread."""

    transport: int
    thread: int
    peers: tuple[int, ...]


class OfferedMemory:
    """
    Attributes:
        freed: a text for each piece that was freed too early.
    """

    def __init__(self) -> None:
        self.freed: list[str] = []
        self._by_table: dict[tuple[int, Any], list[Range]] = {}
        """By transport and offer: first the range whose release means that the offer went to nobody, that of the table
        or of the first buffer, then the ranges of all buffers."""
        self._in_use: dict[_Group, list[Range]] = defaultdict(list)

    def watch(self) -> None:
        """Watch this process from now on."""
        offer, answer, begin = SharedMemoryTransport.offer, SharedMemoryTransport.answer, SharedMemoryTransport.begin
        fail, give_back = SharedMemoryTransport.fail, Allocator.give_back

        def watched_offer(transport: SharedMemoryTransport, buffers: Any) -> Any:
            address, held = offer(transport, buffers)
            given = [x for x in buffers if x is not None]
            if given:
                offered = [given[0] if held is None else held, *given]
                self._by_table[id(transport), address] = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in offered]
            return address, held

        def watched_answer(transport: SharedMemoryTransport, request: Barrier) -> Any:
            group = self._arrive(transport, request)
            return self._passed(group, request, lambda: answer(transport, request))

        def watched_begin(transport: SharedMemoryTransport, request: Barrier) -> Any:
            group = self._arrive(transport, request)
            wait = begin(transport, request)
            return lambda: self._passed(group, request, wait)

        def watched_fail(transport: SharedMemoryTransport, error: Any) -> None:
            for group in [group for group in list(self._in_use) if group.transport == id(transport)]:
                self._in_use.pop(group, None)  # a transport that has failed returns no pages
            fail(transport, error)

        def watched_give_back(allocator: Allocator, piece: Piece) -> None:
            for offer, (table, *_) in list(self._by_table.items()):
                if _overlaps(piece, table):
                    self._by_table.pop(offer, None)  # of an offer to nobody
            for group, ranges in list(self._in_use.items()):
                if any(_overlaps(piece, given) for given in ranges):
                    self.freed.append(f"{piece.nbytes} bytes, offered to ranks {group.peers}")
            give_back(allocator, piece)

        for name, method in (("offer", watched_offer), ("answer", watched_answer), ("begin", watched_begin)):
            setattr(SharedMemoryTransport, name, method)
        SharedMemoryTransport.fail = watched_fail  # type: ignore[method-assign]
        Allocator.give_back = watched_give_back  # type: ignore[method-assign]

    def _arrive(self, transport: SharedMemoryTransport, request: Barrier) -> _Group:
        group = _Group(id(transport), threading.get_ident(), request.peers)
        ranges = self._by_table.pop((id(transport), request.offer), None)
        if ranges is not None:
            self._in_use[group] += ranges[1:]
        return group

    def _passed(self, group: _Group, request: Barrier, wait: Callable[[], Any]) -> Any:
        try:
            result = wait()
        except DisagreementError as error:
            if error.recoverable:  # no rank is in this call any longer
                self._in_use.pop(group, None)
            raise
        if request.offer is None:
            self._in_use.pop(group, None)
        return result


def _overlaps(piece: Piece, given: Range) -> bool:
    return piece.address < given[1] and given[0] < piece.address + piece.nbytes
