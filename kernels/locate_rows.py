"""locate_rows: each token's rows in the order in which they are summed, owners ascending and k within an owner."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .entries import keep_entries
from .group_rows import Groups, Slots
from .pointers import on_device, runs_on
from .rows import TokenRows, cdiv, power_of_two

MOST_K = 32


@triton.jit(do_not_specialize=["tokens", "owners"])
def locate_rows_kernel(
    slot_in,  # int32 [tokens, K]
    place_in,  # int32 [tokens, K]
    start_in,  # int32 [slots]
    limit_in,  # int32 [slots]
    owner_in,  # int32 [slots]
    key_out,  # int32 [tokens, K]
    row_out,  # int32 [tokens, K]
    tokens,
    owners,
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    TOKENS: tl.constexpr,
):
    """Program i orders the entries of TOKENS tokens, by counting for each how many come before it."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, KP)
    inside = (t < tokens)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    slot = tl.load(slot_in + at, mask=inside, other=-1)
    place = tl.load(place_in + at, mask=inside, other=-1)
    known = slot >= 0
    kept = known & (place < tl.load(limit_in + slot, mask=known, other=0))
    row = tl.where(kept, tl.load(start_in + slot, mask=known, other=0) + place, -1)
    owner = tl.where(kept, tl.load(owner_in + slot, mask=known, other=0), owners)
    key = owner * K + k[None, :]
    # Lanes beyond K have the largest keys of all: they come before none.
    key = tl.where((k < K)[None, :], key, (owners + 1) * K + k[None, :])
    order = tl.sum((key[:, None, :] < key[:, :, None]).to(tl.int32), 2)
    to = t[:, None] * K + order
    tl.store(key_out + to, key, mask=inside)
    tl.store(row_out + to, row, mask=inside)


def locate_rows(slot: torch.Tensor, place: torch.Tensor, groups: Groups, slots: Slots) -> TokenRows:
    """Each entry's row in its owner's buffer.

    Args:
        slot, place: int32 [T, K], contiguous, of route_tokens; K up to 32.
        groups: of group_rows on this rank; `start` and `limit` are used.

    Raises:
        ArgumentError: K is too large.
    """
    tokens, k = slot.shape
    owners = len(slots.bounds) - 1
    if k > MOST_K or (owners + 2) * MOST_K >= 1 << 31:
        raise ArgumentError(f"top_k: {k}; allowed: 0 to {MOST_K}")
    if not runs_on(slot.device):
        return locate_rows_reference(slot, place, groups, slots)
    rows = TokenRows(torch.empty_like(slot), torch.empty_like(slot))
    if slot.numel():
        width = power_of_two(k)
        block = tokens_at_a_time(width)
        with on_device(slot.device):
            locate_rows_kernel[(cdiv(tokens, block),)](
                slot, place, groups.start, groups.limit, slots.owner, *rows, tokens, owners,
                K=k, KP=width, TOKENS=block, num_warps=4,
            )  # fmt: skip
    return rows


def tokens_at_a_time(width: int) -> int:
    """Of locate_rows_kernel: 2,048 comparisons, 16 a thread."""
    return max(1, min(128, 2048 // (width * width)))


def locate_rows_reference(slot: torch.Tensor, place: torch.Tensor, groups: Groups, slots: Slots) -> TokenRows:
    """The same in torch operations."""
    k, owners = slot.shape[1], len(slots.bounds) - 1
    known, at = slot >= 0, slot.clamp(min=0).long()
    kept = known & (place < groups.limit[at])
    row = torch.where(kept, groups.start[at] + place, -1)
    owner = torch.where(kept, slots.owner[at], owners)
    key, order = torch.sort(owner * k + torch.arange(k, dtype=torch.int32, device=slot.device), dim=1)
    rows = TokenRows(key, row.gather(1, order))
    keep_entries(rows, owners)
    return rows
