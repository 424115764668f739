"""Random redistributions on many ranks, on nodes of several kinds."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import numpy as np

NODES = "8 ranks", "96 ranks", "1 to 12 ranks", "8 or 5 ranks", "ranks dealt out in turn"
FAMILIES = "plain", "partial", "strided"


class Request(NamedTuple):
    """The mesh shape, what nodes are like, the layouts, the global shape."""

    mesh: tuple[int, ...]
    nodes: str
    source: str
    target: str
    shape: tuple[int, ...]
    family: str

    def node_of_ranks(self) -> np.ndarray:
        """[size] the node of each rank."""
        return np.array(_nodes(int(np.prod(self.mesh)), self.nodes))


def _nodes(size: int, kind: str) -> list[int]:
    match kind:
        case "8 ranks":
            return [i // 8 for i in range(size)]
        case "96 ranks":
            return [i // 96 for i in range(size)]
        case "8 or 5 ranks":
            half = size // 2 // 8 * 8
            return [i // 8 if i < half else half // 8 + (i - half) // 5 for i in range(size)]
        case "ranks dealt out in turn":
            return [i % max(2, size // 8) for i in range(size)]
    random, nodes = Random(f"{size} {kind}"), list[int]()
    while len(nodes) < size:
        nodes += [nodes[-1] + 1 if nodes else 0] * random.randint(1, 12)
    return nodes[:size]


def random_requests(size: int, count: int, seed: int) -> list[Request]:
    """Requests on `size` ranks, families and kinds of nodes in turn."""
    random = Random(f"{size} {seed}")
    drawn: list[Request] = []
    while len(drawn) < count:
        family, nodes = FAMILIES[len(drawn) % 3], NODES[len(drawn) // 3 % 5]
        mesh = _factors(random, size)
        ndim = random.randint(1, 3)
        shape = tuple(_size(random) for _ in range(ndim))
        source, target = (_layout(random, mesh, ndim, family, is_source) for is_source in (True, False))
        if source != target and (family == "plain" or "P" in source or "/" in source + target):
            drawn.append(Request(mesh, nodes, source, target, shape, family))
    return drawn


def _factors(random: Random, size: int) -> tuple[int, ...]:
    bits = size.bit_length() - 1
    ends = sorted(random.sample(range(1, bits), random.randint(0, min(3, bits - 1))))
    return tuple(1 << (b - a) for a, b in zip([0, *ends], [*ends, bits], strict=True))


def _size(random: Random) -> int:
    return random.choice([1 << random.randint(5, 16), 3 * (1 << random.randint(4, 14)), random.randint(3, 70_000)])


def _layout(random: Random, mesh: tuple[int, ...], ndim: int, family: str, is_source: bool) -> str:
    tokens = ["R", *(f"S{d}" for d in range(ndim))]
    if family == "partial" and is_source:
        tokens += ["P", "P"]
    if family == "strided":
        tokens += [f"S{d}/{split}" for d in range(ndim) for split in (2, 3)]
    drawn = [random.choice(tokens) for _ in mesh]
    text, orders = " ".join(drawn), []
    for d in range(ndim):
        order = [m for m, token in enumerate(drawn) if token == f"S{d}"]
        shuffled = random.sample(order, len(order))
        if shuffled != order and not any(token.startswith(f"S{d}/") for token in drawn):
            orders.append(f"{d}:{','.join(map(str, shuffled))}")
    return text + (" @ " + " ".join(orders) if orders else "")
