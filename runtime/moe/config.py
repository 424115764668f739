"""What all ranks of a token dispatcher agree on: experts, slots, the size of buffers."""

from __future__ import annotations

import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch

from ...errors import ArgumentError, shown
from ...kernels import MOST_K, MOST_SLOTS, PAYLOADS, uploaded
from ...planner import SPLITS
from ..environment import requested_poison

Function = TypeVar("Function", bound=Callable[..., Any])


class DispatchSettings(TypedDict, total=False):
    """What ranks of a token dispatcher agree on, as callers say it; defaults are those of `DispatchLayout.of`."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    capacity: int | float | None
    expert_capacity: int | None
    align: int
    overflow: str
    layout: str
    expert_map: Sequence[Sequence[int]] | None
    save: str
    leases: int
    slab_capacity: int | float | None
    splits: str | None
    zero_rows: bool | None


LAYOUTS = ("grouped", "batched")
OVERFLOWS = ("raise", "drop")
SAVES = ("lease", "redispatch", "copy")
MOST_LEASES = 1 << 10
MOST_RANKS = 1 << 20
ZERO_ROWS_UP_TO = 1.5
"""Times max_tokens * top_k rows: the `capacity` up to which rows that hold no token are zero by default."""


@dataclass(frozen=True)
class DispatchLayout:
    """Checked, and the same on all ranks. Made by `of`.

    A slot is a physical expert; rank r has slots bounds[r] to below bounds[r + 1]. `slot_of[r][e]` is the slot that
    rank r sends tokens of expert e to, `expert_of[s]` the expert of slot s; where no map was given expert e is slot e,
    and both are empty.
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
    expert_of: tuple[int, ...]
    save: str
    leases: int
    """Dispatches whose rows may stay where peers wrote them, of ranks that meet on the device."""
    slab_capacity: int | None
    """Rows of a rank for another, where they travel in slabs of one size."""
    zero_rows: bool | None
    """Whether rows from `num_rows` on are zero; None: there are none that anyone sees, as in batched buffers."""

    @classmethod
    def of(
        cls,
        ranks: int,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity: int | float | None = None,
        expert_capacity: int | None = None,
        align: int = 1,
        overflow: str = "raise",
        layout: str = "grouped",
        expert_map: Sequence[Sequence[int]] | None = None,
        save: str = "lease",
        leases: int = 1,
        slab_capacity: int | float | None = None,
        splits: str | None = None,
        zero_rows: bool | None = None,
    ) -> DispatchLayout:
        """
        Raises:
            ArgumentError: a number, name or map that is not allowed.
        """
        ranks = _whole("ranks", ranks, 1, MOST_RANKS)
        num_experts = _whole("num_experts", num_experts, 1, MOST_SLOTS)
        top_k = _whole("top_k", top_k, 1, MOST_K)
        hidden = _whole("hidden", hidden, 1, 1 << 24)
        align = _whole("align", align, 1, 1 << 16)
        leases = _whole("leases", leases, 0, MOST_LEASES)
        max_tokens = _whole("max_tokens", max_tokens, 0, 1 << 24)
        if expert_capacity is not None:
            expert_capacity = _whole("expert_capacity", expert_capacity, 0, (1 << 31) - 1)
        for name, text, allowed in (
            ("overflow", overflow, OVERFLOWS),
            ("layout", layout, LAYOUTS),
            ("save", save, SAVES),
            ("splits", splits, (None, *SPLITS)),
        ):
            if text not in allowed:
                raise ArgumentError(f"{name}: {text!r}; allowed: {', '.join(map(repr, allowed))}")
        if dtype not in PAYLOADS:
            raise ArgumentError(f"dtype: {dtype}; allowed: torch.float32, torch.bfloat16, torch.float16")
        if not (zero_rows is None or isinstance(zero_rows, bool)):
            raise ArgumentError(f"zero_rows: {zero_rows!r}; allowed: True, False, None")
        bounds, slot_of, expert_of = _slots(ranks, num_experts, expert_map)
        most_slots = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        entries = ranks * max_tokens * top_k
        batched = layout == "batched"
        if batched:
            if capacity is not None:
                raise ArgumentError(f"capacity: {capacity!r}; batched buffers have expert_capacity rows for each slot")
            expert_capacity = up(entries if expert_capacity is None else expert_capacity, align)
            rows = most_slots * expert_capacity
        elif capacity is None:
            rows = up(entries + most_slots * (align - 1), align)
            if expert_capacity is not None:
                rows = min(rows, most_slots * up(expert_capacity, align))
        else:
            rows = up(_capacity_rows("capacity", capacity, max_tokens * top_k), align)
        if splits == "host" and slab_capacity is not None:
            raise ArgumentError(
                f"slab_capacity: {slab_capacity!r} with splits='host'; allowed: None, slabs of exact size"
            )
        if splits == "slabs" and slab_capacity is None:
            slab_capacity = max_tokens * top_k
        if slab_capacity is not None:
            share = max_tokens * top_k / ranks
            slab_capacity = min(_capacity_rows("slab_capacity", slab_capacity, share), max_tokens * top_k)
        if batched:
            zero_rows = None
        elif zero_rows is None:
            # Not by the number of ranks: experts that work by all rows would get NaN once there are more of them.
            zero_rows = capacity is not None and rows <= up(math.ceil(ZERO_ROWS_UP_TO * max_tokens * top_k), align)
        # Row numbers are int32, before they are limited as well.
        if (
            max(
                entries + bounds[-1] * align,
                rows,
                bounds[-1] * (expert_capacity or 0) * batched,
                ranks * (slab_capacity or 0),
            )
            >= 1 << 31
        ):
            raise ArgumentError(
                f"max_tokens: {max_tokens} with top_k {top_k} on {ranks} ranks; allowed: 2**31 rows in all"
            )
        return cls(ranks, num_experts, top_k, hidden, max_tokens, dtype, rows, expert_capacity, align, overflow,
                   batched, bounds, slot_of, expert_of, save, leases, slab_capacity, zero_rows)  # fmt: skip

    @property
    def most_padding(self) -> int:
        """Padding rows that a group has at most."""
        return (self.expert_capacity or 0) if self.batched else self.align - 1

    def experts_on(self, device: torch.device) -> torch.Tensor | None:
        """`expert_of` as int64 [S] on a device, uploaded once; None where it is empty."""
        if not self.expert_of:
            return None
        if device not in self._experts:
            with torch.inference_mode(False):
                self._experts[device] = uploaded(np.array(self.expert_of, np.int64), device)
        return self._experts[device]

    @cached_property
    def _experts(self) -> dict[torch.device, torch.Tensor]:
        return {}

    @cached_property
    def _digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=6).digest(), "big")

    def token(self, number: int) -> int:
        """Of the group's dispatcher of this number: equal for equal layouts and numbers; 56 bits, the last 8 zero."""
        return (self._digest + number) % (1 << 48) << 8


