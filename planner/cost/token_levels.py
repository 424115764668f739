"""The levels of a token exchange between nodes: a message to every rank, or one to every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .topology import Topology

PAIR_BYTES = 6
"""Bytes that travel with a token, for each of its K pairs, to the rank that forwards it: an expert and a weight."""
_WEIGHT = 4
_BARRIERS = 4  # inside a node, in a dispatch and a combine on two levels
_INSIDE = 3  # messages of a pair of ranks of a node on two levels, where memory is not addressed: rows, weights, sums
_ROUNDS_ONE, _ROUNDS_TWO = 4, 3  # messages of a pair of ranks: counts, rows, weights, sums; or counts, tokens, sums


@dataclass(frozen=True)
class LevelPrices:
    """The estimated microseconds of a dispatch and a combine, and the bytes into the node that receives most of them.

    Attributes:
        one, two: microseconds with one level, and with two.
        one_bytes, two_bytes: bytes with one level, and with two.
    """

    one: float
    two: float
    one_bytes: float
    two_bytes: float

    @property
    def two_is_cheaper(self) -> bool:
        return self.two < self.one


def price_levels(
    nodes: Sequence[Hashable],
    tokens: int,
    top_k: int,
    row_bytes: int,
    topology: Topology,
    pushed: bool = True,
    chunk_rows: int | None = None,
) -> LevelPrices:
    """Estimate a dispatch and a combine of evenly routed tokens on the slowest node.

    With one level each (token, k) pair is a row of a message to its rank. With two a token is sent once to each node
    that has an expert of it, is brought to the ranks there, and returns as one sum.

    Args:
        nodes: the node of each rank, of at least two nodes.
        tokens: the tokens of each rank.
        row_bytes: the bytes of a token.
        topology: its nodes are not used.
        pushed: whether ranks of a node write into each other's memory; otherwise they exchange messages.
        chunk_rows: the rows of a message with one level, full or not. With two a message between nodes then has a place
            for each token that may have a row there, and one inside a node that many rows of each rank whose tokens its
            sender brings. None: messages of exact size.
    """
    sizes, ranks, pairs = Counter(nodes), len(nodes), tokens * top_k
    reached = {node: 1 - (1 - size / ranks) ** top_k for node, size in sizes.items()}  # of a token
    prices = {"one": 0.0, "two": 0.0, "one_bytes": 0.0, "two_bytes": 0.0}
    for node, size in sizes.items():
        others = ranks - size
        sent_pairs = received_pairs = size * pairs * others / ranks
        crossing = [tokens * reached[other] for other in sizes if other != node]  # of one rank
        received = others * tokens * reached[node]
        moved = pairs * (size - 1) / size  # rows from a rank to others of its node, with two levels
        # Rows are packed and sorted at both ends of a message; in a node's memory they are written and summed once.
        one, two = 8 * pairs, (3 if pushed else 8) * pairs
        if chunk_rows is not None:
            sent_pairs = received_pairs = size * others * chunk_rows
            crossing = [min(tokens, sizes[other] * chunk_rows) for other in sizes if other != node]
            received = others * min(tokens, size * chunk_rows)
            moved = -(-ranks // size) * (size - 1) * chunk_rows
            # Chunks that return are gathered whole.
            one += 2 * (ranks * chunk_rows - pairs)
            two += 0 if pushed else 2 * (ranks * chunk_rows - pairs)
        elsewhere = sum(crossing)
        links = {
            "one": (sent_pairs, received_pairs, _WEIGHT, others, _ROUNDS_ONE),
            "two": (size * elsewhere, received, PAIR_BYTES * top_k, len(sizes) - 1, _ROUNDS_TWO),
        }
        copies = {"one": one, "two": two + 4 * elsewhere + 3 * tokens}
        for name, (out, into, more, messages, rounds) in links.items():
            # Rows that go out come back as sums, so that both directions carry as much, but for what is beside rows.
            forth, back = out * (row_bytes + more) + into * row_bytes, into * (row_bytes + more) + out * row_bytes
            nic = max(forth, back) if topology.full_duplex else forth + back
            link = topology.network
            price = rounds * (link.latency_us + messages * link.message_us)
            price += nic / (topology.nics_per_node or size) / (link.gigabytes_per_s * 1e3)
            price += copies[name] * row_bytes / (topology.memory_gigabytes_per_s * 1e3)
            if name == "two" and not pushed:
                price += topology.node.us(2 * moved * row_bytes, _INSIDE * (size - 1))
                price += (_INSIDE - 1) * topology.node.latency_us
            elif name == "two" and size > 1:
                price += _BARRIERS * (topology.node.latency_us + (size - 1) * topology.node.message_us)
            prices[name] = max(prices[name], price)
            prices[f"{name}_bytes"] = max(prices[f"{name}_bytes"], back)
    return LevelPrices(**prices)
