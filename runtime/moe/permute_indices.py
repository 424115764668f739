"""Rows that came rank by rank, in the order of their experts: the indices that torchao's grouped GEMMs are fed by."""

from __future__ import annotations

import torch

from ...errors import ArgumentError


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which received row goes where, for rows that lie by source rank and, of each, by expert.

    The contract is that of torchao's function of this name. Nothing is read by the host; one set of tensor operations
    for every device.

    Args:
        tokens_per_expert_group: int32 or int64 [num_ranks * experts_per_rank], the rows of each source rank and expert,
            rank-major.
        experts_per_rank: E, of this rank.
        num_ranks: W, sources.
        max_len: rows of the permuted buffer. What lies beyond is left out; the sizes do not say so.
        alignment: what groups are padded to a multiple of. An expert without rows gets one such multiple.

    Returns:
        permuted_indices: int32 [max_len], the received row of each place, -1 for padding and past the last group.
        m_sizes: int32 [E], rows of each group, padding included.
        m_offsets: int32 [E], where each group ends.

    Raises:
        ArgumentError: a number, shape or dtype that is not allowed.
    """
    for name, value, least in (
        ("experts_per_rank", experts_per_rank, 1),
        ("num_ranks", num_ranks, 1),
        ("max_len", max_len, 0),
        ("alignment", alignment, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ArgumentError(f"{name}: {value!r}; allowed: a whole number, {least} to {(1 << 31) - 1}")
    counts, shape = tokens_per_expert_group, (num_ranks * experts_per_rank,)
    if counts.shape != shape or counts.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"tokens_per_expert_group: {counts.dtype} of shape {tuple(counts.shape)}; allowed: int32 or int64 of shape "
            f"{shape}"
        )
    counts = counts.long()
    starts = counts.cumsum(0) - counts
    by_expert = counts.view(num_ranks, experts_per_rank).T  # [E, W]
    rows = by_expert.sum(1)
    sizes = (rows.clamp_min(1) + alignment - 1) // alignment * alignment
    # Each group is a run of every source and, last, one of padding.
    runs = torch.cat((by_expert, (sizes - rows)[:, None]), 1).flatten()
    ends = runs.cumsum(0)
    begins = torch.cat((starts.view(num_ranks, experts_per_rank).T, starts.new_zeros(experts_per_rank, 1)), 1).flatten()
    place = torch.arange(max_len, device=counts.device)
    # Of runs that end at one place, all but the first are empty: the first that ends later is the one that has it.
    run = torch.searchsorted(ends, place, right=True)
    beyond = run == len(ends)
    run = run.clamp_max(len(ends) - 1)
    index = begins[run] + place - (ends - runs)[run]
    padding = (run % (num_ranks + 1) == num_ranks) | beyond
    return index.masked_fill(padding, -1).int(), sizes.int(), sizes.cumsum(0).int()
