"""The device on which kernels are compiled, loaded and launched, and whether its stream is being captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_HERE = nullcontext()


def is_current(device: torch.device) -> bool:
    """Whether the kernels of a device can be launched without making it current."""
    # As torch.cuda.current_device, without the CUDA initialisation that the device's tensors imply.
    return device.type != "cuda" or device.index is None or device.index == torch._C._cuda_getDevice()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context with the device current, in which its kernels are compiled and launched."""
    return _HERE if is_current(device) else torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of a device."""
    if device.type != "cuda":
        return False
    if is_current(device):  # as in calls: without a context
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
