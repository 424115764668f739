"""What all ranks of a token dispatcher agree on: experts, slots, the size of buffers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ArgumentError
from ..kernels.locate_rows import MOST_K
from ..kernels.route_tokens import MOST_SLOTS
from ..kernels.rows import PAYLOADS

LAYOUTS = ("grouped", "batched")
OVERFLOWS = ("raise", "drop")
SAVES = ("lease", "redispatch", "copy")


@dataclass(frozen=True)
class DispatchLayout:
    """Checked, and the same on all ranks. Made by `of`.

    A slot is a physical expert; rank r has slots bounds[r] to below bounds[r + 1]. `slot_of[r][e]` is the slot that
    rank r sends tokens of expert e to; without replicated experts expert e is slot e, and `slot_of` is empty.
    """

    ranks: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    rows: int
    """Of each rank's buffer, a multiple of `align`."""
    expert_capacity: int | None
    align: int
    overflow: str
    batched: bool
    bounds: tuple[int, ...]
    slot_of: tuple[tuple[int, ...], ...]
    save: str

    @classmethod
    def of(
        cls,
        ranks: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype,
        capacity: int | float | None,
        expert_capacity: int | None,
        align: int,
        overflow: str,
        layout: str,
        expert_map: Sequence[Sequence[int]] | None,
        save: str = "lease",
    ) -> DispatchLayout:
        """
        Raises:
            ArgumentError: a number, name or map that is not allowed.
        """
        for name, value, most in (
            ("num_experts", num_experts, MOST_SLOTS),
            ("top_k", top_k, MOST_K),
            ("hidden", hidden, 1 << 24),
            ("align", align, 1 << 16),
        ):
            _check_whole(name, value, 1, most)
        _check_whole("max_tokens", max_tokens, 0, 1 << 24)
        if expert_capacity is not None:
            _check_whole("expert_capacity", expert_capacity, 0, (1 << 31) - 1)
        for name, text, allowed in (
            ("overflow", overflow, OVERFLOWS),
            ("layout", layout, LAYOUTS),
            ("save", save, SAVES),
        ):
            if text not in allowed:
                raise ArgumentError(f"{name}: {text!r}; allowed: {', '.join(map(repr, allowed))}")
        if dtype not in PAYLOADS:
            raise ArgumentError(f"dtype: {dtype}; allowed: torch.float32, torch.bfloat16, torch.float16")
        bounds, slot_of = _slots(ranks, num_experts, expert_map)
        most_slots = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        entries = ranks * max_tokens * top_k
        batched = layout == "batched"
        if batched:
            if capacity is not None:
                raise ArgumentError(f"capacity: {capacity!r}; batched buffers have expert_capacity rows for each slot")
            expert_capacity = _up(entries if expert_capacity is None else expert_capacity, align)
            rows = most_slots * expert_capacity
        elif capacity is None:
            rows = _up(entries + most_slots * (align - 1), align)
            if expert_capacity is not None:
                rows = min(rows, most_slots * _up(expert_capacity, align))
        else:
            rows = _up(_capacity_rows(capacity, max_tokens * top_k), align)
        # Row numbers are int32, before they are limited as well.
        if max(entries + bounds[-1] * align, rows, bounds[-1] * (expert_capacity or 0) * batched) >= 1 << 31:
            raise ArgumentError(
                f"max_tokens: {max_tokens} with top_k {top_k} on {ranks} ranks; allowed: 2**31 rows in all"
            )
        return cls(ranks, num_experts, top_k, hidden, max_tokens, dtype, rows, expert_capacity, align, overflow,
                   batched, bounds, slot_of, save)  # fmt: skip

    @property
    def most_padding(self) -> int:
        """Padding rows that a group has at most."""
        return (self.expert_capacity or 0) if self.batched else self.align - 1

    @property
    def digest(self) -> int:
        """Equal for equal layouts; 55 bits, the last 8 of them zero."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=6).digest(), "big") << 8

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of memory of one rank, at most, by what they are for."""
        row = self.hidden * self.dtype.itemsize
        received = {
            "lease": "rows received, held until backward",
            "copy": "rows received, twice while they are copied, then once until backward",
            "redispatch": "rows received, held until the experts are done, and again during their backward",
        }
        return {
            received[self.save]: self.rows * (row + 4),
            "expert output that peers read, during combine": self.rows * row,
            "gradients received, in the backward of combine": self.rows * (row + 4),
            "routing of one dispatch": self.max_tokens * self.top_k * 16 + self.ranks * (self.bounds[-1] + 1) * 8,
        }


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(f"{name}: {value!r}; allowed: a whole number, {least} to {most}")


def _up(number: int, align: int) -> int:
    return -(-number // align) * align


def _capacity_rows(capacity: int | float, share: int) -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, int | float) or capacity < 0:
        raise ArgumentError(f"capacity: {capacity!r}; allowed: rows (int) or a factor of max_tokens * top_k (float)")
    if isinstance(capacity, int):
        return capacity
    if not math.isfinite(capacity):
        raise ArgumentError(f"capacity: {capacity!r}; allowed: a finite factor")
    return math.ceil(capacity * share)


def _slots(
    ranks: int, num_experts: int, expert_map: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Bounds, and each rank's slot of each expert: its own copy, else of all copies the one that its number picks."""
    if expert_map is None:
        # The first ranks have one more where they do not divide.
        each, more = divmod(num_experts, ranks)
        return tuple(r * each + min(r, more) for r in range(ranks + 1)), ()
    if len(expert_map) != ranks:
        raise ArgumentError(f"expert_map: lists for {len(expert_map)} ranks; allowed: one for each of {ranks}")
    held = [(rank, int(expert)) for rank, experts in enumerate(expert_map) for expert in experts]
    copies: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, (rank, expert) in enumerate(held):
        if not 0 <= expert < num_experts:
            raise ArgumentError(f"expert_map[{rank}]: expert {expert}; allowed: 0 to {num_experts - 1}")
        copies[expert].append(slot)
    missing = [expert for expert, slots in enumerate(copies) if not slots]
    if missing:
        raise ArgumentError(f"expert_map: no rank has experts {missing}; allowed: each on one rank at least")
    if len(held) > MOST_SLOTS:
        raise ArgumentError(f"expert_map: {len(held)} slots; allowed: {MOST_SLOTS}")
    bounds = [0]
    for experts in expert_map:
        bounds.append(bounds[-1] + len(experts))
    table = []
    for rank in range(ranks):
        own = {expert: slot for slot, (r, expert) in reversed(list(enumerate(held))) if r == rank}
        table.append(tuple(own.get(e, slots[rank % len(slots)]) for e, slots in enumerate(copies)))
    return tuple(bounds), tuple(table)
