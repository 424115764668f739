"""count_pairs on the CPU: a compiled loop over pairs, or numpy where there is none."""

from __future__ import annotations

import numpy as np
import torch

from .compiled_loops import compiled_loop
from .rows_cpu import host_empty, host_tensor


def count_pairs_cpu(
    ids: torch.Tensor, num_experts: int, physical_expert_of: torch.Tensor | None, num_physical_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of count_pairs' result on the CPU."""
    loop = compiled_loop("counts", ids.dtype)
    if loop is None:
        return count_pairs_numpy(ids, num_experts, physical_expert_of, num_physical_experts)
    ids = ids.contiguous()
    expert, place = host_empty(ids.shape, torch.int32), host_empty(ids.shape, torch.int32)
    counts = host_tensor(np.zeros(num_physical_experts + 1, np.int32))
    table = None if physical_expert_of is None else physical_expert_of.contiguous()
    of_table = table, table is not None
    loop(ids.numel(), 0, ids, num_experts, *of_table, num_physical_experts, expert, place, counts)
    return expert, place, counts


def count_pairs_numpy(
    ids: torch.Tensor, num_experts: int, physical_expert_of: torch.Tensor | None, num_physical_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`count_pairs_cpu` by sorting."""
    flat = ids.numpy().reshape(-1)
    invalid = (flat < 0) | (flat >= num_experts)
    expert = np.where(invalid, -1, flat).astype(np.int32)
    if physical_expert_of is not None:
        expert = np.where(invalid, expert, physical_expert_of.numpy().take(expert, mode="clip"))
    order = expert.argsort(kind="stable")  # -1 is before all others
    number = np.bincount(expert + 1, minlength=num_physical_experts + 1)
    place = np.empty_like(expert)
    place[order] = np.arange(len(flat)) - np.repeat(number.cumsum() - number, number)
    place[expert < 0] = -1
    counts = np.append(number[1:], np.count_nonzero(invalid & (flat != -1))).astype(np.int32)
    return host_tensor(expert.reshape(ids.shape)), host_tensor(place.reshape(ids.shape)), host_tensor(counts)
