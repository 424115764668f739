"""How much of a sum each node adds, so that no node receives much more than the others."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from .exchange.node_change import NodeChange, layout_change, node_transfer_table
from .exchange.transfer_table import FILL
from .layouts.distinct import distinct, numbered
from .layouts.layout import Layout
from .layouts.node_layout import NodeLayout
from .layouts.nodes import nodes_of

UNITS = 24
"""The whole of what nodes share, in the unit of their weights."""
_POWER = 16  # of the bytes into each node: their sum grows with the largest
_MOST_MOVES = 600  # groups times pairs of nodes


def balanced_shares(layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: str) -> tuple[Layout, ...] | None:
    """A path through a "shares" layout with weights by which the busiest node receives least; None if there is no such
    layout in it, or if equal parts do as well.

    What enters the nodes is taken to grow with each part as it does where parts are equal. Everything is computed in
    integers, so that all ranks find the same.
    """
    at = next((i for i, x in enumerate(layouts) if isinstance(x, NodeLayout) and x.kind == "shares"), None)
    if at is None:
        return None
    shares = layouts[at]
    assert isinstance(shares, NodeLayout)
    nodes = nodes_of(shares.mesh.rank_array, shares.nodes)
    numbers, node = numbered(nodes)
    groups, group = numbered(shares.group)
    entering = np.zeros((len(groups), len(numbers), len(numbers)), dtype=np.int64)  # by group, owner, node entered
    for i, (a, b) in enumerate(pairwise(layouts)):
        if i + 1 < at:
            continue  # sums inside of nodes
        change = layout_change(shares.mesh, dtype, a, b, shares.nodes)
        if not isinstance(change, NodeChange):
            return None
        table = node_transfer_table(change, shape)
        receiver = np.broadcast_to(table.receiver[:, None], table.sender.shape)
        elements = np.broadcast_to(table.elements[:, None], table.sender.shape)
        far = (table.sender != FILL) & (node[table.sender] != node[receiver])
        owner = receiver if i + 1 == at else table.sender
        if i <= at:
            np.add.at(entering, (group[owner[far]], node[owner[far]], node[receiver[far]]), elements[far])
    present = [distinct(node[group == g]).tolist() for g in range(len(groups))]
    if sum(len(p) ** 2 for p in present) > _MOST_MOVES:
        return None
    weights = _balanced([{n: [len(p) * x for x in entering[g, n].tolist()] for n in p} for g, p in enumerate(present)])
    if weights is None:
        return None
    of_position = tuple(weights[g][n] for g, n in zip(group.tolist(), node.tolist(), strict=True))
    balanced = NodeLayout(
        "shares", shares.base, shares.tensor_dim, shares.along, shares.mesh, shares.nodes, of_position
    )
    return (*layouts[:at], balanced, *layouts[at + 1 :])


def _balanced(entering: list[dict[int, list[int]]]) -> list[dict[int, int]] | None:
    """For each group the units of each of its nodes, in sum `UNITS`; None if they are equal.

    Args:
        entering: for each group and node of it, what enters each node if this one has all of the group.
    """
    weights = [{n: UNITS // len(of) + (i < UNITS % len(of)) for i, n in enumerate(of)} for of in entering]
    equal = [dict(of) for of in weights]
    number = len(next(iter(entering[0].values())))
    into = [sum(w * entering[g][n][k] for g, of in enumerate(weights) for n, w in of.items()) for k in range(number)]
    scale = max(*into, 1)
    moves = [(g, a, b) for g, of in enumerate(entering) for a, b in product(of, of) if a != b]
    steps = {}  # what each move changes, by the index of the node
    for g, a, b in moves:
        changes = enumerate(y - x for x, y in zip(entering[g][a], entering[g][b], strict=True))
        steps[g, a, b] = [(k, change) for k, change in changes if change]
    powers = [x**_POWER for x in into]
    while True:
        best, chosen = 0, None
        for move in moves:
            g, a, _ = move
            if weights[g][a]:
                change = sum([(into[k] + y) ** _POWER - powers[k] for k, y in steps[move]])
                if change < best:
                    best, chosen = change, move
        if chosen is None or -best * 10**6 < sum(powers):
            break
        g, a, b = chosen
        weights[g][a] -= 1
        weights[g][b] += 1
        for k, y in steps[chosen]:
            into[k] += y
            powers[k] = into[k] ** _POWER
    return None if weights == equal or max(into) >= scale else weights
