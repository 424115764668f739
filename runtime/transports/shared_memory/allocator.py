"""An allocator of pieces of segments of memory, of which free ones keep their pages up to a limit."""

from __future__ import annotations

import atexit
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ....errors import TransportError
from ..own_limits import own_limit
from .memory_pressure import is_short_of_memory
from .segments import NAMED_FOLDER, PrivateSegment, Segment

Memory = TypeVar("Memory", bound=Segment | PrivateSegment)

MAX_SEGMENTS = 512
_SEGMENT_BYTES = 64 << 20
"""The minimum size of a segment. Its pages are allocated on use."""
_PAGE = mmap.PAGESIZE
_CHECKED_EVERY = 16 << 20
"""Bytes of new pages after which the machine's available memory is checked."""

DEFAULT_LIMIT = 256 << 20
_QUEUE = 8
"""The number of returned pieces that may stay in the queue, from which the next call takes them at less cost."""
_LARGEST_QUEUED = 1 << 20
"""Bytes of a piece that may stay in the queue, if the limit is large compared to the whole queue."""
_LEAST_MEASURED = 1 << 20
"""Bytes of a piece from which on its pages are measured. Smaller ones count whole."""


def block_size(nbytes: int) -> int:
    """Round up to a size class, by at most an eighth from one page on. Blocks of a class are interchangeable."""
    if nbytes <= _PAGE:
        return max(64, 1 << max(nbytes - 1, 0).bit_length())
    grain = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // grain) * grain


class Piece:
    """A block of a segment.

    Attributes:
        home: the free pieces of its size class, the last one freed at the end.
        pages: the page that it shares with other pieces of its class; None if it has pages of its own.
        taken: of pages: the number of pieces on them that are in use.
        resident: of free pages: the bytes that the system has allocated, or all bytes until that is measured.
    """

    __slots__ = ("__weakref__", "address", "home", "nbytes", "pages", "resident", "taken")

    def __init__(self, address: int, nbytes: int, home: deque[Piece], pages: Piece | None = None) -> None:
        self.address, self.nbytes, self.home, self.pages, self.taken = address, nbytes, home, pages, 0
        self.resident = nbytes


