"""The rule by which ranks get a transport. It starts nothing and asks no rank: `Transports` and the doctor both go by
it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ...errors import ArgumentError, UnsupportedError

NAMES = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")


def check_name(asked: object) -> None:
    """
    Raises:
        ArgumentError: no transport has this name; None is none asked for.
    """
    if asked is not None and (not isinstance(asked, str) or asked not in NAMES):
        raise ArgumentError(f"transport: {asked!r} is not known; allowed: {', '.join(NAMES)}")


def choose_transport(
    asked: str | None,
    ranks: Sequence[int],
    here: int,
    node_of: Callable[[int], Hashable],
    *,
    no_memory: str | None,
    no_messages: str | None,
    node_size: int | None,
) -> tuple[str, str]:
    """The transport of `ranks`, one of `NAMES` or "hierarchical symmetric_memory", and why.

    Args:
        asked: for a transport, by argument or environment; None: by what the ranks share.
        here: the rank that asks.
        node_of: of a rank, what is equal for ranks that reach each other's memory. Called only where it matters.
        no_memory: why no ranks at all reach each other's memory, in the way that the transport asked for wants; or
            None.
        no_messages: why no messages go between nodes; or None.
        node_size: what SHARDWEAVE_NODE_SIZE pretends, if anything: for what is said.

    Raises:
        ArgumentError: an unknown transport.
        UnsupportedError: the transport asked for cannot carry these ranks.
    """
    check_name(asked)
    pretended = f", by SHARDWEAVE_NODE_SIZE={node_size}" if node_size else ""

    def refused(why: str, allowed: str) -> UnsupportedError:
        return UnsupportedError(f"transport: {asked} cannot carry ranks {tuple(ranks)}: {why}; allowed: {allowed}")

    def several(inside: str) -> None:
        if no_messages:
            raise UnsupportedError(f"transport: {inside} is of several nodes, and between them: {no_messages}")

    if asked == "process_group":
        return "process_group", "asked for"
    if no_memory:
        if asked:
            raise refused(no_memory, "process_group")
        return "process_group", no_memory
    nodes = [node_of(rank) for rank in ranks]
    count = len(set(nodes))
    if asked == "symmetric_memory":
        # Asked for only. On GPUs that reach each other it is meant to be the default, once a GPU has proved it; on
        # CPUs pushing into the outputs themselves copies less.
        if count == 1:
            return "symmetric_memory", "asked for"
        several("symmetric_memory")
        return "hierarchical symmetric_memory", "asked for"
    if count == 1:
        name, why = "shared_memory", f"all ranks are on this machine{pretended}"
    elif count < len(ranks):
        name, why = "hierarchical", f"{len(ranks)} ranks are on {count} machines{pretended}"
    else:
        name, why = "process_group", f"each rank is on another machine{pretended}"
    if asked == "shared_memory" and count > 1:
        elsewhere = next(rank for rank, node in zip(ranks, nodes, strict=True) if node != node_of(here))
        raise refused(f"rank {elsewhere} is on another machine{pretended}", name)
    if asked:
        name, why = asked, "asked for"
    if name == "hierarchical":
        several("shared_memory")
    return name, why
