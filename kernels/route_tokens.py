"""route_tokens: from each token's expert ids to how many rows every slot gets, and each row's place among them.

A slot is a physical expert. Its place is stable: entries of one slot are numbered in the order of (token, k). The
first launch counts each block's slots by a histogram; in the second every block adds up what the blocks before it have,
and ranks its own ids by comparing them pairwise in chunks, which costs the same for any number of slots. Up to 1,024
ids, as in decoding, one program does all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .pointers import on_device, runs_on
from .rows import cdiv, power_of_two

BLOCK = tl.constexpr(256)  # ids ranked at a time
CHUNK = tl.constexpr(32)  # ids that they are compared with at a time
FEW_CHUNK = tl.constexpr(16)  # likewise, where one program has all ids
MOST_BLOCKS = 128  # beyond, each block ranks several times BLOCK: every block reads the counts of those before it
MOST_SINGLE = 1024  # ids of one program
MOST_SLOTS = 2048


class Routed(NamedTuple):
    """What route_tokens returns."""

    slot: torch.Tensor
    """int32 [T, K]: the slot of each entry, -1 for none."""
    place: torch.Tensor
    """int32 [T, K]: how many earlier entries have the same slot; -1 for none."""
    counts: torch.Tensor
    """int32 [S + 1]: entries of each slot; the last is the number of bad ids."""


@triton.jit
def slots_of(ids, slot_table, index, inside, experts, HAS_TABLE: tl.constexpr):
    """The slots of the ids at `index`, -1 for none, and whether an id is bad."""
    expert = tl.load(ids + index, mask=inside, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < experts)
    bad = inside & ~valid & (expert != -1)
    if HAS_TABLE:
        slot = tl.load(slot_table + expert, mask=valid, other=-1)
    else:
        slot = tl.where(valid, expert, -1).to(tl.int32)
    return slot, bad


@triton.jit(do_not_specialize=["entries", "experts", "slots", "rounds"])
def count_slots_kernel(
    ids,  # [entries]
    slot_table,  # int32 [experts]
    slot_out,  # int32 [entries]
    block_counts,  # int32 [blocks, SLOTS]
    block_bad,  # int32 [blocks]
    entries,
    experts,
    rounds,  # times BLOCK that a program counts
    SLOTS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Program i writes the slots of block i and counts them."""
    block = tl.program_id(0)
    counts = tl.zeros([SLOTS], tl.int32)
    bad_ids = tl.zeros([BLOCK], tl.int32)
    for i in range(rounds):
        index = (block * rounds + i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < entries
        slot, bad = slots_of(ids, slot_table, index, inside, experts, HAS_TABLE)
        tl.store(slot_out + index, slot, mask=inside)
        counts += tl.histogram(tl.where(slot >= 0, slot, 0), SLOTS, mask=slot >= 0)
        bad_ids += bad.to(tl.int32)
    tl.store(block_counts + block * SLOTS + tl.arange(0, SLOTS), counts)
    tl.store(block_bad + block, tl.sum(bad_ids, 0))


@triton.jit(do_not_specialize=["entries", "slots", "rounds", "blocks"])
def place_rows_kernel(
    slot_in,  # int32 [entries]
    place_out,  # int32 [entries]
    block_counts,  # int32 [blocks, SLOTS]
    block_bad,  # int32 [blocks]
    counts_out,  # int32 [slots + 1]
    entries,
    slots,
    rounds,
    blocks,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two, no less than blocks
    ROWS: tl.constexpr,  # of block_counts added up at a time
):
    """Program i places the entries of block i; the last one also writes the totals."""
    block = tl.program_id(0)
    s = tl.arange(0, SLOTS)
    before = tl.zeros([SLOTS], tl.int32)
    for first in range(0, block, ROWS):
        r = first + tl.arange(0, ROWS)[:, None]
        before += tl.sum(tl.load(block_counts + r * SLOTS + s[None, :], mask=r < block, other=0), 0)
    for i in range(rounds):
        start = (block * rounds + i).to(tl.int64) * BLOCK
        p = tl.arange(0, BLOCK)
        slot = tl.load(slot_in + start + p, mask=start + p < entries, other=-1)
        place = tl.gather(before, tl.where(slot >= 0, slot, 0), 0)
        for chunk in range(0, BLOCK, CHUNK):
            q = chunk + tl.arange(0, CHUNK)
            other = tl.load(slot_in + start + q, mask=start + q < entries, other=-1)
            place += tl.sum(((slot[:, None] == other[None, :]) & (q[None, :] < p[:, None])).to(tl.int32), 1)
        tl.store(place_out + start + p, tl.where(slot >= 0, place, -1), mask=start + p < entries)
        before += tl.histogram(tl.where(slot >= 0, slot, 0), SLOTS, mask=slot >= 0)
    if block == blocks - 1:
        tl.store(counts_out + s, before, mask=s < slots)
        b = tl.arange(0, BLOCKS)
        tl.store(counts_out + slots, tl.sum(tl.load(block_bad + b, mask=b < blocks, other=0), 0))


@triton.jit(do_not_specialize=["entries", "experts", "slots"])
def route_few_kernel(
    ids,  # [entries]
    slot_table,  # int32 [experts]
    slot_out,  # int32 [entries]
    place_out,  # int32 [entries]
    counts_out,  # int32 [slots + 1]
    entries,
    experts,
    slots,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,  # a power of two, no less than entries
    HAS_TABLE: tl.constexpr,
):
    """One program does it all."""
    p = tl.arange(0, ENTRIES)
    slot, bad = slots_of(ids, slot_table, p, p < entries, experts, HAS_TABLE)
    place = tl.zeros([ENTRIES], tl.int32)
    # The ids are read and looked up again: slots that this program wrote are not yet seen by all of its threads.
    for chunk in range(0, ENTRIES, FEW_CHUNK):
        q = chunk + tl.arange(0, FEW_CHUNK)
        other, _ = slots_of(ids, slot_table, q, q < entries, experts, HAS_TABLE)
        place += tl.sum(((slot[:, None] == other[None, :]) & (q[None, :] < p[:, None])).to(tl.int32), 1)
    tl.store(slot_out + p, slot, mask=p < entries)
    tl.store(place_out + p, tl.where(slot >= 0, place, -1), mask=p < entries)
    counts = tl.histogram(tl.where(slot >= 0, slot, 0), SLOTS, mask=slot >= 0)
    s = tl.arange(0, SLOTS)
    tl.store(counts_out + s, counts, mask=s < slots)
    tl.store(counts_out + slots, tl.sum(bad.to(tl.int32), 0))


def route_tokens(
    ids: torch.Tensor, num_experts: int, slot_of: torch.Tensor | None = None, num_slots: int | None = None
) -> Routed:
    """Count and place the entries of this rank's tokens.

    Args:
        ids: int32 or int64 [T, K], the experts of each token; -1 is none. T may be 0; an expert may come twice.
        num_experts: ids from 0 to one below it are good; others but -1 are bad: they act as -1 and are counted.
        slot_of: int32 [num_experts], the slot of each expert, where experts are replicated; default: expert e is
            slot e.
        num_slots: S; with `slot_of` only.

    Raises:
        ArgumentError: a shape, dtype or number that is not allowed.
    """
    slots = num_experts if num_slots is None else num_slots
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"ids: {ids.dtype} of shape {tuple(ids.shape)}; allowed: int32 or int64 of shape [T, K]")
    if not 1 <= slots <= MOST_SLOTS:
        raise ArgumentError(f"num_slots: {slots}; allowed: 1 to {MOST_SLOTS}")
    if slot_of is None and slots != num_experts:
        raise ArgumentError(f"num_slots: {slots}; without slot_of allowed: num_experts, {num_experts}")
    if slot_of is not None and (slot_of.shape != (num_experts,) or slot_of.dtype is not torch.int32):
        raise ArgumentError(
            f"slot_of: {slot_of.dtype} of shape {tuple(slot_of.shape)}; allowed: int32 of shape ({num_experts},)"
        )
    if ids.numel() >= 1 << 31:
        raise ArgumentError(f"ids: {ids.numel()} of them; allowed: below 2**31")
    if not runs_on(ids.device):
        return route_tokens_reference(ids, num_experts, slot_of, slots)
    ids, entries = ids.contiguous(), ids.numel()
    slot = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    place = torch.empty_like(slot)
    counts = torch.empty(slots + 1, dtype=torch.int32, device=ids.device)
    table, has_table = (slot, False) if slot_of is None else (slot_of, True)
    padded = max(32, power_of_two(slots))
    if entries <= MOST_SINGLE:
        width = max(CHUNK.value, power_of_two(entries))
        with on_device(ids.device):
            route_few_kernel[(1,)](
                ids, table, slot, place, counts, entries, num_experts, slots,
                SLOTS=padded, ENTRIES=width, HAS_TABLE=has_table, num_warps=few_warps(width),
            )  # fmt: skip
        return Routed(slot, place, counts)
    rounds = cdiv(entries, BLOCK.value * MOST_BLOCKS)
    blocks = cdiv(entries, BLOCK.value * rounds)
    # The bad ids of each block are kept behind the counts of all of them.
    scratch = torch.empty(blocks * (padded + 1), dtype=torch.int32, device=ids.device)
    bad = scratch[blocks * padded :]
    with on_device(ids.device):
        count_slots_kernel[(blocks,)](
            ids, table, slot, scratch, bad, entries, num_experts, rounds,
            SLOTS=padded, HAS_TABLE=has_table, num_warps=4,
        )  # fmt: skip
        place_rows_kernel[(blocks,)](
            slot, place, scratch, bad, counts, entries, slots, rounds, blocks,
            SLOTS=padded, BLOCKS=power_of_two(blocks), ROWS=count_rows(padded), num_warps=8,
        )  # fmt: skip
    return Routed(slot, place, counts)


