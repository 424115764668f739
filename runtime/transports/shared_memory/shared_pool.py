"""Tensors in pooled memory, which is reused after the last tensor on it dies."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
import torch

from .allocator import MAX_SEGMENTS, Allocator, Memory, Piece, block_size
from .pool_controls import pool_limit
from .segments import Segment

__all__ = ["MAX_SEGMENTS", "Pool", "SharedPool"]

_CACHED_TYPES = 4096
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
    """Owner of a piece of memory, held by the tensors on it: returns the piece to its allocator when the last one dies.

    It holds the allocator, and so the memory, because a tensor may outlive its pool.
    """

    __slots__ = ("__array_interface__", "allocator", "piece")

    def __init__(self, allocator: Allocator, piece: Piece, shape: tuple[int, ...], typestr: str) -> None:
        self.allocator, self.piece = allocator, piece
        self.__array_interface__ = {"data": (piece.address, False), "shape": shape, "typestr": typestr, "version": 3}

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # by then the modules are cleared, and the system frees all pages
            self.allocator.give_back(self.piece)


class _TensorType:
    """Properties of all tensors of a shape and dtype."""

    def __init__(self, idle: deque[Piece], shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
        self.idle, self.shape, self.size = idle, shape, size
        # For dtypes that numpy does not have, integers of the same size, which torch views as the dtype.
        named = dtype in _TYPESTR
        self.typestr = _TYPESTR[dtype] if named else f"<i{dtype.itemsize}"
        self.dtype = None if named else dtype


class Pool(Generic[Memory]):
    """Allocates tensors in segments of memory, which `new_segment` makes, of a number of bytes.

    Free memory keeps its pages within the limit of `set_pool_limit`. When the pool is deleted, all free memory is
    released; memory in use is released with its tensors.
    """

    def __init__(self, name: str, new_segment: Callable[[int], Memory]) -> None:
        self.name = name
        self.allocator = Allocator(name, new_segment, pool_limit())
        self._types: dict[tuple[tuple[int, ...], torch.dtype], _TensorType] = {}

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "allocator"):
            self.allocator.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            TransportError: there is not enough memory.
        """
        shape = tuple(shape)
        kind = self._types.get((shape, dtype)) or self._new_type(shape, dtype)
        allocator = self.allocator
        piece = allocator.take(kind.idle, kind.size)
        tensor = torch.from_numpy(np.asarray(Block(allocator, piece, shape, kind.typestr)))
        return tensor if kind.dtype is None else tensor.view(kind.dtype)

    def _new_type(self, shape: tuple[int, ...], dtype: torch.dtype) -> _TensorType:
        size = block_size(math.prod(shape) * dtype.itemsize)
        if len(self._types) >= _CACHED_TYPES:
            self._types.clear()
        kind = self._types[shape, dtype] = _TensorType(self.allocator.idle(size), shape, dtype, size)
        return kind


class SharedPool(Pool[Segment]):
    """A pool of memory that peers map. A segment's index and an offset address a place for the life of the pool."""

    def __init__(self, name: str, named: bool) -> None:
        super().__init__(name, lambda nbytes: Segment(name, nbytes, named, reserve=False))
        self.named, self.segments = named, self.allocator.segments

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory of this pool."""
        address = tensor.data_ptr()
        return any(0 <= address - segment.address < segment.nbytes for segment in self.segments)

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The segment and the offset of a tensor from `empty`; arbitrary if it has no elements."""
        address = tensor.data_ptr()
        for index in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[index]
            if 0 <= address - segment.address < segment.nbytes:
                return index, address - segment.address
        assert tensor.numel() == 0, f"{hex(address)} is not in shared pool {self.name}"
        return 0, 0

    def freeze(self) -> None:
        """Release no pages from now on: a peer that has not noticed a failure may still be writing."""
        self.allocator.freeze()
