"""The NVLink domain of a GPU, which may span several machines: what the driver says of its fabric.

torch does not offer it, so the driver's management library, NVML, is asked.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch

_LIBRARY = "libnvidia-ml.so.1"
_COMPLETED = 3  # of nvmlGpuFabricState_t: the GPU has joined its fabric


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = [
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def nvlink_domain(device: torch.device) -> str | None:
    """A name of the NVLink domain of a GPU, equal for all GPUs that NVLink connects, on whatever machine. None for
    other devices, for GPUs without a fabric, and where the driver does not know it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # OSError: no library; AttributeError: an older one; RuntimeError, AssertionError: no such GPU, or no CUDA at all.
    with suppress(OSError, AttributeError, RuntimeError, AssertionError):
        return _domain_of(ctypes.CDLL(_LIBRARY), f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


def _domain_of(library: Any, uuid: str) -> str | None:
    if library.nvmlInit_v2():
        return None
    try:
        handle, info = ctypes.c_void_p(), _FabricInfo()
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        if library.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)):
            return None
    finally:
        library.nvmlShutdown()
    if info.state != _COMPLETED or info.status or not any(info.cluster_uuid):
        return None
    return f"{bytes(info.cluster_uuid).hex()}.{info.clique_id}"
