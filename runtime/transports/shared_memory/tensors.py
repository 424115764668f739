"""Tensors on blocks of memory that peers map; a block is free when the last tensor on it dies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from .allocator import MAX_SEGMENTS, Allocator, Piece, block_size
from .pool_controls import pool_limit

__all__ = ["MAX_SEGMENTS", "SharedPool"]

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
    """What the tensors on a piece of memory hold; when the last one is gone the piece returns to its allocator.

    It holds the allocator, and so the memory, in turn: a tensor may outlive its pool.
    """

    __slots__ = ("__array_interface__", "allocator", "piece")

    def __init__(self, allocator: Allocator, piece: Piece, shape: tuple[int, ...], typestr: str) -> None:
        self.allocator, self.piece = allocator, piece
        self.__array_interface__ = {"data": (piece.address, False), "shape": shape, "typestr": typestr, "version": 3}

    def __del__(self) -> None:
        self.allocator.give_back(self.piece)


class _Form:
    """What is the same for all tensors of one shape and dtype."""

    def __init__(self, idle: deque[Piece], shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
        self.idle, self.shape, self.size = idle, shape, size
        # numpy has no name for some dtypes: words of their size then, which torch views as the dtype.
        named = dtype in _TYPESTR
        self.typestr = _TYPESTR[dtype] if named else f"<i{dtype.itemsize}"
        self.dtype = None if named else dtype


class SharedPool:
    """Tensors on pieces of growing segments, which an index and an offset name for as long as the pool lives.

    Memory that is free keeps its pages within the limit of `set_pool_limit`. With the pool all of it goes that is under
    no tensor; the rest goes with its tensors.
    """

    def __init__(self, name: str, named: bool) -> None:
        self.name, self.named = name, named
        self.allocator = Allocator(name, named, pool_limit())
        self.segments = self.allocator.segments
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], _Form] = {}

    def __del__(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            TransportError: no room for it.
        """
        shape = tuple(shape)
        form = self._forms.get((shape, dtype)) or self._form(shape, dtype)
        allocator = self.allocator
        piece = allocator.take(form.idle, form.size)
        tensor = torch.from_numpy(np.asarray(Block(allocator, piece, shape, form.typestr)))
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

    def freeze(self) -> None:
        """Leave all pages where they are from now on: a peer that has not noticed a failure may still be writing."""
        self.allocator.freeze()

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Form:
        size = block_size(math.prod(shape) * dtype.itemsize)
        if len(self._forms) >= _KEPT_FORMS:
            self._forms.clear()
        form = self._forms[shape, dtype] = _Form(self.allocator.idle(size), shape, dtype, size)
        return form
