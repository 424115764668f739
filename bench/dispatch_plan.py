"""What a token dispatcher would take, of ranks that need not be there: for `python -m shardweave dispatch`."""

from __future__ import annotations

import json
from typing import Any

from shardweave.errors import ArgumentError
from shardweave.kernels.rows import PAYLOADS
from shardweave.runtime.token_fixed_slabs import FixedSlabRank
from shardweave.runtime.token_layout import DispatchLayout
from shardweave.runtime.token_pushes import PushingRank
from shardweave.runtime.token_report import explain, to_dict
from shardweave.runtime.token_slabs import SlabRank

WAYS = (PushingRank, SlabRank, FixedSlabRank)


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
    slab_capacity: str | None = None,
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
        ranks, experts, top_k, hidden, tokens, _dtype(dtype), _capacity("capacity", capacity), expert_capacity, align,
        overflow, layout, None, save, _capacity("slab_capacity", slab_capacity),
    )  # fmt: skip
    return json.dumps(to_dict(agreed, WAYS), indent=1) if as_json else explain(agreed, WAYS)


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
            f"{name}: {given!r}; allowed: rows, such as 4096, or a factor of a rank's rows, such as 1.25"
        ) from None
