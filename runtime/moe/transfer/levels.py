"""The choice of how rows travel between ranks that exchange messages: in chunks of exact or of fixed size, on one level
or two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

import torch

from ....planner import HOST_READ_US, NVLINK_INFINIBAND, Topology, price_levels, price_splits
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


def with_splits(config: DispatchConfig, nodes: Sequence[Hashable], windows: bool = False) -> tuple[DispatchConfig, str]:
    """Return the config with the splits that are cheaper on GPUs, and why; equal on all ranks.

    Args:
        config: one without `splits`.
        nodes: the node of each rank. On several of them the cheaper level counts, unless `two_level` is set.
        windows: of `windows_inside`.
    """
    most, tokens = config.most_pairs, config.max_tokens
    if len(set(nodes)) == 1:
        prices = price_splits(nodes, most, most, config.row_nbytes, NVLINK_INFINIBAND, True)
        host, fixed = prices.host, prices.fixed
    else:
        levels = ("one", "two") if config.two_level is None else (("two",) if config.two_level else ("one",))
        host, fixed = (
            min(getattr(price, level) for level in levels)
            for chunk_rows in (None, most)
            for price in [
                price_levels(
                    nodes, tokens, config.top_k, config.row_nbytes, NVLINK_INFINIBAND,
                    windows and chunk_rows is not None, chunk_rows,
                )
            ]
        )  # fmt: skip
        host += HOST_READ_US
    if fixed < host:
        config = replace(config, splits="fixed")
    why = (
        f"splits: {'fixed' if fixed < host else 'host'}, the cheaper on {_number_of(set(nodes))} by the links of "
        f"{NVLINK_INFINIBAND.name}: {host:.0f} us with sizes that the host reads, {fixed:.0f} us in chunks with room "
        "for all rows" + (", through windows inside nodes on two levels" if windows else "")
    )
    return config, why


def alternatives(transfer: TokenTransfer) -> list[TokenTransfer | type[TokenTransfer]]:
    """Return the transfer, and those that other values of `splits` and `two_level` select among the same ranks."""
    if not (transfer.in_chunks or transfer.two_level):
        return [transfer]
    kinds: list[type[TokenTransfer]] = [SendRecvTransfer, FixedTransfer]
    if transfer.two_level:
        windows = windows_inside(transfer.config.nodes, getattr(transfer.transport, "name", ""))
        fixed = TwoLevelWindowTransfer if windows else TwoLevelFixedTransfer
        kinds = [TwoLevelSendRecvTransfer if transfer.fixed_size else fixed, *kinds]
    return [transfer, *[kind for kind in kinds if kind is not type(transfer)]]


def _number_of(nodes: Collection[Hashable]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
