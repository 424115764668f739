"""Common to the launchers: prepared launches, device tables of addresses, fill patterns, and the choice of path."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..errors import ArgumentError, UnsupportedError
from .tiling import PROCESSORS, Launch

# Cached lists of addresses: enough for buffers that rotate.
KEPT_TABLES = 16
# Addresses passed as kernel arguments: programs rarely read more buffers.
SOURCE_ARGUMENTS, TARGET_ARGUMENTS = 4, 1
NO_ADDRESSES = (0,) * (SOURCE_ARGUMENTS + TARGET_ARGUMENTS)
# A kernel is the same for all larger numbers of sources and targets.
MOST_BUFFERS = SOURCE_ARGUMENTS + 1, TARGET_ARGUMENTS + 1
_HERE = nullcontext()
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def interpreted(kernel: object) -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1 and so runs on CPU tensors only."""
    return not isinstance(kernel, triton.runtime.jit.JITFunction)


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on the device in this process; otherwise the CPU paths do."""
    return device.type == ("cpu" if interpreted(target_address) else "cuda")


def processors_of(device: torch.device) -> int:
    """The SMs of a GPU; for other devices, of the GPU that tables are made for ahead of time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context with the device current, in which its kernels are compiled and launched."""
    # As torch.cuda.current_device, without the CUDA initialisation that the device's tensors imply.
    if device.type != "cuda" or device.index is None or device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(device)


def tile_constants(launch: Launch, aligns: tuple[int, int], buffers: tuple[int, int]) -> dict[str, Any]:
    """Return the constants common to copy_boxes_kernel and reduce_boxes_kernel; pairs are (sources, targets)."""
    return {
        "VS": launch.source_vector,
        "VD": launch.target_vector,
        "ROWS": launch.rows,
        "COLS": launch.columns,
        "TRANSPOSED": launch.kind == "transposed",
        "ALIGN_S": aligns[0],
        "ALIGN_D": aligns[1],
        "SOURCES": min(buffers[0], MOST_BUFFERS[0]),
        "TARGETS": min(buffers[1], MOST_BUFFERS[1]),
        "HAS_FILL": launch.has_fill,
        "num_warps": launch.num_warps,
    }


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


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without synchronising.

    Raises:
        UnsupportedError: a CUDA graph is being captured: its replays would copy again from memory that was freed.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a kernel's tables would be uploaded while a CUDA graph is captured; allowed: programs bound before (by "
            "bind, or by a first call)"
        )
    return host.pin_memory().to(device, non_blocking=True)


def prepared(
    kernel: Any, grid: tuple[int, int, int], device: torch.device, arguments: Sequence[Any], num_warps: int
) -> Callable[..., None]:
    """Compile and load a kernel and return its launcher for a grid.

    The launcher takes all parameters of the kernel in order, constants included, as `arguments` are. It bypasses
    Triton's binder, which costs more than the launch itself.
    """
    if interpreted(kernel):
        return kernel[grid]
    with on_device(device):
        return kernel.warmup(*arguments, grid=grid, num_warps=num_warps)[grid]


class PreparedLaunch:
    """A launch over boxes with its descriptors on the device and its kernel loaded; a call supplies addresses."""

    def __init__(
        self, kernel: Any, launch: Launch, device: torch.device, scalars: Sequence[int], constants: Mapping[str, Any]
    ) -> None:
        """`scalars`: the kernel's arguments between the addresses and its constants."""
        self.descriptors = uploaded(launch.descriptors, device)
        names = [name for name in kernel.arg_names if name in constants]
        # In the order of the kernel's parameters, which compiled launchers take, constants included.
        self._rest = (*scalars, *(constants[name] for name in names))
        grid = (len(self.descriptors), 1, 1)
        table = torch.empty(0, dtype=torch.int64, device=device)
        arguments = (self.descriptors, table, table, *NO_ADDRESSES, *self._rest)
        self._start = prepared(kernel, grid, device, arguments, constants["num_warps"])

    def __call__(
        self, source_table: torch.Tensor, target_table: torch.Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        self._start(self.descriptors, source_table, target_table, *sources, *targets, *self._rest)


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
        if table is not None and self._on_gpu and torch.cuda.is_current_stream_capturing():
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
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            # A replay copies from `host` again into the graph's own pool, so the table serves that graph only.
            self._captured += [host, table]
            return table
        while len(self._tables) >= KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[addresses] = table
        return table


class Pointers:
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

    def fix(self, buffers: Sequence[torch.Tensor | None]) -> None:
        """Set buffers that are equal in every call, so that calls resolve only the others; None: not fixed.

        Buffers of the table on the device are fixed only if all of them are given.
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
            self._ids = []

    def resolve(self, buffers: Sequence[torch.Tensor]) -> tuple[list[int], torch.Tensor, int]:
        """Return the first buffers' addresses, the table of the others (empty if there are none), and the alignment of
        all, 1 to 16."""
        if len(buffers) < self.count:
            raise ArgumentError(f"{self._name}: {len(buffers)} buffers were given; the table names {self.count}")
        bits, first = self._bits, self._arguments.copy()
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


def pattern(fill: float | int | bool, dtype: torch.dtype) -> bytes:
    """Return the bytes of an element of `dtype` with value `fill`.

    Raises:
        ArgumentError: the dtype cannot represent the value.
    """
    try:
        element = (
            torch.full((1,), fill, dtype=torch.float32, device="cpu")
            if dtype.itemsize == 1 and dtype.is_floating_point
            else None
        )
        element = torch.full((1,), fill, dtype=dtype, device="cpu") if element is None else element.to(dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"fill is {fill!r}, which {dtype} cannot represent: {error}") from None
    return element.view(torch.uint8).numpy().tobytes()


def pattern_word(element: bytes, word: int) -> int | None:
    """Return `element` repeated to 8 bytes as a signed integer; None if its words of `word` bytes differ."""
    whole = (element * 8)[: max(8, len(element))]
    words = {whole[i : i + word] for i in range(0, len(whole), word)}
    return struct.unpack("q", whole[:8])[0] if len(words) == 1 else None
