"""locate_rows on the CPU: a compiled loop over tokens, or numpy where there is none."""

from __future__ import annotations

import numpy as np
import torch

from .compiled_loops import compiled_loop
from .rows import TokenRows
from .rows_cpu import host_empty, host_tensor


def locate_rows_cpu(
    physical_expert: torch.Tensor,
    place: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    destination: torch.Tensor,
    destinations: int,
) -> TokenRows:
    """locate_rows on the CPU; `start`, `limit`, `destination`: [S]."""
    loop, (tokens, k) = compiled_loop("locations"), physical_expert.shape
    if loop is None:
        return locate_rows_numpy(physical_expert, place, start, limit, destination, destinations)
    given = [x.to(torch.int32).contiguous() for x in (physical_expert, place, start, limit, destination)]
    key, row = host_empty((tokens, k), torch.int32), host_empty((tokens, k), torch.int32)
    loop(tokens, 0, *given, key, row, destinations, k)
    return TokenRows(key, row)


def locate_rows_numpy(
    physical_expert: torch.Tensor,
    place: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    destination: torch.Tensor,
    destinations: int,
) -> TokenRows:
    """`locate_rows_cpu` in numpy."""
    (tokens, k), expert, at = physical_expert.shape, physical_expert.numpy(), place.numpy()
    of_expert = [np.append(x.numpy(), np.int32(0)).take(expert) for x in (limit, start, destination)]  # -1: the last
    kept = (expert >= 0) & (at < of_expert[0])
    row = np.where(kept, of_expert[1] + at, -1).astype(np.int32)
    key = np.where(kept, of_expert[2], destinations).astype(np.int32) * k + np.arange(k, dtype=np.int32)
    order = key.argsort(1)
    return TokenRows(*(host_tensor(np.take_along_axis(x, order, 1).reshape(tokens, k)) for x in (key, row)))
