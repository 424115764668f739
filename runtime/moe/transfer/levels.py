"""The choice between one level and two for a dispatcher of several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from ....planner import Topology, price_levels
from ..config import DispatchConfig
from .base import TokenTransfer
from .fixed import sendrecv_transfer
from .two_level_fixed import TwoLevelFixedTransfer
from .two_level_push import TwoLevelPushTransfer
from .two_level_sendrecv import TwoLevelSendRecvTransfer


def two_sided_transfer(config: DispatchConfig, pushed: bool) -> type[TokenTransfer]:
    """Return the transfer of two-sided transports; `pushed`: whether ranks of a node write into each other's memory."""
    if not config.two_level or config.nodes is None:
        return sendrecv_transfer(config)
    if config.chunk_rows is not None:
        return TwoLevelFixedTransfer
    return TwoLevelPushTransfer if pushed else TwoLevelSendRecvTransfer


def pushed_inside(config: DispatchConfig, device: torch.device, transport: str) -> bool:
    """Whether ranks of a node write into each other's memory on two levels, or have no peers there."""
    one_each = config.nodes is not None and max(Counter(config.nodes).values()) == 1
    return device.type == "cpu" and (transport == "hierarchical" or one_each)


def with_levels(
    config: DispatchConfig, device: torch.device, transport: str, topology: Callable[[], Topology | None]
) -> tuple[DispatchConfig, str]:
    """Return the config with `two_level` set, and why; equal on all ranks.

    Args:
        config: with `nodes`.
        transport: the name of the ranks' transport.
        topology: returns that of the ranks, None if it is not known. Called unless chunks have a fixed size.
    """
    if config.nodes is None:
        return replace(config, two_level=None), ""
    if config.chunk_capacity is not None:
        return replace(config, two_level=False), _text(False, "chunks have a fixed size")
    found = topology()  # also if it is not needed, since peers that need it wait for this rank's figures
    if config.two_level is not None:
        return config, _text(config.two_level, "requested")
    if found is None:
        return replace(config, two_level=False), _text(False, "the machines of the ranks are not known")
    pushed = pushed_inside(config, device, transport)
    prices = price_levels(config.nodes, config.max_tokens, config.top_k, config.row_nbytes, found, pushed)
    why = (
        f"the cheaper on {found.name} by {found.origin}: {prices.two:.0f} us and {prices.two_bytes:,.0f} bytes into a "
        f"node for a dispatch and a combine on two, {prices.one:.0f} us and {prices.one_bytes:,.0f} on one, with even "
        "routing"
    )
    return replace(config, two_level=prices.two_is_cheaper), _text(prices.two_is_cheaper, why)


def _text(two_level: bool, why: str) -> str:
    return f"levels: {'two' if two_level else 'one'}, {why}"
