"""What a token dispatcher does and takes, in words and bytes."""

from __future__ import annotations

import math

from .token_layout import DispatchLayout
from .token_rank import TokenRank


def explain(layout: DispatchLayout, rank: TokenRank, world: str) -> str:
    """The settings, and the memory that they take on each rank."""
    slots = [b - a for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)]
    held = f"{slots[0]}" if min(slots) == max(slots) else f"{min(slots)} to {max(slots)}"
    most = layout.max_tokens * layout.top_k
    lines = [
        f"token dispatch over {layout.ranks} ranks, {world}: {layout.num_experts} experts in "
        f"{layout.bounds[-1]} slots, {held} for each rank; top {layout.top_k}, hidden {layout.hidden}, "
        f"{str(layout.dtype).removeprefix('torch.')}",
        f"  {rank.way}",
        f"  {layout.rows} rows for each rank "
        f"(all tokens of all ranks: {layout.ranks * most}), aligned to {layout.align}, "
        f"{'batched' if layout.batched else 'grouped'}",
        f"  expert capacity: {layout.expert_capacity if layout.expert_capacity is not None else 'no limit'}; "
        f"overflow: {layout.overflow}; save: {layout.save}",
        *_on_the_wire(layout, rank.in_slabs),
        "  memory of a rank, bytes at most:",
        *[f"    {nbytes:>16,}  {what}" for what, nbytes in nbytes(layout, rank.in_slabs).items()],
    ]
    return "\n".join(lines)


def _on_the_wire(layout: DispatchLayout, in_slabs: bool) -> list[str]:
    if not in_slabs:
        return ["  slab_capacity: not used, ranks write into each other's memory"] if layout.slab_capacity else []
    even = math.ceil(layout.max_tokens * layout.top_k / layout.ranks)
    capacity = even if layout.slab_capacity is None else layout.slab_capacity
    exact, fixed = sent_bytes(layout, None), sent_bytes(layout, capacity)
    return [
        f"  sent to others by a dispatch: in slabs of exact size {exact:,} bytes at most, with one read by the host;",
        f"    in slabs of {capacity} rows (slab_capacity={capacity}) {fixed:,} bytes always, with none",
    ]


def nbytes(layout: DispatchLayout, in_slabs: bool) -> dict[str, int]:
    """Bytes of memory of one rank, at most, by what they are for; `in_slabs`: of ranks that send and receive."""
    row = layout.hidden * layout.dtype.itemsize
    most = layout.max_tokens * layout.top_k
    received = {
        "lease": "rows received, held until backward",
        "copy": "rows received, twice while they are copied, then once until backward",
        "redispatch": "rows received, held until the experts are done, and again during their backward",
    }
    routing = "routing of one dispatch, held until backward"
    found = {
        received[layout.save]: layout.rows * (row + 4),
        "gradients received, in the backward of combine": layout.rows * (row + 4),
        # Slots, places and rows of entries, and counts of all ranks.
        routing: most * 16 + layout.ranks * (layout.bounds[-1] + 1) * 8,
    }
    if not in_slabs:
        return {**found, "expert output that peers read, during combine": layout.rows * row}
    # Rows that come are sorted into their groups; those that go were sorted out of them.
    sent, came = most, layout.rows
    if layout.slab_capacity is not None:
        sent = came = layout.ranks * layout.slab_capacity
    found[routing] += came * 8
    # Each of the four sends rows as slabs and receives such.
    slabs = "slabs sent and received, during dispatch, combine and either's backward"
    return {**found, slabs: (sent + came) * row}


def sent_bytes(layout: DispatchLayout, slab_capacity: int | None) -> int:
    """What a rank sends to others in one dispatch, at most: rows and their weights, in slabs of exact size or of so
    many rows. A combine receives as much, but for the weights."""
    rows = layout.max_tokens * layout.top_k
    if slab_capacity is not None:
        rows = (layout.ranks - 1) * slab_capacity
    return rows * (layout.hidden * layout.dtype.itemsize + 4)
