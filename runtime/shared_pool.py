"""Shared memory that a rank owns and its peers map: anonymous segments, blocks of them as tensors, given back
when they die."""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 512
KEPT_BYTES = 2 << 30
"""Free blocks up to this many bytes keep their pages; beyond it, pages of blocks of 1 MiB and more go back to the
system."""


class Segment:
    """A memfd mapped here; peers open it through `/proc/<pid>/fd/<fd>`. Nothing to unlink: it goes with its last
    user."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes
        self.map = mmap.mmap(self.fd, nbytes)
        self.address = np.frombuffer(self.map, dtype=np.uint8).ctypes.data


def open_segment(pid: int, fd: int) -> mmap.mmap:
    """Map a peer's whole segment."""
    path = f"/proc/{pid}/fd/{fd}"
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)


class Block:
    """A piece of a segment. The tensor made on it holds it; when the last one is gone it returns to its pool."""

    __slots__ = ("__array_interface__", "address", "free", "offset", "segment", "size")

    def __init__(
        self, free: deque[tuple[int, int]], segment: int, offset: int, size: int, address: int, nbytes: int
    ) -> None:
        self.free, self.segment, self.offset, self.size, self.address = free, segment, offset, size, address
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # May run on any thread: a deque's append is atomic.
        self.free.append((self.segment, self.offset))


def block_size(nbytes: int) -> int:
    """Round up to a size class, at most an eighth above: blocks of a class are interchangeable."""
    if nbytes <= 4096:
        return max(64, 1 << max(nbytes - 1, 0).bit_length())
    grain = max(4096, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // grain) * grain


class SharedPool:
    """Blocks carved from growing segments. `segments` is append-only: an index and an offset name a block for ever."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self._used = 0
        self._free: dict[int, deque[tuple[int, int]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int, int]:
        """An uninitialised contiguous tensor, its segment and its offset there.

        Raises:
            MemoryError: more segments than the directory has room for.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        size = block_size(nbytes)
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = deque()
        try:
            segment, offset = free.pop()
        except IndexError:
            segment, offset = self._carve(size)
        block = Block(free, segment, offset, size, self.segments[segment].address + offset, nbytes)
        flat = torch.from_numpy(np.asarray(block))
        return flat.view(dtype).view(tuple(shape)), segment, offset

    def _carve(self, size: int) -> tuple[int, int]:
        self._trim()
        if not self.segments or self._used + size + mmap.PAGESIZE > self.segments[-1].nbytes:
            if len(self.segments) == MAX_SEGMENTS:
                raise MemoryError(f"shared pool {self.name}: {MAX_SEGMENTS} segments are in use")
            # Pages are committed when they are touched, so generous segments cost nothing; doubling keeps them few.
            grown = SEGMENT_BYTES << min(len(self.segments) // 8, 10)
            self.segments.append(Segment(self.name, max(grown, size + 2 * mmap.PAGESIZE)))
            self._used = 0
        grain = 64 if size < mmap.PAGESIZE else mmap.PAGESIZE
        offset = -(-self._used // grain) * grain
        self._used = offset + size
        return len(self.segments) - 1, offset

    def _trim(self) -> None:
        kept = sum(size * len(free) for size, free in list(self._free.items()))
        if kept <= KEPT_BYTES:
            return
        for size, free in sorted(self._free.items(), reverse=True):
            if size < 1 << 20 or kept <= KEPT_BYTES:
                break
            for segment, offset in list(free):
                start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
                self.segments[segment].map.madvise(mmap.MADV_REMOVE, start, length)
                kept -= size
