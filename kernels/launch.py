"""Launch kernels: whether and where they run, and launches that bypass Triton's binder, which costs more than they do.

`PreparedLaunch` is for boxes: everything but addresses is known when a program is bound. `Launches` is for rows of
tokens, whose number changes from call to call; where it does not, `RepeatedLaunch` makes a launch again with other
tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from ..errors import UnsupportedError
from .addresses import MOST_BUFFERS, NO_ADDRESSES, target_address
from .current_device import capturing, is_current, on_device
from .tiling import PROCESSORS, Launch

_REGISTERS = 65536  # of an SM


def interpreted(kernel: object) -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1 and so runs on CPU tensors only."""
    return not isinstance(kernel, triton.runtime.jit.JITFunction)


_KERNELS_ON = "cpu" if interpreted(target_address) else "cuda"


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on the device in this process; otherwise the CPU paths do."""
    return device.type == _KERNELS_ON


@cache
def processors_of(device: torch.device) -> int:
    """The SMs of a GPU; for other devices, of the GPU that tables are made for ahead of time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


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


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without synchronising.

    Raises:
        UnsupportedError: a CUDA graph is being captured: its replays would copy again from memory that was freed.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    if capturing(device):
        raise UnsupportedError(
            "a kernel's tables would be uploaded while a CUDA graph is captured; allowed: programs bound before (by "
            "bind, or by a first call)"
        )
    return host.pin_memory().to(device, non_blocking=True)


def loaded(kernel: Any, device: torch.device, arguments: Sequence[Any], **options: Any) -> Any:
    """Compile a kernel for arguments such as these, constants included. Indexed with a grid, the result is a launcher
    that takes all parameters in order."""
    if interpreted(kernel):
        return kernel
    with on_device(device):
        return kernel.warmup(*arguments, grid=(1, 1, 1), **options)


def prepared(
    kernel: Any, grid: tuple[int, int, int], device: torch.device, arguments: Sequence[Any], num_warps: int,
    **options: int,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load a kernel and return its launcher for a grid.

    The launcher takes all parameters of the kernel in order, constants included, as `arguments` are.
    """
    with on_device(device):
        launcher: Callable[..., None] = loaded(kernel, device, arguments, num_warps=num_warps, **options)[grid]
    return launcher


def registers_of_sm(num_warps: int, programs: int = 1) -> dict[str, int]:
    """The option by which each of so many programs on an SM may take its share of all registers.

    Without it, ptxas aims at more programs on an SM, and spills a few bytes of a thread rather than take the registers
    that it needs.
    """
    return {} if torch.version.hip else {"maxnreg": min(_REGISTERS // (32 * num_warps * programs), 255)}


class Constants:
    """The constants of some launches of a kernel. Two are equal only if they are the same object: make each once."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        """`constants`: by parameter of the kernel; all of its constants. `options`: of the compilation."""
        self.values = tuple([constants[name] for name in kernel.arg_names if name in constants])
        self.options = options


class LaunchMade(NamedTuple):
    """A launch of `Launches`."""

    kernel: Any
    start: Callable[..., None]
    """The compiled kernel on its grid; takes all arguments."""
    arguments: tuple[Any, ...]


class _Recording(threading.local):
    launches: list[LaunchMade] | None = None


_recording = _Recording()


@contextmanager
def recorded_launches() -> Iterator[list[LaunchMade]]:
    """In this block the launches of `Launches` by this thread are also appended to the list."""
    before, _recording.launches = _recording.launches, []
    try:
        yield _recording.launches
    finally:
        _recording.launches = before


class RepeatedLaunch:
    """A launch that was made before, with other values of some arguments. Whoever calls it vouches for what the kernel
    was compiled for: dtypes, and which tensors are aligned to 16 bytes; and makes its device current.

    Args:
        values: some of its tensors, and of its numbers by the name of the parameter; a call gives new ones in the same
            order. All other arguments stay as they are, and are kept.
    """

    def __init__(self, made: LaunchMade, values: Sequence[torch.Tensor | str | None]) -> None:
        self._start, self._arguments = made.start, list(made.arguments)
        self._replaced = []
        for place, (name, argument) in enumerate(zip(made.kernel.arg_names, made.arguments, strict=True)):
            for number, value in enumerate(values):
                if value is argument if isinstance(argument, torch.Tensor) else value == name:
                    self._replaced.append((place, number))
                    self._arguments[place] = None

    @property
    def replaced(self) -> set[int]:
        """The indices of values that are arguments of this launch."""
        return {number for _, number in self._replaced}

    def __call__(self, values: Sequence[torch.Tensor | int]) -> None:
        arguments = self._arguments.copy()
        for place, number in self._replaced:
            arguments[place] = values[number]
        self._start(*arguments)


class Launches:
    """The launches of a kernel; it is compiled once for each device, set of constants, and alignment of its tensors.

    Its parameters are tensors, then numbers with annotated types that are not specialised, then constants. Triton
    assumes of a tensor whether it is aligned to 16 bytes, so that belongs to what a compiled kernel is found by.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._loaded: dict[tuple[Constants, torch.device, int], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        device: torch.device,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: Constants,
    ) -> None:
        """Launch; the dtypes of `tensors` follow from `constants`."""
        aligned = 1
        for tensor in tensors:
            aligned = aligned << 1 | (not tensor.data_ptr() & 15)
        key, arguments = (constants, device, aligned), (*tensors, *numbers, *constants.values)
        if is_current(device):
            self._launch(grid, key, arguments)
        else:
            with on_device(device):
                self._launch(grid, key, arguments)

    def _launch(self, grid: tuple[int, int, int], key: tuple[Constants, torch.device, int], arguments: Any) -> None:
        """Launch on the current device: triton loads a compiled kernel there when it is first indexed with a grid."""
        kernel = self._loaded.get(key)
        if kernel is None:
            constants, device, _ = key
            kernel = self._loaded[key] = loaded(self._kernel, device, arguments, **constants.options)
        start = kernel[grid]
        if _recording.launches is not None:
            _recording.launches.append(LaunchMade(self._kernel, start, arguments))
        start(*arguments)


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
