"""NodeRanks: which ranks share a node, the order in which their results are summed, and who forwards whose tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class NodeRanks:
    """The ranks of each node, all counted from 0 to W - 1.

    Args:
        nodes: the node of each rank, numbered from 0 in order of their first ranks.

    Attributes:
        members: the ranks of each node, ascending.
        order: all ranks, node by node: the order in which their results are summed.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        self.members: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
        for rank, node in enumerate(nodes):
            self.members[node].append(rank)
        self.order = [rank for members in self.members for rank in members]
        self._position = {rank: i for i, rank in enumerate(self.order)}

    def position(self, rank: int) -> int:
        """Return the index of a rank in `order`."""
        return self._position[rank]

    def forwarder(self, rank: int, node: int) -> int:
        """Return the rank of another node that forwards the tokens of `rank` there. A node's ranks take turns."""
        members, turn = self.members[node], self._position[rank]
        if node < self.nodes[rank]:
            turn -= len(members)  # ranks of the node itself take no turn
        return members[turn % len(members)]

    def sources(self, rank: int) -> list[int]:
        """Return the ranks of other nodes whose tokens `rank` forwards."""
        node = self.nodes[rank]
        return [r for r, other in enumerate(self.nodes) if other != node and self.forwarder(r, node) == rank]

    def token_places(self, most: int, chunk_capacity: int) -> list[int]:
        """Return for how many of its at most `most` tokens a rank's message to each other node has places, with chunks
        of fixed size. A token crosses if it has a row there, so there are no more tokens than rows."""
        return [min(most, chunk_capacity * len(members)) for members in self.members]

    def most_sent(self, tokens: int, top_k: int, chunk_capacity: int | None) -> int:
        """Return how many of its at most `tokens` tokens a rank sends to other nodes, at most: each once for each node.

        Args:
            chunk_capacity: of chunks of fixed size, whose places count; None: of exact size.
        """
        if chunk_capacity is None:
            return tokens * min(top_k, len(self.members) - 1)
        places = self.token_places(tokens, chunk_capacity)
        return sum(places) - min(places)

    def most_forwarded(self, tokens: int, chunk_capacity: int | None) -> int:
        """Return how many tokens a rank forwards, at most; arguments as of `most_sent`."""
        most = [tokens] * len(self.members)
        if chunk_capacity is not None:
            most = self.token_places(tokens, chunk_capacity)
        return max(len(self.sources(rank)) * most[node] for rank, node in enumerate(self.nodes))


def numbered(nodes: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Number nodes from 0 in order of their first ranks; None if all ranks share one."""
    number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    return tuple(number[node] for node in nodes) if len(number) > 1 else None
