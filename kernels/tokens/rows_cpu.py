"""Tensors on the CPU as numpy arrays, and arrays as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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
