"""What the token kernels share: the same buffer of every owner, which rows a token has there, how rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton

from ..errors import ArgumentError
from .pointers import WORDS, AddressTables

VECTOR = 16  # bytes of the widest access
# Elements that a reference works on at a time: 1 MiB of float32 stays in the cache.
CHUNK = 1 << 18
PAYLOADS = (torch.float32, torch.bfloat16, torch.float16)


class TokenRows(NamedTuple):
    """Where the rows of this rank's tokens are. Made by locate_rows.

    The K entries of a token are in order of (owner, k); those without a row come last.
    """

    key: torch.Tensor
    """int32 [T, K]: owner * K + k, ascending; the owner of an entry without a row is W."""
    row: torch.Tensor
    """int32 [T, K]: the row in the owner's buffer, -1 if there is none."""


class Buffers:
    """One buffer of each owner, all of one shape, dtype and contiguous, in the owners' order.

    Args:
        tables: keeps their addresses on the device: whose buffers rotate uploads them once, and who captures a CUDA
            graph keeps it for as long as the graph.
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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def table(self) -> tuple[torch.Tensor, int]:
        """Their addresses, int64 [W] on their device, and the bits that any of them has."""
        if self._tables is None:
            self._tables = AddressTables(self.device)
        if self._addresses is None:
            addresses = tuple([tensor.data_ptr() for tensor in self._tensors])
            self._addresses = addresses, reduce(or_, addresses)
        addresses, bits = self._addresses
        return self._tables.of(addresses), bits


class ChosenBuffers(Buffers):
    """Of several buffers of each owner the one that it chose, which the device knows.

    Args:
        words: int32 [W], in the owners' order: the chosen ones' places among `buffers`.
    """

    def __init__(self, buffers: Buffers, words: torch.Tensor) -> None:
        self._of, self._words = buffers, words
        self.shape, self.dtype, self.device = buffers.shape, buffers.dtype, buffers.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The host waits for the device."""
        return tuple([self._of.tensors[word] for word in self._words.tolist()])

    def __len__(self) -> int:
        return len(self._words)

    def table(self) -> tuple[torch.Tensor, int]:
        addresses, bits = self._of.table()
        return addresses.index_select(0, self._words), bits


@dataclass(frozen=True)
class RowLaunch:
    """How a row of some bytes is cut among programs. `for_rows` gives the default."""

    columns: int  # elements, a power of two
    num_warps: int

    @classmethod
    def for_rows(cls, hidden: int, itemsize: int) -> RowLaunch:
        """4 KiB a program: two accesses of 16 bytes for each of 128 threads, one for each of 256 on AMD."""
        nbytes = min(4096, power_of_two(hidden * itemsize))
        return cls(max(nbytes, VECTOR) // itemsize, max(1, min(4, nbytes // 1024)))


def power_of_two(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


def alignment(*bits: int) -> int:
    """The power of two, up to 16, that all of these bytes are a multiple of."""
    together = VECTOR
    for value in bits:
        together |= value
    return together & -together


def row_constants(dtype: torch.dtype, hidden: int, *bits: int) -> dict[str, Any]:
    """What every kernel over rows is compiled with; `bits` are addresses and strides in bytes besides the rows' own."""
    align = alignment(hidden * dtype.itemsize, *bits)
    return {
        "WORD": WORDS[dtype.itemsize],
        "H": hidden,
        "ALIGN": align,
        "VEC": align // dtype.itemsize,
    }


def check_rows(name: str, x: torch.Tensor, shape: tuple[int | None, int], dtype: torch.dtype) -> None:
    """
    Raises:
        ArgumentError: `x` has another shape or dtype, or its rows are not contiguous.
    """
    fits = x.dim() == 2 and (shape[0] is None or x.shape[0] == shape[0]) and x.shape[1] == shape[1]
    if not fits or x.dtype is not dtype or (x.shape[1] > 1 and x.numel() and x.stride(1) != 1):
        wanted = ("T" if shape[0] is None else shape[0], shape[1])
        raise ArgumentError(
            f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: {dtype} of shape {wanted}, "
            f"the elements of a row adjacent"
        )


def programs_of(device: torch.device, most: int) -> int:
    """How many programs a kernel that loops over rows starts: eight for each multiprocessor, no more than `most`."""
    count = 4 if device.type != "cuda" else 8 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(most, count))


def cdiv(a: int, b: int) -> int:
    return triton.cdiv(a, b)
