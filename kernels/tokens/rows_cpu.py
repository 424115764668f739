"""Rows in memory of the CPU, as the CPU paths of the token kernels copy them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .pairs_cpu import Ints


class HostRows:
    """The rows of a tensor on the CPU, for `take`. They may be strided; those to be written are contiguous.

    Rows are copied by numpy, whose calls cost less than torch's, unless torch has threads to share them.

    Args:
        rows: a tensor, or one as `host_array` returns it.
        dtype: of the tensor, if it is an array.
        first: the number of the first row.

    Attributes:
        threads: those of torch.
    """

    def __init__(self, rows: torch.Tensor | npt.NDArray[Any], dtype: torch.dtype | None = None, first: int = 0) -> None:
        self.threads, self._first = torch.get_num_threads(), first
        self._array = None
        if self.threads > 1:
            tensor = rows.detach() if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
            self._rows = tensor if dtype is None else tensor.view(dtype)
        else:
            self._array = host_array(rows) if isinstance(rows, torch.Tensor) else rows

    def take(self, source: HostRows, index: Ints, begin: int) -> None:
        """Copy the rows `index` of `source` to the rows from `begin` on."""
        end = begin + len(index)
        if source._first:
            index = index - source._first
        if self._array is not None and source._array is not None:
            source._array.take(index, 0, self._array[begin:end], "clip")  # what is not clipped goes through a buffer
        else:
            torch.index_select(source._rows, 0, torch.from_numpy(index), out=self._rows[begin:end])

    def put(self, source: HostRows, index: Ints, to: Ints) -> None:
        """Copy the rows `index` of `source` to the rows `to`, through memory of their size."""
        if self._array is not None and source._array is not None:
            self._array[to] = source._array.take(index, 0)
        else:
            self._rows.index_copy_(0, torch.from_numpy(to), source._rows.index_select(0, torch.from_numpy(index)))


def host_rows(tensors: Sequence[torch.Tensor]) -> list[HostRows]:
    """The rows of each tensor. One tensor may be there several times, as where all destinations' rows are in it."""
    known: dict[int, HostRows] = {}
    return [known.get(id(x)) or known.setdefault(id(x), HostRows(x)) for x in tensors]


def host_array(x: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as a contiguous array, of its memory if it is contiguous. Of bfloat16, which numpy lacks, the bits."""
    if x.requires_grad:
        x = x.detach()
    array = (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


_DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.int32: np.int32, torch.int64: np.int64}


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, allocated by numpy, at less cost than by torch, if numpy has the dtype."""
    of_array = _DTYPES.get(dtype)
    if of_array is None:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return host_tensor(np.empty(shape, of_array))


def host_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as a contiguous tensor of its memory."""
    x = torch.from_numpy(array)
    return x if array.size else x.new_empty(x.shape)  # numpy's strides are 0 where there are no elements