def fill_of(zero_rows: bool | None) -> float | None:
    """What a buffer's rows from `num_rows` on are filled with, as `DispatchLayout.zero_rows` and the environment say;
    None: they keep what they have.

    Raises:
        ArgumentError: as of `requested_poison`.
    """
    if zero_rows is None:
        return None
    return 0.0 if zero_rows else math.nan if requested_poison() else None


def _whole(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int; numpy's whole numbers are some."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = least - 1
    if isinstance(value, bool | torch.Tensor) or not least <= found <= most:
        raise ArgumentError(f"{name}: {shown(value)}; allowed: a whole number, {least} to {most}")
    return found


def up(number: int, align: int) -> int:
    """The least multiple of `align` that is not below `number`."""
    return -(-number // align) * align


def _capacity_rows(name: str, capacity: int | float, share: float) -> int:
    if not isinstance(capacity, float):
        return _whole(name, capacity, 0, (1 << 31) - 1)
    if not 0 <= capacity < math.inf:
        of = "max_tokens * top_k" if name == "capacity" else "max_tokens * top_k / ranks"
        raise ArgumentError(f"{name}: {capacity!r}; allowed: rows (int) or a factor of {of} (float)")
    return math.ceil(capacity * share)


def _slots(
    ranks: int, num_experts: int, expert_map: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Bounds; each rank's slot of each expert: its own copy, else of all copies the one that its number picks; and each
    slot's expert."""
    if expert_map is None:
        # The first ranks have one more where they do not divide.
        each, more = divmod(num_experts, ranks)
        return tuple(r * each + min(r, more) for r in range(ranks + 1)), (), ()
    if len(expert_map) != ranks:
        raise ArgumentError(f"expert_map: lists for {len(expert_map)} ranks; allowed: one for each of {ranks}")
    held = [
        (rank, _whole(f"expert_map[{rank}]", expert, 0, num_experts - 1))
        for rank, experts in enumerate(expert_map)
        for expert in experts
    ]
    copies: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, (_, expert) in enumerate(held):
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
    return tuple(bounds), tuple(table), tuple(expert for _, expert in held)


def spelled_out(*without: str) -> Callable[[Function], Function]:
    """Has a function's signature name each of its `**settings`, with the default, as `help` and references show it, and
    as calls are held to."""

    def spell(function: Function) -> Function:
        signature = inspect.signature(function)
        *named, settings = signature.parameters.values()
        assert settings.kind is settings.VAR_KEYWORD, f"{function.__name__}: its last parameter is {settings}"
        taken = [p for p in inspect.signature(DispatchLayout.of).parameters.values() if p.kind is p.KEYWORD_ONLY]
        taken = [p for p in taken if p.name not in without]
        first = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        parameters = [*first, *taken, *named[len(first) :]]
        spelled = signature.replace(parameters=parameters)

        @wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            spelled.bind(*args, **given)
            return function(*args, **given)

        called.__signature__ = spelled  # type: ignore[attr-defined]
        return called  # type: ignore[return-value]

    return spell
