"""Memory and bytes on the wire of a token dispatcher, without its ranks: for `python -m shardweave dispatch`."""

from __future__ import annotations

import json
from typing import Any

from shardweave.errors import ArgumentError, shown
from shardweave.kernels.tokens.rows import PAYLOADS
from shardweave.planner import Splits
from shardweave.runtime.moe.config import DispatchConfig, OverflowPolicy, RowsLayout, SavedRows
from shardweave.runtime.moe.report import explain, to_dict
from shardweave.runtime.moe.transfer.fixed import FixedTransfer
from shardweave.runtime.moe.transfer.levels import SYMMETRIC, windows_inside, with_splits
from shardweave.runtime.moe.transfer.push import PushTransfer
from shardweave.runtime.moe.transfer.sendrecv import SendRecvTransfer
from shardweave.runtime.moe.transfer.window import WindowTransfer

GPUS_OF_A_NODE = 8
ALGORITHMS = (PushTransfer, WindowTransfer, SendRecvTransfer, FixedTransfer)


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
    overflow: OverflowPolicy = "raise",
    layout: RowsLayout = "grouped",
    save: SavedRows = "buffer",
    pooled_buffers: int = 1,
    chunk_capacity: str | None = None,
    splits: Splits | None = None,
    as_json: bool = False,
) -> str:
    """Return settings, memory and bytes on the wire of every algorithm.

    Args:
        capacity: rows, such as "4096", or a factor of tokens * top_k, such as "1.25".
        chunk_capacity: likewise, as a factor of tokens * top_k / ranks.

    Raises:
        ArgumentError: a setting that a dispatcher does not allow.
    """
    config = DispatchConfig(
        ranks, num_experts=experts, top_k=top_k, hidden=hidden, max_tokens=tokens, dtype=_dtype(dtype),
        capacity=_capacity("capacity", capacity), expert_capacity=expert_capacity, align=align, overflow=overflow,
        layout=layout, save=save, pooled_buffers=pooled_buffers, splits=splits,
        chunk_capacity=_capacity("chunk_capacity", chunk_capacity),
    )  # fmt: skip
    if top_k > experts:  # a dispatcher takes that, since ids may be -1; a model's tokens have different experts
        raise ArgumentError(f"top_k: {top_k} of {experts} experts; allowed: up to {experts}")
    if as_json:
        return json.dumps(to_dict(config, ALGORITHMS), indent=1)
    lines = [explain(config, ALGORITHMS)]
    if config.splits is None:
        nodes = [rank // GPUS_OF_A_NODE for rank in range(ranks)]
        _, why = with_splits(config, nodes)
        lines.append(f"  on GPUs with a two-sided transport, {GPUS_OF_A_NODE} per node: {why}")
        if windows_inside(nodes, SYMMETRIC):
            _, why = with_splits(config, nodes, True)
            lines.append(f'  with transport="symmetric_memory": {why}')
    return "\n".join(lines)


def _dtype(name: str) -> Any:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in PAYLOADS}
    return dtypes.get(name, name)


def _capacity(name: str, given: str | None) -> int | float | None:
    if given is None:
        return None
    try:
        return int(given) if given.lstrip("+-").isdecimal() else float(given)
    except ValueError:
        raise ArgumentError(
            f"{name}: {shown(given)}; allowed: rows, such as 4096, or a factor of a rank's rows, such as 1.25"
        ) from None
