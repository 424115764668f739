"""OutputPool: buffers into which the ranks of a group write each other's outputs directly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ....kernels import DirectUse
from ...statistics import stats
from ..base import WindowedTransport
from ..buffer_pool import BufferPool
from .window import Window


class OutputPool:
    """Pooled buffers of each rank of a group, and one more that is never lent.

    A rank takes a buffer for its output without communication, and announces its number to its peers at the beginning
    of the launch that writes (`kernels.direct_boxes`), in the order of its stream. The buffer is free once the last
    tensor on it is gone. While all are in use, peers write into the one that is never lent, and the output is copied
    out of it.

    Args:
        window: with `number + 1` parts, whose channel of releases is that of announcements.
        number: of buffers that are lent.
    """

    def __init__(self, window: Window, number: int) -> None:
        self.window, self.nbytes, self.number = window, window.nbytes, number
        self._pool = BufferPool(window.rank, window.parts, window.nbytes, number)
        self._spare = window.half(number)[window.rank]
        self._uses: dict[torch.dtype, DirectUse] = {}

    def use(self, dtype: torch.dtype) -> DirectUse:
        """The use of launches that write outputs of a dtype."""
        if dtype not in self._uses:
            self._uses[dtype] = self.window.direct(dtype)
        return self._uses[dtype]

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, int]:
        """A contiguous tensor to write, and the number of its buffer; `number` if it is not lent."""
        buffer = self._pool.take()
        if buffer is None:
            stats().copies["outputs of a redistribution: all pooled buffers are in use"] += 1
            nbytes = math.prod(shape) * dtype.itemsize
            return self._spare[:nbytes].view(dtype).view(tuple(shape)), self.number
        number = self._pool.number(buffer)
        assert number is not None
        # Not a view: autograd forbids in-place writes to views that custom functions return.
        out = torch.empty(0, dtype=dtype, device=device)
        strides = [math.prod([max(n, 1) for n in shape[i + 1 :]]) for i in range(len(shape))]
        return out.set_(buffer.untyped_storage(), 0, tuple(shape), strides), number

    def buffer(self, number: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of a rank, flat."""
        return self.window.half(number)[rank].view(dtype)


class PooledOutputsTransport(WindowedTransport, Protocol):
    """A windowed transport with output pools, as DirectStep uses it."""

    def outputs(self, ranks: tuple[int, ...]) -> OutputPool:
        """The pool of a group, given by its ascending ranks, which `WindowPolicy.outputs` names."""
