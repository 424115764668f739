"""generate_permute_indices: sort rows from source-rank order into expert order, as for torchao's grouped GEMMs."""

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
    """Return the received row of each place in expert order, for rows ordered by source rank and then by expert.

    The contract is that of torchao's function of this name. No device-to-host sync; the same tensor operations on every
    device.

    Args:
        tokens_per_expert_group: int32 or int64 [num_ranks * experts_per_rank], the rows of each source rank and expert,
            rank-major.
        experts_per_rank: E, of this rank.
        num_ranks: W, the number of source ranks.
        max_len: rows of the permuted buffer. Rows beyond are left out; the sizes count them nevertheless.
        alignment: groups are padded to a multiple of it. An expert without rows gets one multiple.

    Returns:
        permuted_indices: int32 [max_len], the received row of each place, -1 for padding and past the last group.
        m_sizes: int32 [E], rows of each group, padding included.
        m_offsets: int32 [E], the end of each group.

    Raises:
        ArgumentError: unsupported number, shape or dtype.
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
    # Each group has one run per source, then one of padding.
    runs = torch.cat((by_expert, (sizes - rows)[:, None]), 1).flatten()
    ends = runs.cumsum(0)
    begins = torch.cat((starts.view(num_ranks, experts_per_rank).T, starts.new_zeros(experts_per_rank, 1)), 1).flatten()
    place = torch.arange(max_len, device=counts.device)
    # The first run that ends after a place contains it; empty runs end where the run before them does.
    run = torch.searchsorted(ends, place, right=True)
    beyond = run == len(ends)
    run = run.clamp_max(len(ends) - 1)
    index = begins[run] + place - (ends - runs)[run]
    padding = (run % (num_ranks + 1) == num_ranks) | beyond
    return index.masked_fill(padding, -1).int(), sizes.int(), sizes.cumsum(0).int()
