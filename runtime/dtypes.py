"""torch dtypes to the planner's names and back."""

from __future__ import annotations

import torch

from ..errors import ArgumentError, shown
from ..planner import ITEMSIZE


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: torch.dtype | str) -> str:
    """The planner's name of a torch dtype, or of a name already.

    Raises:
        ArgumentError: a dtype whose elements are not whole bytes of their own, quantized types and the like.
    """
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    if name not in ITEMSIZE:
        raise ArgumentError(f"dtype: {shown(name)} is not supported; allowed: {', '.join(ITEMSIZE)}")
    return name
