"""Whether elements of a strided tensor share memory with each other or with another tensor."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of `tensor` share memory. Exact; fast for nested strides, which nearly all tensors have."""
    return _overlap(tuple(tensor.shape), tuple(tensor.stride()))


def ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors on one device overlap."""
    if not a.numel() or not b.numel():
        return False
    return a.data_ptr() < b.data_ptr() + _extent(b) and b.data_ptr() < a.data_ptr() + _extent(a)


def _extent(tensor: torch.Tensor) -> int:
    span = sum(stride * (n - 1) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.itemsize


@lru_cache(maxsize=1024)
def _overlap(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in sizes:
        return False
    dims = sorted((stride, n) for n, stride in zip(sizes, strides, strict=True) if n > 1)
    if dims and dims[0][0] == 0:
        return True
    # Two kinds of dims cannot cause an overlap: one whose stride exceeds the span of all smaller ones, and one whose
    # span is less than the greatest common divisor of the other strides.
    while dims:
        span = sum(stride * (n - 1) for stride, n in dims[:-1])
        unit = math.gcd(*(stride for stride, _ in dims[1:]))
        if dims[-1][0] > span:
            dims.pop()
        elif dims[0][0] * (dims[0][1] - 1) < unit:
            dims.pop(0)
        else:
            break
    if not dims:
        return False
    unit = math.gcd(*(stride for stride, _ in dims))
    steps, counts = [stride // unit for stride, _ in dims], [n for _, n in dims]
    length = sum(step * (n - 1) for step, n in zip(steps, counts, strict=True)) + 1
    if math.prod(counts) > length:
        return True
    # Each element marks its offset; there are no more offsets than elements in the storage.
    marks = np.zeros(length, dtype=np.uint8)
    np.lib.stride_tricks.as_strided(marks, counts, steps)[...] = 1
    return int(np.count_nonzero(marks)) < math.prod(counts)
