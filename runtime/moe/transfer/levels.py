"""The choice between one level and two for a dispatcher of several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from ....errors import UnsupportedError
from ....planner import Topology, price_levels
from ..config import DispatchConfig
from .base import TokenTransfer
from .fixed import sendrecv_transfer
from .two_level import TwoLevelTransfer


def two_sided_transfer(config: DispatchConfig) -> type[TokenTransfer]:
    """Return the transfer of two-sided transports."""
    return TwoLevelTransfer if config.two_level and config.nodes is not None else sendrecv_transfer(config)


def with_levels(
    config: DispatchConfig, device: torch.device, transport: str, topology: Callable[[], Topology | None]
) -> tuple[DispatchConfig, str]:
    """Return the config with `two_level` set, and why; equal on all ranks.

    Args:
        config: with `nodes`.
        transport: the name of the ranks' transport.
        topology: returns that of the ranks, None if it is not known. Called unless there is an obstacle.

    Raises:
        UnsupportedError: two_level=True, and the transport or device does not support it.
    """
    if config.nodes is None:
        return replace(config, two_level=None), ""
    obstacle = _obstacle(config, device, transport)
    if config.two_level and obstacle:
        raise UnsupportedError(f"two_level: True, but {obstacle}; allowed: False, None")
    if obstacle:
        return replace(config, two_level=False), _text(False, obstacle)
    found = topology()  # also if it is not needed, since peers that need it wait for this rank's figures
    if config.two_level is not None:
        return config, _text(config.two_level, "requested")
    if found is None:
        return replace(config, two_level=False), _text(False, "the machines of the ranks are not known")
    prices = price_levels(config.nodes, config.max_tokens, config.top_k, config.row_nbytes, found)
    why = (
        f"the cheaper on {found.name} by {found.origin}: {prices.two:.0f} us and {prices.two_bytes:,.0f} bytes into a "
        f"node for a dispatch and a combine on two, {prices.one:.0f} us and {prices.one_bytes:,.0f} on one, with even "
        "routing"
    )
    return replace(config, two_level=prices.two_is_cheaper), _text(prices.two_is_cheaper, why)


def _obstacle(config: DispatchConfig, device: torch.device, transport: str) -> str:
    """Return the reason why tokens cannot travel on two levels; empty if they can."""
    assert config.nodes is not None
    if config.chunk_capacity is not None:
        return "chunks have a fixed size"
    if device.type != "cpu":
        return f"tokens are on {device.type}, and two levels are for CPUs"
    if transport != "hierarchical" and max(Counter(config.nodes).values()) > 1:
        return f"ranks of a node do not write into each other's memory by {transport}"
    return ""


def _text(two_level: bool, why: str) -> str:
    return f"levels: {'two' if two_level else 'one'}, {why}"