class Gaps:
    """Address ranges without pages. Adjacent ranges are merged; the smallest sufficient range is used first."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}  # by start
        self._starts: dict[int, int] = {}  # by end

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, address: int, nbytes: int) -> None:
        if (before := self._starts.get(address)) is not None:
            nbytes += self._remove(before)
            address = before
        if address + nbytes in self._sizes:
            nbytes += self._remove(address + nbytes)
        self._sizes[address] = nbytes
        self._starts[address + nbytes] = address
        insort(self._by_size, (nbytes, address))

    def take(self, nbytes: int) -> int | None:
        """Remove a range of `nbytes` and return its start; None if no gap is large enough."""
        at = bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return None
        size, address = self._by_size[at]
        self._remove(address)
        if size > nbytes:
            self.add(address + nbytes, size - nbytes)
        return address

    def has(self, address: int, nbytes: int) -> bool:
        """Whether exactly this range is a gap."""
        return self._sizes.get(address) == nbytes

    def drop(self, address: int) -> None:
        """Remove a gap whose addresses are no longer mapped."""
        self._remove(address)

    def _remove(self, address: int) -> int:
        nbytes = self._sizes.pop(address)
        del self._starts[address + nbytes]
        del self._by_size[bisect_left(self._by_size, (nbytes, address))]
        return nbytes


class Allocator(Generic[Memory]):
    """Allocates pieces of segments. As long as it is open, the index of a segment and an offset address the same place.

    Pages are in one of three states: in use; free, where the least recently used ones are returned to the system if
    they exceed the limit; or not allocated (`Gaps`). A free piece is reused for its own size class, is cut to size if
    it is of the next larger class and at most twice as large, and becomes part of a gap, which serves any size, when
    its pages are returned.

    Pieces are returned on any thread at any time (`Block.__del__`): they are queued, and the thread that holds the lock
    or can take it processes the queue. A few small pieces stay in the queue and count as allocated.

    Attributes:
        allocated: bytes of pages in use.
        free: bytes of free pages that are kept, as far as they have been measured. A piece that was not written whole,
            as where fewer rows came than there was room for, has fewer pages than bytes.
        ready: bytes of `allocated` in receive buffers that are kept between calls; the limit counts them as free.
        limit: of `free` and `ready` together, in bytes; None: DEFAULT_LIMIT, or as much `free` as `allocated`.
    """

    def __init__(self, name: str, new_segment: Callable[[int], Memory], limit: int | None) -> None:
        self.name = name
        self._new_segment = new_segment
        self.segments: list[Memory] = []
        self.allocated = self.free = self.ready = 0
        self.returned: deque[Piece | None] = deque()  # None: check the limit
        self._idle: dict[int, deque[Piece]] = {}
        self._kept: OrderedDict[Piece, None] = OrderedDict()  # whole pages, the least recently used first
        self._gaps = Gaps()
        self._lock = threading.Lock()
        self._unchecked = 0
        self._unmeasured: dict[Piece, None] = {}
        self._closed = self._frozen = self._missed = False
        self._bound_by(limit)
        allocators.add(self)

    def idle(self, size: int) -> deque[Piece]:
        """The free pieces of a size class, for `take`."""
        return self._idle.setdefault(size, deque())

    def take(self, idle: deque[Piece], size: int) -> Piece:
        """Allocate a piece of a size class, whose free pieces are `idle`.

        Raises:
            TransportError: there is not enough shared memory.
        """
        if self.returned:
            try:
                last = self.returned.pop()
            except IndexError:  # another thread took it
                last = None
            if last is not None:
                if last.home is idle:
                    return last  # it was never counted as free
                self.returned.append(last)
        with self._lock:
            piece = idle.pop() if idle else self._make(size)
            pages = piece.pages or piece
            if not pages.taken:
                del self._kept[pages]
                self._unmeasured.pop(pages, None)
                self.free -= pages.resident
                self.allocated += pages.nbytes
            pages.taken += 1
        if self._missed:
            self.settle()
        return piece

    def give_back(self, piece: Piece) -> None:
        """Free a piece. May be called on any thread, because a deque's append is atomic."""
        self.returned.append(piece)
        if piece.nbytes > self._small or len(self.returned) > _QUEUE:
            self.settle()

    def settle(self) -> None:
        """Process the queue of returned pieces. Never waits."""
        while self.returned:
            self._missed = True
            if not self._lock.acquire(False):
                return  # its holder checks again after releasing it
            self._missed = False
            try:
                self._take_back()
                if self.free > self._least - self.ready:
                    self._trim(self._allowed())
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Free the pieces in the queue. The lock is held."""
        while self.returned:
            piece = self.returned.popleft()
            if piece is None:
                continue
            piece.home.append(piece)
            pages = piece.pages or piece
            pages.taken -= 1
            if not pages.taken:
                self._kept[pages] = None
                self.allocated -= pages.nbytes
                self.free += pages.nbytes
                pages.resident = pages.nbytes
                if pages.nbytes >= _LEAST_MEASURED:
                    self._unmeasured[pages] = None

    def set_limit(self, limit: int | None) -> None:
        self._bound_by(limit)
        self.trim()

    def _bound_by(self, limit: int | None) -> None:
        self.limit, least = limit, DEFAULT_LIMIT if limit is None else limit
        self._small = _LARGEST_QUEUED if least >= 8 * _LARGEST_QUEUED * _QUEUE else 0
        self._queued = self._small * _QUEUE  # bytes that may be in the queue
        self._least = least - self._queued

    def add_ready(self, nbytes: int) -> None:
        """Count `nbytes` more of the memory in use as receive buffers that are kept."""
        self.ready += nbytes
        if self.free > self._least - self.ready:
            self.trim()

    def may_be_ready(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be kept as receive buffers, which may take half of the limit."""
        return self.ready + nbytes <= self._least // 2

    def trim(self, allowed: int | None = None) -> None:
        """Return the pages of free pieces that exceed `allowed` bytes (None: the limit)."""
        self.settle()
        with self._lock:
            self._trim(self._allowed() if allowed is None else allowed)
        self.settle()

    def free_pages(self) -> int:
        """`free`, all of it measured."""
        with self._lock:
            self._measure()
            free = self.free
        self.settle()
        return free

    def freeze(self) -> None:
        """Return no more pages: a peer may still be writing."""
        self._frozen = True

    def close(self) -> None:
        """Return all free pages, and others as soon as they become free. Nothing may be allocated any more."""
        self._closed, self.limit, self._least, self.ready = True, 0, -1, 0
        self._small = self._queued = 0
        self.returned.append(None)  # the lock may be held, even by the code that this interrupts
        self.settle()

    def _allowed(self) -> int:
        fixed = self._least - self.ready
        return max(fixed, self.allocated) if self.limit is None else max(fixed, 0)

    def _make(self, size: int) -> Piece:
        """Make a free piece of a class that has none. The lock is held."""
        home = self._idle[size]
        if size >= _PAGE:
            return self._pages(size, home)
        shared = self._idle.get(_PAGE)
        page = shared.pop() if shared else self._pages(_PAGE, home)
        page.home = home
        for address in range(page.address, page.address + _PAGE, size):
            home.append(Piece(address, size, home, page))
        return home.pop()

    def _pages(self, size: int, home: deque[Piece]) -> Piece:
        """Make a piece of whole pages, which is kept and free. The lock is held."""
        larger = min((n for n, idle in self._idle.items() if size < n <= 2 * size and idle), default=0)
        if larger:
            piece = self._idle[larger].pop()
            del self._kept[piece]
            self._unmeasured.pop(piece, None)
            self._give_back(piece.address + size, larger - size)
            self.free -= piece.resident
            address = piece.address
        else:
            address = self._new_pages(size)
        piece = Piece(address, size, home)
        self._kept[piece] = None
        self.free += size
        return piece

    def _new_pages(self, size: int) -> int:
        self._unchecked += size
        if self._unchecked >= _CHECKED_EVERY:
            self._unchecked = 0
            if self._kept and is_short_of_memory(size):
                self._trim(0)
        try:
            return self._reserved(size)
        except (OSError, TransportError):  # pieces without pages take addresses, which may be limited
            self._trim(0)
        try:
            return self._reserved(size)
        except OSError as error:
            raise TransportError(
                f"{size} bytes of shared memory in {NAMED_FOLDER}: {own_limit(error) or error}; tensors of this "
                f"process have {self.allocated} there"
            ) from error

    def _reserved(self, size: int) -> int:
        address = self._gaps.take(size)
        if address is None:
            self._grow(size)
            address = self._gaps.take(size)
            assert address is not None
        segment = self._segment_at(address)
        try:
            segment.reserve(address - segment.address, size)
        except OSError:
            self._gaps.add(address, size)
            raise
        return address

    def _grow(self, size: int) -> None:
        """Map another segment, at least as large as all others together, so that there are few for any sizes."""
        if len(self.segments) == MAX_SEGMENTS:
            raise TransportError(f"pool {self.name}: {MAX_SEGMENTS} segments are in use")
        exact = size + _PAGE
        mapped = sum(segment.nbytes for segment in self.segments)
        try:
            segment = self._new_segment(max(_SEGMENT_BYTES, mapped, 1 << exact.bit_length()))
        except TransportError:  # addresses may be limited (ulimit -v)
            segment = self._new_segment(exact)
        self.segments.append(segment)
        # One page is left between segments, so that their gaps are not merged.
        self._gaps.add(segment.address, segment.nbytes - _PAGE)

    def _trim(self, allowed: int) -> None:
        """Return the pages of free pieces that exceed `allowed` bytes. The lock is held."""
        self._take_back()
        if not self._frozen or self._closed:
            if not allowed:
                while self._kept:
                    self._drop(next(iter(self._kept)))
            elif self.free > allowed:
                self._measure()
            if self.free > allowed:
                # A piece that exceeds the limit alone goes first, so that others stay; then the least recently used.
                last = next(reversed(self._kept))
                for pages in [last] * (last.resident > allowed) + [*self._kept]:
                    if self.free > allowed and pages.resident and pages in self._kept:
                        self._drop(pages)
        if self._closed:
            for segment in [s for s in self.segments if self._gaps.has(s.address, s.nbytes - _PAGE)]:
                self._gaps.drop(segment.address)
                self.segments.remove(segment)

    def _measure(self) -> None:
        """Count the pages of free pieces that have not been measured since they were freed. The lock is held."""
        for piece in self._unmeasured:
            segment = self._segment_at(piece.address)
            self.free -= piece.resident
            piece.resident = min(piece.nbytes, segment.resident(piece.address - segment.address, piece.nbytes))
            self.free += piece.resident
        self._unmeasured.clear()

    def _drop(self, pages: Piece) -> None:
        """Make a gap of a free piece; if pieces of its class share pages, of all free pages of the class."""
        dropped = [pages]
        if pages.home and pages.home[0].pages is not None:
            home, dropped = pages.home, [p for p in self._kept if p.home is pages.home]
            left = [piece for piece in home if piece.pages is not None and piece.pages.taken]
            home.clear()
            home.extend(left)
        else:
            pages.home.remove(pages)
        for each in dropped:
            del self._kept[each]
            self._unmeasured.pop(each, None)
            self.free -= each.resident
            self._give_back(each.address, each.nbytes)

    def _give_back(self, address: int, nbytes: int) -> None:
        if not self._frozen:
            segment = self._segment_at(address)
            segment.give_back(address - segment.address, nbytes)
        self._gaps.add(address, nbytes)

    def _segment_at(self, address: int) -> Memory:
        return next(s for s in self.segments if 0 <= address - s.address < s.nbytes)


class _OfParent(Allocator[Any]):
    """An allocator in a forked child, which must not allocate or free: the memory is managed by the parent."""

    def take(self, idle: deque[Piece], size: int) -> Piece:
        raise TransportError(f"shared pool {self.name} is the parent process's; allowed: a process group of its own")

    def give_back(self, piece: Piece) -> None:
        pass

    def settle(self) -> None:
        pass

    def free_pages(self) -> int:
        return self.free  # the lock may have been held when this process was forked

    def trim(self, allowed: int | None = None) -> None:
        pass


allocators: weakref.WeakSet[Allocator[Any]] = weakref.WeakSet()
"""The allocators of this process, including those of ended groups that still have tensors."""


def _leave_to_parent() -> None:
    for allocator in allocators:
        allocator.__class__ = _OfParent


def _freeze_all() -> None:
    for allocator in allocators:
        allocator.freeze()


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(_freeze_all)  # the system frees all pages at exit
