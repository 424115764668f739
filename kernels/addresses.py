"""Addresses of buffers as kernels read them: as arguments, and from cached tables on the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .current_device import capturing

# Cached lists of addresses: enough for buffers that rotate.
KEPT_TABLES = 16
# Addresses passed as kernel arguments: programs rarely read more buffers.
SOURCE_ARGUMENTS, TARGET_ARGUMENTS = 4, 1
NO_ADDRESSES = (0,) * (SOURCE_ARGUMENTS + TARGET_ARGUMENTS)
# A kernel is the same for all larger numbers of sources and targets.
MOST_BUFFERS = SOURCE_ARGUMENTS + 1, TARGET_ARGUMENTS + 1


@triton.jit
def source_address(table, index, source0, source1, source2, source3, SOURCES: tl.constexpr):
    """The address of source `index`: an argument for the first four, else from the table."""
    address = source0.to(tl.int64)
    if SOURCES > 1:
        address = tl.where(index == 1, source1.to(tl.int64), address)
    if SOURCES > 2:
        address = tl.where(index == 2, source2.to(tl.int64), address)
    if SOURCES > 3:
        address = tl.where(index == 3, source3.to(tl.int64), address)
    if SOURCES > 4:
        address = tl.where(index > 3, tl.load(table + index, mask=index > 3, other=0), address)
    return address


@triton.jit
def target_address(table, index, target0, TARGETS: tl.constexpr):
    """The address of target `index`: target0, or from the table."""
    address = target0.to(tl.int64)
    if TARGETS > 1:
        address = tl.where(index > 0, tl.load(table + index, mask=index > 0, other=0), address)
    return address


class AddressTables:
    """A cache of address lists on a device, int64; a list is uploaded when it is first seen.

    All kernels that read the table of one list run on one stream.

    Args:
        positions: the position of each address in the table; default: consecutive from 0.
        length: of a table if `positions` is given; other positions hold 0.
    """

    def __init__(self, device: torch.device, positions: Sequence[int] | None = None, length: int = 0) -> None:
        self._device, self._positions, self._length = device, positions, length
        self._on_gpu = device.type == "cuda"
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        # Tables that CUDA graphs read, kept for as long as this object.
        self._captured: list[torch.Tensor] = []

    def find(self, addresses: tuple[int, ...]) -> torch.Tensor | None:
        """Return the table if it is cached."""
        table = self._tables.get(addresses)
        if table is not None and self._on_gpu and capturing(self._device):
            self._captured.append(table)
        return table

    def of(self, addresses: tuple[int, ...]) -> torch.Tensor:
        """Return the table; does not wait for its upload."""
        table = self.find(addresses)
        return self._upload(addresses) if table is None else table

    def _upload(self, addresses: tuple[int, ...]) -> torch.Tensor:
        length = len(addresses) if self._positions is None else self._length
        host = torch.zeros(length, dtype=torch.int64, pin_memory=self._on_gpu, device="cpu")
        for i, address in enumerate(addresses):
            at = i if self._positions is None else self._positions[i]
            host[at] = struct.unpack("q", struct.pack("Q", address))[0]
        table = host.to(self._device, non_blocking=True) if self._on_gpu else host
        if capturing(self._device):
            # A replay copies from `host` again into the graph's own pool, so the table serves that graph only.
            self._captured += [host, table]
            return table
        while len(self._tables) >= KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[addresses] = table
        return table


class BaseAddresses:
    """The base addresses of the buffers that a table's descriptors refer to.

    The first addresses are kernel arguments, so that fresh buffers need no upload. The others come from a cached table
    on the device. All calls of one table run on one stream. Buffers that are equal in every call may be set once
    (`fix`).
    """

    def __init__(
        self, name: str, ids: np.ndarray, dtype: torch.dtype | None, itemsize: int, device: torch.device, arguments: int
    ) -> None:
        """`dtype` of the buffers; None: any dtype of the itemsize."""
        self._name, self._dtype, self._itemsize, self._device = name, dtype, itemsize, device
        named = [int(i) for i in np.unique(ids) if i >= 0]
        self._first, self._ids = [i for i in named if i < arguments], [i for i in named if i >= arguments]
        self._arguments = [0] * arguments
        self._table = torch.empty(0, dtype=torch.int64, device=device)  # used if all addresses are arguments
        self._bits = 16
        self.count = max(named, default=-1) + 1
        self._tables = AddressTables(device, self._ids, self.count)

    def fix(self, buffers: Sequence[torch.Tensor | None], stride: int = 0) -> None:
        """Set buffers that are equal in every call, so that calls resolve only the others; None: not fixed.

        Buffers of the table on the device are fixed only if all of them are given. With a stride the table is followed
        by another one, of addresses that many bytes further.
        """
        for i in [i for i in self._first if i < len(buffers)]:
            if (buffer := buffers[i]) is not None:
                self._check(i, buffer)
                self._arguments[i] = buffer.data_ptr()
                self._bits |= self._arguments[i]
                self._first.remove(i)
        tabled = [buffers[i] for i in self._ids if i < len(buffers)]
        given = [buffer for buffer in tabled if buffer is not None]
        if self._ids and len(given) == len(self._ids):
            for i, buffer in zip(self._ids, given, strict=True):
                self._check(i, buffer)
                self._bits |= buffer.data_ptr()
            self._table = self._tables.of(tuple(buffer.data_ptr() for buffer in given))
            if stride:
                self._table = torch.cat([self._table, self._table + stride])
            self._ids = []

    def resolve(self, buffers: Sequence[torch.Tensor]) -> tuple[list[int], torch.Tensor, int]:
        """Return the first buffers' addresses, the table of the others (empty if there are none), and the alignment of
        all, 1 to 16."""
        if len(buffers) < self.count:
            raise ArgumentError(f"{self._name}: {len(buffers)} buffers were given; the table names {self.count}")
        bits, first = self._bits, self._arguments
        if self._first:
            first = first.copy()
        for i in self._first:
            buffer = buffers[i]
            if buffer.dtype is not self._dtype or buffer.device != self._device:
                self._check(i, buffer)
            first[i] = address = buffer.data_ptr()
            bits |= address
        if not self._ids:
            return first, self._table, bits & -bits
        addresses = tuple([buffers[i].data_ptr() for i in self._ids])
        for address in addresses:
            bits |= address
        table = self._tables.find(addresses)
        if table is None:
            for i in self._ids:
                self._check(i, buffers[i])
            table = self._tables.of(addresses)
        return first, table, bits & -bits

    def _check(self, i: int, buffer: torch.Tensor) -> None:
        device = self._device
        if buffer.device.type != device.type or device.index not in (None, buffer.device.index):
            raise ArgumentError(f"{self._name}[{i}] is on {buffer.device}; the table is on {self._device}")
        if self._dtype is not None and buffer.dtype is not self._dtype:
            raise ArgumentError(f"{self._name}[{i}] has dtype {buffer.dtype}; the table is for {self._dtype}")
        if buffer.element_size() != self._itemsize:
            raise ArgumentError(
                f"{self._name}[{i}] has elements of {buffer.element_size()} bytes; the table is for {self._itemsize}"
            )
