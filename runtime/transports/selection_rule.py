"""The rule by which ranks get a world. It starts nothing and asks no rank: `Worlds` and the doctor both go by it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ...errors import ArgumentError, UnsupportedError

NAMES = ("shared_memory", "collective", "mixed", "symmetric")


def check_name(asked: object) -> None:
    """
    Raises:
        ArgumentError: no world has this name; None is none asked for.
    """
    if asked is not None and (not isinstance(asked, str) or asked not in NAMES):
        raise ArgumentError(f"world: {asked!r} is not known; allowed: {', '.join(NAMES)}")


def choose_world(
    asked: str | None,
    ranks: Sequence[int],
    here: int,
    node_of: Callable[[int], Hashable],
    *,
    no_memory: str | None,
    no_messages: str | None,
    node_size: int | None,
) -> tuple[str, str]:
    """The world of `ranks`, one of `NAMES` or "mixed symmetric", and why.

    Args:
        asked: for a world, by argument or environment; None: by what the ranks share.
        here: the rank that asks.
        node_of: of a rank, what is equal for ranks that reach each other's memory. Called only where it matters.
        no_memory: why no ranks at all reach each other's memory, in the way that the world asked for wants; or None.
        no_messages: why no messages go between nodes; or None.
        node_size: what SHARDWEAVE_NODE_SIZE pretends, if anything: for what is said.

    Raises:
        ArgumentError: an unknown world.
        UnsupportedError: the world asked for cannot carry these ranks.
    """
    check_name(asked)
    pretended = f", by SHARDWEAVE_NODE_SIZE={node_size}" if node_size else ""

    def refused(why: str, allowed: str) -> UnsupportedError:
        return UnsupportedError(f"world: {asked} cannot carry ranks {tuple(ranks)}: {why}; allowed: {allowed}")

    def several(inside: str) -> None:
        if no_messages:
            raise UnsupportedError(f"world: {inside} is of several nodes, and between them: {no_messages}")

    if asked == "collective":
        return "collective", "asked for"
    if no_memory:
        if asked:
            raise refused(no_memory, "collective")
        return "collective", no_memory
    nodes = [node_of(rank) for rank in ranks]
    count = len(set(nodes))
    if asked == "symmetric":
        # Asked for only. On GPUs that reach each other it is meant to be the default, once a GPU has proved it; on
        # CPUs pushing into the outputs themselves copies less.
        if count == 1:
            return "symmetric", "asked for"
        several("symmetric")
        return "mixed symmetric", "asked for"
    if count == 1:
        name, why = "shared_memory", f"all ranks are on this machine{pretended}"
    elif count < len(ranks):
        name, why = "mixed", f"{len(ranks)} ranks are on {count} machines{pretended}"
    else:
        name, why = "collective", f"each rank is on another machine{pretended}"
    if asked == "shared_memory" and count > 1:
        elsewhere = next(rank for rank, node in zip(ranks, nodes, strict=True) if node != node_of(here))
        raise refused(f"rank {elsewhere} is on another machine{pretended}", name)
    if asked:
        name, why = asked, "asked for"
    if name == "mixed":
        several("shared_memory")
    return name, why