def few_warps(entries: int) -> int:
    """Of route_few_kernel: a chunk's comparisons take 32 registers of each thread."""
    return max(1, min(16, entries // 64))


def count_rows(padded_slots: int) -> int:
    """Rows of counts that place_rows_kernel adds up at a time: 32 registers a thread."""
    return max(1, 8192 // padded_slots)


def route_tokens_reference(ids: torch.Tensor, num_experts: int, slot_of: torch.Tensor | None, num_slots: int) -> Routed:
    """The same in torch operations."""
    flat = ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    slot = torch.where(valid, flat, -1)
    if slot_of is not None:
        slot = torch.where(valid, slot_of.long()[slot.clamp(min=0)], -1)
    # None is a slot of its own, which comes first; a stable sort numbers the entries of each.
    per_slot = torch.bincount(slot + 1, minlength=num_slots + 1)
    order = torch.argsort(slot, stable=True)
    first = per_slot.cumsum(0) - per_slot
    place = torch.empty_like(slot)
    place[order] = torch.arange(len(flat), device=flat.device) - first[slot[order] + 1]
    place[slot < 0] = -1
    counts = torch.empty(num_slots + 1, dtype=torch.int32, device=ids.device)
    counts[:-1] = per_slot[1:]
    counts[-1] = (~valid & (flat != -1)).sum()
    return Routed(slot.int().view(ids.shape), place.int().view(ids.shape), counts)
