"""What a token dispatcher would take, of ranks that need not be there: for `python -m shardweave dispatch`."""

from __future__ import annotations

import json
from typing import Any

from shardweave.errors import ArgumentError, shown
from shardweave.kernels.rows import PAYLOADS
from shardweave.runtime.moe.config import DispatchLayout
from shardweave.runtime.moe.report import explain, to_dict
from shardweave.runtime.moe.transfer_fixed import FixedSlabRank, with_splits
from shardweave.runtime.moe.transfer_push import PushingRank
from shardweave.runtime.moe.transfer_sendrecv import SlabRank
from shardweave.runtime.moe.transfer_window import WindowRank

GPUS_OF_A_NODE = 8
WAYS = (PushingRank, WindowRank, SlabRank, FixedSlabRank)


def text(
    ranks: int,
    experts: int,
    top_k: int,
    hidden: int,
    tokens: int,
    dtype: str = "bfloat16",
    capacity: str | None = None,
    expert_capacity: int | None = None,
    align: int = 1,
    overflow: str = "raise",
    layout: str = "grouped",
    save: str = "lease",
    leases: int = 1,
    slab_capacity: str | None = None,
    splits: str | None = None,
    as_json: bool = False,
) -> str:
    """Settings, memory and bytes on the wire, of ranks that reach each other and of ranks that send and receive.

    Args:
        capacity: rows, such as "4096", or a factor of tokens * top_k, such as "1.25".
        slab_capacity: the same, of tokens * top_k / ranks.

    Raises:
        ArgumentError: a setting that a dispatcher refuses.
    """
    agreed = DispatchLayout.of(
        ranks, num_experts=experts, top_k=top_k, hidden=hidden, max_tokens=tokens, dtype=_dtype(dtype),
        capacity=_capacity("capacity", capacity), expert_capacity=expert_capacity, align=align, overflow=overflow,
        layout=layout, save=save, leases=leases, slab_capacity=_capacity("slab_capacity", slab_capacity),
        splits=splits,
    )  # fmt: skip
    if top_k > experts:
        raise ArgumentError(f"top_k: {top_k} of {experts} experts; allowed: up to {experts}")
    if as_json:
        return json.dumps(to_dict(agreed, WAYS), indent=1)
    said = [explain(agreed, WAYS)]
    if splits is None and agreed.slab_capacity is None:
        _, why = with_splits(agreed, [rank // GPUS_OF_A_NODE for rank in range(ranks)])
        said.append(f"  on GPUs that send, {GPUS_OF_A_NODE} to a node: {why}")
    return "\n".join(said)


def _dtype(name: str) -> Any:
    found = {str(dtype).removeprefix("torch."): dtype for dtype in PAYLOADS}
    return found.get(name, name)


def _capacity(name: str, given: str | None) -> int | float | None:
    if given is None:
        return None
    try:
        return int(given) if given.lstrip("+-").isdecimal() else float(given)
    except ValueError:
        raise ArgumentError(
            f"{name}: {shown(given)}; allowed: rows, such as 4096, or a factor of a rank's rows, such as 1.25"
        ) from None
