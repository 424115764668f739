"""What a token dispatcher does and takes, in words and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import DispatchLayout
from .transfer import TokenRank

Way = TokenRank | type[TokenRank]
"""How rows travel: a rank, or what ranks are made of."""


def explain(layout: DispatchLayout, ways: Sequence[Way], transport: str | None = None) -> str:
    """The settings, and for each way the memory and the bytes on the wire that they take, of each rank."""
    slots = [b - a for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)]
    held = f"{slots[0]}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    most = layout.max_tokens * layout.top_k
    over = f"{layout.ranks} rank{'' if layout.ranks == 1 else 's'}{f', {transport}' if transport else ''}"
    lines = [
        f"token dispatch over {over}: {layout.num_experts} experts in "
        f"{layout.bounds[-1]} slots, {held} for each rank; top {layout.top_k}, hidden {layout.hidden}, "
        f"{_name(layout)}",
        f"  {layout.rows} rows for each rank "
        f"(all tokens of all ranks: {layout.ranks * most}), aligned to {layout.align}, "
        f"{'batched' if layout.batched else 'grouped'}",
        f"  expert capacity: {layout.expert_capacity if layout.expert_capacity is not None else 'no limit'}; "
        f"overflow: {layout.overflow}; save: {layout.save}",
    ]
    if layout.zero_rows is not None:
        lines.append(f"  rows from num_rows on are {'zero' if layout.zero_rows else 'not initialised'}")
    for way in ways:
        capacity = _slab_capacity(layout, way)
        memory, wire = way.nbytes(layout, capacity), on_wire(layout, way, capacity)
        lines += [
            f"  {way.way}" + ("" if capacity is None else f" (slab_capacity={capacity})"),
            "    memory of a rank, bytes at most:",
            *[f"      {nbytes:>16,}  {what}" for what, nbytes in memory.items()],
            f"    on the wire, bytes for one rank's tokens, {layout.max_tokens} of them: of even routing, and at most:",
            *[f"      {even:>16,} {top:>16,}  {what}" for what, (even, top) in wire.items()],
        ]
    return "\n".join(lines)


def _slab_capacity(layout: DispatchLayout, way: Way) -> int | None:
    """Rows of a slab, where all are of one size: the dispatcher's, else all of a rank's."""
    if not way.one_size:
        return None
    return layout.max_tokens * layout.top_k if layout.slab_capacity is None else layout.slab_capacity


def to_dict(layout: DispatchLayout, ways: Sequence[Way]) -> dict[str, Any]:
    """The same as `explain` says, of what json knows."""
    return {
        "ranks": layout.ranks,
        "num_experts": layout.num_experts,
        "top_k": layout.top_k,
        "hidden": layout.hidden,
        "max_tokens": layout.max_tokens,
        "dtype": _name(layout),
        "rows": layout.rows,
        "expert_capacity": layout.expert_capacity,
        "align": layout.align,
        "layout": "batched" if layout.batched else "grouped",
        "overflow": layout.overflow,
        "save": layout.save,
        "leases": layout.leases,
        "zero_rows": layout.zero_rows,
        "ways": [
            {
                "way": way.way,
                "slab_capacity": capacity,
                "memory": way.nbytes(layout, capacity),
                "wire": {
                    what: {"even": even, "most": top} for what, (even, top) in on_wire(layout, way, capacity).items()
                },
            }
            for way in ways
            for capacity in [_slab_capacity(layout, way)]
        ],
    }


def on_wire(layout: DispatchLayout, way: Way, slab_capacity: int | None = None) -> dict[str, tuple[int, int]]:
    """Bytes that travel between ranks for the max_tokens tokens of one rank, by what for: where every slot gets as many
    as another, and at most. Rows, weights and counts; not the few bytes by which ranks meet. Slabs of `slab_capacity`
    rows travel whole."""
    row, others = layout.hidden * layout.dtype.itemsize, layout.ranks - 1
    # Of each slot what this rank counted, and its bad ids.
    counts = others * (layout.bounds[-1] + 1 + way.words_told) * 4
    # Tokens go once more for the experts' backward.
    again = row if layout.save == "redispatch" else 0
    per_entry = {
        "dispatch": (row + 4, counts),
        "combine": (row, 0),
        "backward of combine": (row + 4 + again, 0),
        "backward of dispatch": (row + 4, 0),
    }
    even, most = _entries_sent(layout) if slab_capacity is None else ((layout.ranks - 1) * slab_capacity,) * 2
    return {what: (even * each + once, most * each + once) for what, (each, once) in per_entry.items()}


def _entries_sent(layout: DispatchLayout) -> tuple[int, int]:
    """Entries of one rank's tokens that have a row at another rank: with even routing, of the rank with most of them,
    and at most."""
    entries, slots = layout.max_tokens * layout.top_k, layout.bounds[-1]
    held = [b - a for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)]
    room = [min(layout.rows, n * layout.rows if layout.expert_capacity is None else n * layout.expert_capacity)
            for n in held]  # fmt: skip
    # What an owner has room for is shared by all sources.
    gets = [min(-(-entries * n // slots), -(-space // layout.ranks)) for n, space in zip(held, room, strict=True)]
    return min(entries, sum(gets) - min(gets)), min(entries, sum(room) - min(room))


def _name(layout: DispatchLayout) -> str:
    return str(layout.dtype).removeprefix("torch.")
