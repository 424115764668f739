"""Tensors on blocks of memory that peers map; a block recycles when the last tensor on it dies."""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from .segments import Segment

SEGMENT_BYTES, NAMED_SEGMENT_BYTES = 64 << 20, 4 << 20
"""The least that a segment has. Anonymous ones take memory as they are touched, named ones at once."""
MAX_SEGMENTS = 512
KEPT_BYTES = 2 << 30
"""Free blocks up to this many bytes keep their pages; beyond it, pages of blocks of 1 MiB and more go back."""
_KEPT_FORMS = 4096
_TYPESTR = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}


class Block:
    """A piece of a segment. The tensor made on it holds it; when the last one is gone it returns to its pool.

    It holds the segments in turn: a tensor may outlive its pool.
    """

    __slots__ = ("__array_interface__", "address", "free", "segments")

    def __init__(
        self, segments: list[Segment], free: deque[int], address: int, shape: tuple[int, ...], typestr: str
    ) -> None:
        self.segments, self.free, self.address = segments, free, address
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}

    def __del__(self) -> None:
        # May run on any thread: a deque's append is atomic.
        self.free.append(self.address)


def block_size(nbytes: int) -> int:
    """Round up to a size class, at most an eighth above: blocks of a class are interchangeable."""
    if nbytes <= 4096:
        return max(64, 1 << max(nbytes - 1, 0).bit_length())
    grain = max(4096, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // grain) * grain


class _Form:
    """What is the same for all tensors of one shape and dtype."""

    def __init__(self, free: deque[int], shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
        self.free, self.shape, self.size = free, shape, size
        # numpy has no name for some dtypes: words of their size then, which torch views as the dtype.
        named = dtype in _TYPESTR
        self.typestr = _TYPESTR[dtype] if named else f"<i{dtype.itemsize}"
        self.dtype = None if named else dtype


class SharedPool:
    """Blocks carved from growing segments. `segments` is append-only: an index and an offset name a block for ever."""

    def __init__(self, name: str, named: bool) -> None:
        self.name, self.named = name, named
        self.segments: list[Segment] = []
        self._used = 0
        self._free: dict[int, deque[int]] = {}
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], _Form] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            MemoryError: more segments than the directory has room for.
            WorldError: no room for a named segment.
        """
        shape = tuple(shape)
        form = self._forms.get((shape, dtype)) or self._form(shape, dtype)
        free = form.free
        try:
            address = free.pop()
        except IndexError:
            address = self._carve(form.size)
        tensor = torch.from_numpy(np.asarray(Block(self.segments, free, address, shape, form.typestr)))
        return tensor if form.dtype is None else tensor.view(form.dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is of this pool."""
        address = tensor.data_ptr()
        return any(0 <= address - segment.address < segment.nbytes for segment in self.segments)

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The segment and the offset where a tensor from `empty` begins; any, if it has no elements."""
        address = tensor.data_ptr()
        for index in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[index]
            if 0 <= address - segment.address < segment.nbytes:
                return index, address - segment.address
        assert tensor.numel() == 0, f"{hex(address)} is not in shared pool {self.name}"
        return 0, 0

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Form:
        size = block_size(math.prod(shape) * dtype.itemsize)
        if len(self._forms) >= _KEPT_FORMS:
            self._forms.clear()
        form = self._forms[shape, dtype] = _Form(self._free.setdefault(size, deque()), shape, dtype, size)
        return form

    def _carve(self, size: int) -> int:
        self._trim()
        if not self.segments or self._used + size + mmap.PAGESIZE > self.segments[-1].nbytes:
            if len(self.segments) == MAX_SEGMENTS:
                raise MemoryError(f"shared pool {self.name}: {MAX_SEGMENTS} segments are in use")
            # Doubling keeps them few.
            least = NAMED_SEGMENT_BYTES if self.named else SEGMENT_BYTES
            grown = least << min(len(self.segments) // 8, 10)
            self.segments.append(Segment(self.name, max(grown, size + 2 * mmap.PAGESIZE), self.named))
            self._used = 0
        grain = 64 if size < mmap.PAGESIZE else mmap.PAGESIZE
        offset = -(-self._used // grain) * grain
        self._used = offset + size
        return self.segments[-1].address + offset

    def _trim(self) -> None:
        """Give pages back where more than KEPT_BYTES of blocks are free."""
        kept = sum(size * len(free) for size, free in list(self._free.items()))
        for size, free in sorted(self._free.items(), reverse=True):
            if size < 1 << 20 or kept <= KEPT_BYTES:
                break
            for address in list(free):
                segment = next(s for s in self.segments if 0 <= address - s.address < s.nbytes)
                offset = address - segment.address
                start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
                segment.map.madvise(mmap.MADV_REMOVE, start, length)
                kept -= size
