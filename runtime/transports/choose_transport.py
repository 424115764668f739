"""The choice of the transport of a set of ranks: by what the ranks share, or as requested. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, get_args

import torch

from ...errors import ArgumentError, UnsupportedError
from .shared_memory.transport import why_unsupported
from .symmetric_memory.memory import why_no_symmetric_memory

TransportName = Literal["shared_memory", "process_group", "hierarchical", "symmetric_memory"]
NAMES: tuple[TransportName, ...] = get_args(TransportName)


def check_name(requested: object) -> None:
    """
    Raises:
        ArgumentError: `requested` is neither None nor in `NAMES`.
    """
    if requested is not None and (not isinstance(requested, str) or requested not in NAMES):
        raise ArgumentError(f"transport: {requested!r} is not known; allowed: {', '.join(NAMES)}")


def choose_transport(
    requested: str | None,
    ranks: Sequence[int],
    rank: int,
    node_of: Callable[[int], Hashable],
    *,
    no_memory: str | None,
    no_messages: str | None,
    node_size: int | None,
) -> tuple[str, str]:
    """The name of the transport of `ranks`, one of `NAMES` or "hierarchical symmetric_memory", and the reason.

    This starts nothing and communicates with no rank, so that `doctor` uses it as well.

    Args:
        requested: by argument or environment; None: selected by what the ranks share.
        rank: this rank.
        node_of: returns a key that is equal for ranks that reach each other's memory. Called only if it matters.
        no_memory: the reason why no ranks reach each other's memory, for the requested transport; or None.
        no_messages: the reason why nodes cannot exchange messages; or None.
        node_size: the value of SHARDWEAVE_NODE_SIZE, if it is set, for the reason.

    Raises:
        ArgumentError: `requested` is not in `NAMES`.
        UnsupportedError: the transport cannot carry these ranks.
    """
    check_name(requested)
    pretended = f", by SHARDWEAVE_NODE_SIZE={node_size}" if node_size else ""

    def refused(why: str, allowed: str) -> UnsupportedError:
        return UnsupportedError(f"transport: {requested} cannot carry ranks {tuple(ranks)}: {why}; allowed: {allowed}")

    def check_messages(inside: str) -> None:
        if no_messages:
            raise UnsupportedError(f"transport: {inside} is of several nodes, and between them: {no_messages}")

    if requested == "process_group":
        return "process_group", "requested"
    if no_memory:
        if requested:
            raise refused(no_memory, "process_group")
        return "process_group", no_memory
    nodes = [node_of(r) for r in ranks]
    count = len(set(nodes))
    if requested == "symmetric_memory":
        # Only on request. It is meant to become the default for GPUs that reach each other once it is proven there; on
        # CPUs, pushing into the outputs copies less.
        if count == 1:
            return "symmetric_memory", "requested"
        check_messages("symmetric_memory")
        return "hierarchical symmetric_memory", "requested"
    if count == 1:
        name, why = "shared_memory", f"all ranks are on this machine{pretended}"
    elif count < len(ranks):
        name, why = "hierarchical", f"{len(ranks)} ranks are on {count} machines{pretended}"
    else:
        name, why = "process_group", f"each rank is on another machine{pretended}"
    if requested == "shared_memory" and count > 1:
        remote = next(r for r, node in zip(ranks, nodes, strict=True) if node != node_of(rank))
        raise refused(f"rank {remote} is on another machine{pretended}", name)
    if requested:
        name, why = requested, "requested"
    if name == "hierarchical":
        check_messages("shared_memory")
    return name, why


def why_no_memory(device: torch.device, requested: str | None) -> str | None:
    """The reason why no ranks reach each other's memory for tensors on `device` by the requested transport; or
    None."""
    if device.type == "cpu":
        return why_unsupported()
    return why_no_symmetric_memory(device) if requested == "symmetric_memory" else f"tensors are on {device.type}"
