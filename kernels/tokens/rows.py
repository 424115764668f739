"""Common to the token kernels: destination buffers, the rows of tokens, argument checks and launch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..addresses import AddressTables
from ..dtypes import WORDS
from ..launch import processors_of
from .compiled_loops import memory_address
from .rows_cpu import host_array

VECTOR = 16  # bytes of the widest access
# Elements that a CPU path works on at a time: 1 MiB of float32 stays in the cache.
CHUNK = 1 << 18
PROGRAMS_OF_SM = 8  # of kernels that loop over rows
PAYLOADS = (torch.float32, torch.bfloat16, torch.float16)


class TokenRows(NamedTuple):
    """The destination and row of each (token, k) pair of this rank. Returned by locate_rows.

    The K pairs of a token are in order of (destination, k); pairs without a row come last.
    """

    key: torch.Tensor
    """int32 [T, K]: destination * K + k, ascending; the destination of a pair without a row is W."""
    row: torch.Tensor
    """int32 [T, K]: the row in the destination's buffer, -1 if there is none."""


class Buffers:
    """One buffer per destination rank, in order of rank; all contiguous, of one shape and dtype.

    Args:
        tables: caches the buffers' addresses on the device. Pass one where buffers rotate, so that each list is
            uploaded once, and where a CUDA graph is captured, which needs the table for as long as it lives.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], tables: AddressTables | None = None) -> None:
        self._tensors = tuple(tensors)
        first = self._tensors[0]
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        for i, tensor in enumerate(self._tensors):
            if tensor.shape != first.shape or tensor.dtype is not first.dtype or not tensor.is_contiguous():
                raise ArgumentError(
                    f"buffers[{i}]: {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: "
                    f"contiguous, as buffers[0], {first.dtype} {tuple(first.shape)}"
                )
        self._tables = tables
        self._addresses: tuple[tuple[int, ...], int] | None = None
        self._host_addresses: torch.Tensor | None = None
        self._host_arrays: list[npt.NDArray[Any]] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def table(self) -> tuple[torch.Tensor, int]:
        """The addresses, int64 [W] on the device, and their bitwise or."""
        if self._tables is None:
            self._tables = AddressTables(self.device)
        if self._addresses is None:
            addresses = tuple([tensor.data_ptr() for tensor in self._tensors])
            self._addresses = addresses, reduce(or_, addresses)
        addresses, bits = self._addresses
        return self._tables.of(addresses), bits

    def host_addresses(self) -> torch.Tensor:
        """The address of row 0 of each destination's buffer, int64 [W]. On the CPU."""
        if self._host_addresses is None:
            self._host_addresses = torch.tensor([*map(memory_address, self._tensors)], dtype=torch.int64, device="cpu")
        return self._host_addresses

    def host_arrays(self) -> list[npt.NDArray[Any]]:
        """The buffers as arrays, on the CPU."""
        if self._host_arrays is None:
            self._host_arrays = [host_array(tensor) for tensor in self._tensors]
        return self._host_arrays

    @property
    def choice(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(index, error) of ChosenBuffers; None: destination i has the i-th buffer."""
        return None


class ChosenBuffers(Buffers):
    """One of several buffers of each destination, selected by an index on the device.

    Args:
        buffers: all candidate buffers.
        index: int32 [W] of any stride, for each destination the index of its buffer among `buffers`.
        error: int64 [1]; if it is not 0, the indices are not valid and the first buffer is selected.
    """

    def __init__(self, buffers: Buffers, index: torch.Tensor, error: torch.Tensor) -> None:
        self._candidates, self._index, self._error = buffers, index, error
        self.shape, self.dtype, self.device = buffers.shape, buffers.dtype, buffers.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The selected buffers; reads the index on the host, which synchronises."""
        index = [0] * len(self) if int(self._error) else self._index.tolist()
        return tuple([self._candidates.tensors[i] for i in index])

    def __len__(self) -> int:
        return len(self._index)

    def host_addresses(self) -> torch.Tensor:
        return torch.tensor([*map(memory_address, self.tensors)], dtype=torch.int64, device="cpu")

    def table(self) -> tuple[torch.Tensor, int]:
        """The addresses of all candidates."""
        return self._candidates.table()

    @property
    def choice(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._index, self._error


@triton.jit
def address_of(buffers, choice, error, choice_stride, destination, kept, CHOSEN: tl.constexpr):
    """The address of a destination's buffer, an int64; `kept`: whether there is one. As `Buffers.choice` says."""
    at = destination
    if CHOSEN:
        picked = tl.load(choice + destination.to(tl.int64) * choice_stride, mask=kept, other=0)
        at = tl.where(tl.load(error) == 0, picked, 0)
    return tl.load(buffers + at, mask=kept, other=0)


@dataclass(frozen=True)
class RowLaunch:
    """How one row is split into blocks, each of one program. `for_rows` returns the default.

    Attributes:
        columns: elements of a block, a power of two.
    """

    columns: int
    num_warps: int

    @classmethod
    @cache
    def for_rows(cls, hidden: int, itemsize: int) -> RowLaunch:
        """4 KiB per block: two 16-byte accesses for each of 128 threads, one for each of 256 on AMD."""
        nbytes = min(4096, power_of_two(hidden * itemsize))
        return cls(max(nbytes, VECTOR) // itemsize, max(1, nbytes // 1024))


def power_of_two(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


def row_constants(dtype: torch.dtype, hidden: int, bits: int = 0) -> dict[str, Any]:
    """The constants of every kernel over rows; `bits`: as for `row_alignment`."""
    align = row_alignment(dtype, hidden, bits)
    return {
        "WORD": WORDS[dtype.itemsize],
        "H": hidden,
        "ALIGN": align,
        "VEC": align // dtype.itemsize,
    }


def row_alignment(dtype: torch.dtype, hidden: int, bits: int) -> int:
    """The alignment of all accesses to rows, in bytes; `bits`: the bitwise or of addresses and of strides in bytes."""
    together = VECTOR | hidden * dtype.itemsize | bits
    return together & -together


def has_contiguous_rows(x: torch.Tensor) -> bool:
    """Whether the elements of each row of `x`, [n, H], are adjacent; the rows may be strided."""
    return x.stride(1) == 1 or x.shape[1] <= 1 or not x.numel()


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [n, H] with the elements of each row adjacent: itself or a copy."""
    return x if x.stride(1) == 1 or has_contiguous_rows(x) else x.contiguous()  # the first test saves a call


def check_rows(name: str, x: torch.Tensor, shape: tuple[int | None, int], dtype: torch.dtype) -> None:
    """Check a 2-D tensor whose rows may be strided.

    Raises:
        ArgumentError: `x` has another shape or dtype, or the elements of a row are not adjacent.
    """
    fits = x.dim() == 2 and (shape[0] is None or x.shape[0] == shape[0]) and x.shape[1] == shape[1]
    if not fits or x.dtype is not dtype or (x.stride(1) != 1 and not has_contiguous_rows(x)):
        wanted = ("T" if shape[0] is None else shape[0], shape[1])
        raise ArgumentError(
            f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: {dtype} of shape {wanted}, "
            f"the elements of a row adjacent"
        )


def programs_of(device: torch.device, most: int) -> int:
    """Programs of a kernel that loops over rows: `PROGRAMS_OF_SM` per multiprocessor, at most `most`."""
    count = PROGRAMS_OF_SM * processors_of(device) if device.type == "cuda" else 4
    return max(1, min(most, count))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
