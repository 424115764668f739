"""Launch kernels: whether and where they run, their compilation ahead of a call, and prepared launches over boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import triton

from ..errors import UnsupportedError
from .addresses import MOST_BUFFERS, NO_ADDRESSES, target_address
from .tiling import PROCESSORS, Launch

_HERE = nullcontext()


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
