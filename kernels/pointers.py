"""What the launchers share: launches and base addresses on the device, fill patterns, and which path a call takes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .tiling import Launch

# Sets of addresses kept on the device per table: enough for buffers that rotate, few enough not to hold memory.
KEPT_TABLES = 16
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def interpreted(kernel: object) -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1, so that it runs on CPU tensors and on no others."""
    return not isinstance(kernel, triton.runtime.jit.JITFunction)


def tile_constants(launch: Launch, aligns: tuple[int, int], many: tuple[bool, bool]) -> dict[str, Any]:
    """The constants that both kernels have; pairs are of sources and targets."""
    return {
        "VS": launch.source_vector,
        "VD": launch.target_vector,
        "ROWS": launch.rows,
        "COLS": launch.columns,
        "TRANSPOSED": launch.kind == "transposed",
        "ALIGN_S": aligns[0],
        "ALIGN_D": aligns[1],
        "MANY_SOURCES": many[0],
        "MANY_TARGETS": many[1],
        "HAS_FILL": launch.has_fill,
        "num_warps": launch.num_warps,
    }


@triton.jit
def base_address(table, index, first, MANY: tl.constexpr):
    """The address of buffer `index`: `first` for 0, else (only where MANY) from the table."""
    address = first.to(tl.int64)
    if MANY:
        address = tl.where(index == 0, address, tl.load(table + index, mask=index > 0, other=0))
    return address


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch whose descriptors are on the device."""

    grid: tuple[int]
    descriptors: torch.Tensor  # int64 [tiles, ...]
    fill: int  # 8 bytes of the fill value
    constants: dict[str, Any]

    @classmethod
    def upload(cls, launch: Launch, device: torch.device, fill: int, constants: dict[str, Any]) -> PreparedLaunch:
        descriptors = torch.from_numpy(launch.descriptors).to(device)
        return cls((len(descriptors),), descriptors, fill, constants)


class Pointers:
    """The base addresses of the buffers that a table's descriptors name.

    Buffer 0 is a kernel argument, so a fresh output costs no upload. The others come from a table on the device, kept
    by their addresses and uploaded when they were not seen before. All calls of one table run on one stream.
    """

    def __init__(
        self, name: str, ids: np.ndarray, dtype: torch.dtype | None, itemsize: int, device: torch.device
    ) -> None:
        self._name, self._dtype, self._itemsize, self._device = name, dtype, itemsize, device
        self._ids = [int(i) for i in np.unique(ids) if i > 0]
        self._has_zero = bool((ids == 0).any())
        self._size = max(self._ids, default=0 if self._has_zero else -1) + 1
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self.many = bool(self._ids)

    def resolve(self, buffers: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor, int]:
        """Buffer 0's address, the others' on the device (empty if there are none), the alignment of all, 1 to 16."""
        if len(buffers) < self._size:
            raise ArgumentError(f"{self._name}: {len(buffers)} buffers were given; the table names {self._size}")
        first = 0
        if self._has_zero:
            self._check(0, buffers[0])
            first = buffers[0].data_ptr()
        if not self._ids:
            bits = first | 16
            return first, self._none, bits & -bits
        addresses = tuple([buffers[i].data_ptr() for i in self._ids])
        bits = first | 16
        for address in addresses:
            bits |= address
        table = self._tables.get(addresses)
        if table is None:
            for i in self._ids:
                self._check(i, buffers[i])
            table = self._upload(addresses)
        return first, table, bits & -bits

    def _check(self, i: int, buffer: torch.Tensor) -> None:
        if buffer.device.type != self._device.type:
            raise ArgumentError(f"{self._name}[{i}] is on {buffer.device}; the table is on {self._device}")
        if self._dtype is not None and buffer.dtype is not self._dtype:
            raise ArgumentError(f"{self._name}[{i}] has dtype {buffer.dtype}; the table is for {self._dtype}")
        if buffer.element_size() != self._itemsize:
            raise ArgumentError(
                f"{self._name}[{i}] has elements of {buffer.element_size()} bytes; the table is for {self._itemsize}"
            )

    def _upload(self, addresses: tuple[int, ...]) -> torch.Tensor:
        host = torch.zeros(self._size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for i, address in zip(self._ids, addresses, strict=True):
            host[i] = struct.unpack("q", struct.pack("Q", address))[0]
        table = host.to(self._device, non_blocking=True)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A replay copies from `host` again, into memory of the graph's pool: good for that graph alone.
            self._captured += [host, table]
            return table
        while len(self._tables) >= KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[addresses] = table
        return table


def pattern(fill: float | int | bool, dtype: torch.dtype) -> bytes:
    """The bytes of one element of `dtype` that holds `fill`; ArgumentError where it cannot."""
    try:
        element = (
            torch.full((1,), fill, dtype=torch.float32) if dtype.itemsize == 1 and dtype.is_floating_point else None
        )
        element = torch.full((1,), fill, dtype=dtype) if element is None else element.to(dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"fill is {fill!r}, which {dtype} does not hold: {error}") from None
    return element.view(torch.uint8).numpy().tobytes()


def pattern_word(element: bytes, word: int) -> int | None:
    """`element` repeated to 8 bytes, as a signed integer; None where words of `word` bytes would not all be equal."""
    whole = (element * 8)[: max(8, len(element))]
    words = {whole[i : i + word] for i in range(0, len(whole), word)}
    return struct.unpack("q", whole[:8])[0] if len(words) == 1 else None
