"""DispatchConfig: the settings of a token dispatcher, validated, and the buffer sizes that follow from them."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, cast, get_args

import numpy as np
import torch

from ...errors import ArgumentError, shown
from ...kernels import (
    BLOCK_ROWS,
    MOST_K,
    MOST_PHYSICAL_EXPERTS,
    PAYLOADS,
    QUANTIZATIONS,
    QuantizedRows,
    block_rows,
    block_width,
    column_words,
    uploaded,
)
from ..environment import requested_poison
from .node_ranks import NodeRanks, numbered
from .options import DispatchOptions, OverflowPolicy, RowsLayout, SavedRows, ScaleLayout, check_options
from .packed_rows import PackedRows, packed_rows

MOST_POOLED_BUFFERS = 1 << 10
MOST_RANKS = 1 << 20
MOST_ROWS = (1 << 31) - 1
ZERO_ROWS_UP_TO = 1.5
"""The largest `capacity`, as a factor of max_tokens * top_k, up to which unused rows are zeroed by default."""


@dataclass(frozen=True)
class DispatchConfig(DispatchOptions):
    """The settings of a token dispatcher, equal on all of its ranks: its options, and what `TokenDispatcher` takes
    beside them.

    The constructor validates the settings and replaces defaults by the values that they stand for. Rank r has the
    physical experts bounds[r] to bounds[r + 1] (exclusive).

    Raises:
        ArgumentError: a number, name or map that is not allowed.
    """

    ranks: int
    nodes: Sequence[Hashable] | None = None
    """The node of each rank, numbered from 0 in order of their first ranks; None: all share one. It decides the order
    of sums."""
    active_ranks: Sequence[int] | None = None
    """Ascending; None: all. Other ranks take no part, and no tokens are sent to their experts."""
    _: KW_ONLY
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16

    packed: PackedRows | None = field(init=False, compare=False)
    """Where payloads lie in a row of dispatch; None: rows are those of x."""
    quantized: QuantizedRows | None = field(init=False, compare=False)
    """How dispatch quantizes rows."""
    packed_output: PackedRows | None = field(init=False, compare=False)
    """Where payloads lie in a row of combine, with quantize_output; None: rows are those of the experts' output."""
    quantized_output: QuantizedRows | None = field(init=False, compare=False)
    """How combine quantizes rows."""
    dispatched: tuple[int, torch.dtype] = field(init=False, compare=False)
    """The elements of a row as dispatch sends it, and their dtype."""
    rows: int = field(init=False)
    """Rows of each rank's buffer, a multiple of `align`."""
    bounds: tuple[int, ...] = field(init=False)
    physical_expert_of: tuple[tuple[int, ...], ...] = field(init=False)
    """[rank][expert]: the physical expert to which a rank sends an expert's tokens; empty if expert e is physical
    expert e."""
    expert_of: tuple[int, ...] = field(init=False)
    """The expert of each physical expert; empty likewise."""

    @classmethod
    def of(
        cls, ranks: int, nodes: Sequence[Hashable] | None = None, *, options: DispatchOptions, **model: Any
    ) -> DispatchConfig:
        """Return the config of these options and the settings that describe the model.

        Raises:
            ArgumentError: a number, name or map that is not allowed.
        """
        check_options(options)
        return cls(ranks, nodes, **model, **vars(options))

    def __post_init__(self) -> None:
        for name, least, most in (
            ("ranks", 1, MOST_RANKS),
            ("num_experts", 1, MOST_PHYSICAL_EXPERTS),
            ("top_k", 1, MOST_K),
            ("hidden", 1, 1 << 24),
            ("align", 1, 1 << 16),
            ("pooled_buffers", 0, MOST_POOLED_BUFFERS),
            ("max_tokens", 0, 1 << 24),
            ("expert_capacity", 0, MOST_ROWS),
        ):
            value = getattr(self, name)
            if name != "expert_capacity" or value is not None:
                self._set(**{name: whole_number(name, value, least, most)})
        for name, allowed in (
            ("overflow", get_args(OverflowPolicy)),
            ("layout", get_args(RowsLayout)),
            ("save", get_args(SavedRows)),
            ("scale_layout", (None, *get_args(ScaleLayout))),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name}: {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}")
        if self.dtype not in PAYLOADS:
            raise ArgumentError(f"dtype: {shown(self.dtype)}; allowed: torch.float32, torch.bfloat16, torch.float16")
        for name in ("zero_rows", "two_level", "dedupe"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise ArgumentError(f"{name}: {value!r}; allowed: True, False, None")
        self._set_packed()
        self._set_nodes()
        self._set_active_ranks()
        if self.expert_map is not None:
            self._set(expert_map=_listed(self.expert_map))
        bounds, physical_expert_of, expert_of = _place_experts(
            self.ranks, self.num_experts, self.expert_map, self.active_ranks
        )
        self._set(bounds=bounds, physical_expert_of=physical_expert_of, expert_of=expert_of)
        if self.expert_map is not None:
            self._set(expert_map=tuple(tuple(map(int, experts)) for experts in self.expert_map))
        self._set_rows()
        self._set_chunk_capacity()
        # Row numbers are int32, also before they are limited by a capacity.
        numbered = (
            self.ranks * self.most_pairs + bounds[-1] * self.align,
            self.rows,
            bounds[-1] * (self.expert_capacity or 0) * self.batched,
            # On two levels a rank sends the rows of others to its node, at most those of twice as many ranks.
            self.ranks * (self.chunk_rows or 0) * (2 if self.two_level and self.nodes is not None else 1),
        )
        if max(numbered) > MOST_ROWS:
            raise ArgumentError(
                f"max_tokens: {self.max_tokens} with top_k {self.top_k} on {self.ranks} ranks; allowed: fewer than "
                "2**31 rows in all"
            )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_packed(self) -> None:
        packed = packed_rows("quantize", self.quantize, self.hidden, self.payloads)
        output = packed_rows("quantize_output", self.quantize_output, self.hidden)
        quantized, quantized_output = (
            QuantizedRows(QUANTIZATIONS[quantize], rows.begins[1])
            if rows is not None and quantize is not None
            else None
            for rows, quantize in ((packed, self.quantize), (output, self.quantize_output))
        )
        self._set(packed_output=output, quantized=quantized, quantized_output=quantized_output)
        if packed is not None and self.save == "redispatch":
            raise ArgumentError("save: 'redispatch' with payloads or quantize; allowed: 'buffer', 'copy'")
        if packed is not None and self.payloads is not None:
            self._set(payloads=tuple(zip(packed.dtypes, packed.shapes, strict=True)))
        dispatched = (self.hidden, self.dtype) if packed is None else (packed.words, torch.int32)
        self._set(packed=packed, dispatched=dispatched)
        if self.scale_layout is not None and not (packed is not None and packed.has_byte_scales):
            raise ArgumentError(
                f"scale_layout: {self.scale_layout!r} with rows of {packed or 'one tensor'}; allowed: None, with "
                "quantize='mxfp8', or with payloads of which the second is a vector of elements of one byte"
            )

    def _set_nodes(self) -> None:
        if self.nodes is None:
            return
        if not isinstance(self.nodes, Sequence) or not all(isinstance(node, Hashable) for node in self.nodes):
            raise ArgumentError(f"nodes: {shown(self.nodes)}; allowed: the node of each rank, such as [0, 0, 1, 1]")
        if len(self.nodes) != self.ranks:
            raise ArgumentError(f"nodes: of {len(self.nodes)} ranks; allowed: one for each of {self.ranks}")
        self._set(nodes=numbered(self.nodes))

    def _set_active_ranks(self) -> None:
        active = self.active_ranks
        if active is None:
            return
        if not isinstance(active, Sequence) or not active:
            raise ArgumentError(f"active_ranks: {shown(active)}; allowed: a list of at least one rank, or None for all")
        numbers = sorted({whole_number("active_ranks", rank, 0, self.ranks - 1) for rank in active})
        if len(numbers) < len(active):
            raise ArgumentError(f"active_ranks: {shown(active)}; allowed: each rank once")
        self._set(active_ranks=tuple(numbers) if len(numbers) < self.ranks else None)

    def _set_rows(self) -> None:
        """Set `rows`, `expert_capacity` and `zero_rows`."""
        on_one_rank = max(self.experts_per_rank)
        pairs, capacity = self.ranks * self.most_pairs, self.capacity
        if self.batched:
            if capacity is not None:
                raise ArgumentError(
                    f"capacity: {capacity!r}; allowed with layout='batched': None, since buffers have expert_capacity "
                    "rows for each physical expert"
                )
            each = round_up(pairs if self.expert_capacity is None else self.expert_capacity, self.align)
            self._set(expert_capacity=each, rows=on_one_rank * each, zero_rows=None)
            return
        if capacity is None:
            rows = round_up(pairs + on_one_rank * (self.align - 1), self.align)
            if self.expert_capacity is not None:
                rows = min(rows, on_one_rank * round_up(self.expert_capacity, self.align))
        else:
            rows = round_up(_capacity_rows("capacity", capacity, self.most_pairs), self.align)
            self._set(capacity=capacity if isinstance(capacity, float) else int(capacity))
        zero_rows = self.zero_rows
        if zero_rows is None:
            # Independent of the number of ranks: otherwise experts that process all rows would see NaN on more ranks.
            limit = round_up(math.ceil(ZERO_ROWS_UP_TO * self.most_pairs), self.align)
            zero_rows = capacity is not None and rows <= limit
        self._set(rows=rows, zero_rows=zero_rows)

    def _set_chunk_capacity(self) -> None:
        if self.chunk_capacity is not None:
            rows = _capacity_rows("chunk_capacity", self.chunk_capacity, self.most_pairs / self.ranks)
            self._set(chunk_capacity=min(rows, self.most_pairs))

    @property
    def batched(self) -> bool:
        return self.layout == "batched"

    @property
    def dispatched_nbytes(self) -> int:
        """The bytes of a row as dispatch sends it."""
        elements, dtype = self.dispatched
        return elements * dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """The mean of the bytes of a row as dispatch and combine send it."""
        return (self.dispatched_nbytes + self.combined_nbytes) // 2

    def blocked_scales(self, rank: int) -> tuple[int, int] | None:
        """Return the shape of a rank's `routed.scale` in blocks, of groups one after another; None: it is not."""
        if self.scale_layout is None or self.packed is None:
            return None
        own = self.bounds[rank + 1] - self.bounds[rank]
        if self.batched:
            rows = own * round_up(self.expert_capacity or 0, BLOCK_ROWS)
        else:
            rows = block_rows(self.rows, own, self.align)
        return rows, block_width(self.packed.sizes[1])

    def scale_words(self, rank: int, device: torch.device) -> torch.Tensor | None:
        """Return one element, expanded to the shape of `DispatchRecord.scale`; None: rows have no scales."""
        if self.packed is None or len(self.packed.sizes) < 2 or not self.packed.sizes[1]:
            return None
        blocked = self.blocked_scales(rank)
        if blocked is not None:
            return torch.empty(1, dtype=torch.int32, device=device).expand(blocked[0], blocked[1] // 4)
        number, dtype = column_words(self.packed.sizes[1])
        return torch.empty(1, dtype=dtype, device=device).expand(self.rows, number)

    @property
    def combined_nbytes(self) -> int:
        """The bytes of a row as combine sends it."""
        return self.hidden * self.dtype.itemsize if self.packed_output is None else self.packed_output.nbytes

    @property
    def most_pairs(self) -> int:
        """The maximum number of (token, k) pairs of a rank."""
        return self.max_tokens * self.top_k

    @property
    def most_padding(self) -> int:
        """The maximum number of padding rows of a group."""
        return (self.expert_capacity or 0) if self.batched else self.align - 1

    @cached_property
    def experts_per_rank(self) -> tuple[int, ...]:
        """The number of physical experts of each rank."""
        return tuple(high - low for low, high in pairwise(self.bounds))

    @cached_property
    def node_ranks(self) -> NodeRanks | None:
        """The ranks of each node; None if all share one."""
        return None if self.nodes is None else NodeRanks(cast("Sequence[int]", self.nodes))

    @property
    def chunk_rows(self) -> int | None:
        """Rows of a chunk of fixed size; None: chunks are of exact size."""
        return None if self.chunk_capacity is None else int(self.chunk_capacity)

    def is_active(self, rank: int) -> bool:
        return self.active_ranks is None or rank in self.active_ranks

    @cached_property
    def masked_experts(self) -> tuple[int, ...]:
        """The physical experts of ranks that are not active."""
        return tuple(
            expert
            for rank, (low, high) in enumerate(pairwise(self.bounds))
            if not self.is_active(rank)
            for expert in range(low, high)
        )

    def active_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, on a device, uploaded once: which ranks are active, bool [W, 1]; and which columns of their counts
        are not of `masked_experts`, bool [S + 1]."""
        if device not in self._active:
            active = np.array([[self.is_active(rank)] for rank in range(self.ranks)])
            kept = np.ones(self.bounds[-1] + 1, bool)
            kept[list(self.masked_experts)] = False
            with torch.inference_mode(False):
                self._active[device] = uploaded(active, device), uploaded(kept, device)
        return self._active[device]

    @cached_property
    def _active(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def experts_on(self, device: torch.device) -> torch.Tensor | None:
        """Return `expert_of` as int64 [S] on a device, uploaded once; None if it is empty."""
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
        compared = repr([getattr(self, f.name) for f in fields(self) if f.compare])
        return int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=6).digest(), "big")

    def fingerprint(self, number: int) -> int:
        """Return the fingerprint of a group's dispatcher of this number: 56 bits, the last 8 zero; equal for equal
        configs and numbers."""
        return (self._digest + number) % (1 << 48) << 8

    def number_of(self, fingerprint: int) -> int:
        """Return the number of the dispatcher with this config and `fingerprint`, modulo 2**48."""
        return ((fingerprint >> 8) - self._digest) % (1 << 48)


def fill_value(zero_rows: bool | None) -> float | None:
    """Return the value for rows from `num_rows` on, by `DispatchConfig.zero_rows` and the environment; None: no fill.

    Raises:
        ArgumentError: as `requested_poison`.
    """
    if zero_rows is None:
        return None
    return 0.0 if zero_rows else math.nan if requested_poison() else None


def whole_number(name: str, value: object, least: int, most: int, otherwise: str = "") -> int:
    """Return `value` as an int; accepts numpy's integers. `otherwise`: what else is allowed, for the error."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool | torch.Tensor) or not least <= number <= most:
        raise ArgumentError(f"{name}: {shown(value)}; allowed: a whole number, {least} to {most}{otherwise}")
    return number


def round_up(number: int, align: int) -> int:
    """Return the least multiple of `align` that is at least `number`."""
    return -(-number // align) * align


def _capacity_rows(name: str, capacity: int | float, share: float) -> int:
    if isinstance(capacity, float) and 0 <= capacity < math.inf:
        return math.ceil(capacity * share)
    of = "max_tokens * top_k" if name == "capacity" else "max_tokens * top_k / ranks"
    return whole_number(name, capacity, 0, MOST_ROWS, f", or a factor of {of} (float)")


def _listed(expert_map: Iterable[Iterable[int]]) -> list[list[int]]:
    try:
        return [list(experts) for experts in expert_map]
    except TypeError:
        allowed = "for each rank a list of its experts, or None"
        raise ArgumentError(f"expert_map: {shown(expert_map)}; allowed: {allowed}") from None


def _place_experts(
    ranks: int, num_experts: int, expert_map: Sequence[Sequence[int]] | None, active_ranks: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return `bounds`, `physical_expert_of` and `expert_of` of DispatchConfig.

    A rank sends tokens to its own replica of an expert, else to replica r mod n of n.
    """
    if expert_map is None:
        # The first ranks have one more where the number does not divide.
        each, more = divmod(num_experts, ranks)
        return tuple(r * each + min(r, more) for r in range(ranks + 1)), (), ()
    if len(expert_map) != ranks:
        raise ArgumentError(f"expert_map: lists for {len(expert_map)} ranks; allowed: one for each of {ranks}")
    placed = [
        (rank, whole_number(f"expert_map[{rank}]", expert, 0, num_experts - 1))
        for rank, experts in enumerate(expert_map)
        for expert in experts
    ]
    replicas: list[list[int]] = [[] for _ in range(num_experts)]
    for physical_expert, (_, expert) in enumerate(placed):
        replicas[expert].append(physical_expert)
    missing = [expert for expert, physical in enumerate(replicas) if not physical]
    if missing:
        raise ArgumentError(f"expert_map: no rank has experts {missing}; allowed: each expert on at least one rank")
    if len(placed) > MOST_PHYSICAL_EXPERTS:
        raise ArgumentError(f"expert_map: {len(placed)} physical experts; allowed: {MOST_PHYSICAL_EXPERTS}")
    bounds = [0]
    for experts in expert_map:
        bounds.append(bounds[-1] + len(experts))
    if active_ranks is not None:
        active = set(active_ranks)
        replicas = [[p for p in physical if placed[p][0] in active] or physical for physical in replicas]
    table = []
    for rank in range(ranks):
        own = {expert: physical for physical, (r, expert) in reversed(list(enumerate(placed))) if r == rank}
        table.append(tuple(own.get(e, physical[rank % len(physical)]) for e, physical in enumerate(replicas)))
    return tuple(bounds), tuple(table), tuple(expert for _, expert in placed)
