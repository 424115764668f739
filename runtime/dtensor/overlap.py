"""Whether two elements of a strided tensor are in one place, so that it cannot be written to."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Exactly; at once for a tensor whose strides are nested, which all but few are."""
    return _overlap(tuple(tensor.shape), tuple(tensor.stride()))


@lru_cache(maxsize=1024)
def _overlap(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in sizes:
        return False
    dims = sorted((stride, n) for n, stride in zip(sizes, strides, strict=True) if n > 1)
    if dims and dims[0][0] == 0:
        return True
    # A dim whose step is longer than all that lies within it keeps elements apart; so does one that lies within a step
    # of all others.
    while dims:
        within = sum(stride * (n - 1) for stride, n in dims[:-1])
        unit = math.gcd(*(stride for stride, _ in dims[1:]))
        if dims[-1][0] > within:
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
    # Each element marks its place: no more places than the storage has elements.
    places = np.zeros(length, dtype=np.uint8)
    np.lib.stride_tricks.as_strided(places, counts, steps)[...] = 1
    return int(np.count_nonzero(places)) < math.prod(counts)
