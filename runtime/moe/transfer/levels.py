"""The choice of how rows travel between ranks that exchange messages: in chunks of exact or of fixed size, on one level
or two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from ....planner import Topology, price_levels
from ...transports.hierarchical import HierarchicalSymmetricMemoryTransport
from ..config import DispatchConfig
from .base import TokenTransfer
from .fixed import FixedTransfer, sendrecv_transfer
from .sendrecv import SendRecvTransfer
from .two_level_fixed import TwoLevelFixedTransfer
from .two_level_push import TwoLevelPushTransfer
from .two_level_sendrecv import TwoLevelSendRecvTransfer
from .two_level_window import TwoLevelWindowTransfer

SYMMETRIC = HierarchicalSymmetricMemoryTransport.name


def two_sided_transfer(config: DispatchConfig, pushed: bool, windows: bool = False) -> type[TokenTransfer]:
    """Return the transfer of two-sided transports.

    Args:
        pushed, windows: of `pushed_inside` and `windows_inside`.
    """
    if not config.two_level or config.nodes is None:
        return sendrecv_transfer(config)
    if config.chunk_rows is not None:
        return TwoLevelWindowTransfer if windows else TwoLevelFixedTransfer
    return TwoLevelPushTransfer if pushed else TwoLevelSendRecvTransfer


def pushed_inside(config: DispatchConfig, device: torch.device, transport: str) -> bool:
    """Whether ranks of a node write into each other's memory on two levels, or have no peers there."""
    one_each = config.nodes is not None and max(Counter(config.nodes).values()) == 1
    return device.type == "cpu" and (transport == "hierarchical" or one_each)


def windows_inside(nodes: Sequence[Hashable] | None, transport: str) -> bool:
    """Whether ranks of a node have windows on two levels with messages of fixed size, and some of several nodes has
    more than one rank."""
    return transport == SYMMETRIC and nodes is not None and 1 < len(set(nodes)) < len(nodes)


def with_levels(
    config: DispatchConfig, device: torch.device, transport: str, topology: Callable[[], Topology | None]
) -> tuple[DispatchConfig, str]:
    """Return the config with `two_level` set, and why; equal on all ranks.

    Args:
        config: with `nodes`.
        transport: the name of the ranks' transport.
        topology: returns that of the ranks, None if it is not known.
    """
    if config.nodes is None:
        return replace(config, two_level=None), ""
    found = topology()  # also if it is not needed, since peers that need it wait for this rank's figures
    if config.two_level is not None:
        return config, _text(config.two_level, "requested")
    if found is None:
        return replace(config, two_level=False), _text(False, "the machines of the ranks are not known")
    if config.chunk_rows is None:
        pushed = pushed_inside(config, device, transport)
    else:
        pushed = windows_inside(config.nodes, transport)
    prices = price_levels(
        config.nodes, config.max_tokens, config.top_k, config.row_nbytes, found, pushed, config.chunk_rows
    )
    why = (
        f"the cheaper on {found.name} by {found.origin}: {prices.two:.0f} us and {prices.two_bytes:,.0f} bytes into a "
        f"node for a dispatch and a combine on two, {prices.one:.0f} us and {prices.one_bytes:,.0f} on one, "
        + ("with even routing" if config.chunk_rows is None else "in messages of fixed size")
    )
    return replace(config, two_level=prices.two_is_cheaper), _text(prices.two_is_cheaper, why)


def _text(two_level: bool, why: str) -> str:
    return f"levels: {'two' if two_level else 'one'}, {why}"


def alternatives(transfer: TokenTransfer) -> list[TokenTransfer | type[TokenTransfer]]:
    """Return the transfer, and those that `chunk_capacity` and `two_level` could select among the same ranks."""
    if not (transfer.in_chunks or transfer.two_level):
        return [transfer]
    kinds: list[type[TokenTransfer]] = [SendRecvTransfer, FixedTransfer]
    if transfer.two_level:
        windows = windows_inside(transfer.config.nodes, getattr(transfer.transport, "name", ""))
        fixed = TwoLevelWindowTransfer if windows else TwoLevelFixedTransfer
        kinds = [TwoLevelSendRecvTransfer if transfer.fixed_size else fixed, *kinds]
    return [transfer, *[kind for kind in kinds if kind is not type(transfer)]]
