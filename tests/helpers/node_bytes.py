"""The elements that enter nodes: the least there can be, by brute force, and those of a program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import brute_force_oracle as oracle
import numpy as np

from shardweave.planner import Program


def least_into_busiest_node(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str, nodes: Sequence[int]
) -> float:
    """The least that the node with the most receives from others, in elements, unless nodes relay sums.

    A node must receive what a rank of it wants and no rank of it holds: of a sum, at least one value per element if it
    lacks a term, and where no other node wants the element, as many as bring all terms. Another node that adds terms
    first would receive some of them in its place, but in a step before, so that nothing is done sooner. Over all nodes
    together, an element needs at least as many transfers as bring its terms to one node, and one for every other node
    that wants it and lacks a term.

    Args:
        source, target: layouts as text; partial in `target` only where it is partial in `source`.
        nodes: the node of each position of the mesh.
    """
    a, b = oracle.read(source), oracle.read(target)
    held, wanted = (oracle.held_mask(mesh_shape, shape, text) for text in (source, target))
    places = np.array(oracle.coordinates(mesh_shape))
    kept = [m for m in a.partial_dims if a.tokens[m] == b.tokens[m]]
    reduced = [m for m in a.partial_dims if m not in kept]
    number = max(nodes) + 1
    into, transfers = np.zeros(number), 0
    terms = {place: i for i, place in enumerate(dict.fromkeys(map(tuple, places[:, reduced].tolist())))}
    for group in dict.fromkeys(map(tuple, places[:, kept].tolist())):
        has = np.zeros((number, len(terms), held.shape[1]), dtype=bool)
        wants = np.zeros((number, held.shape[1]), dtype=bool)
        for position, node in enumerate(nodes):
            if tuple(places[position, kept]) == group:
                has[node, terms[tuple(places[position, reduced])]] |= held[position]
                wants[node] |= wanted[position]
        lacking = wants & ~has.all(axis=1)
        into += lacking.sum(axis=1)
        patterns, counts = np.unique(
            np.concatenate([has.reshape(-1, held.shape[1]), wants, lacking]), axis=1, return_counts=True
        )
        for pattern, count in zip(patterns.T, counts.tolist(), strict=True):
            of_terms = pattern[: has[..., 0].size].reshape(number, -1)
            into_one = _transfers(of_terms, pattern[-number:], pattern[-2 * number : -number])
            transfers += count * into_one
            wanting = np.flatnonzero(pattern[-2 * number : -number])
            if len(wanting) == 1:
                into[wanting[0]] += count * max(0, into_one - 1)
    return max(into.max(), transfers / number)


def _transfers(has: np.ndarray, lacking: np.ndarray, wants: np.ndarray) -> int:
    """The transfers of one element: `has` [nodes, terms], `lacking` [nodes], `wants` [nodes]."""
    if not lacking.any():
        return 0
    number = len(has)
    best = None
    for node in np.flatnonzero(wants) if wants.sum() == 1 else range(number):
        others = [n for n in range(number) if n != node]
        for count in range(number):
            chosen = (list(c) for c in combinations(others, count))
            if any(has[[node, *c]].any(axis=0).all() for c in chosen):
                total = count + int(lacking[others].sum())
                best = total if best is None else min(best, total)
                break
    assert best is not None
    return best


def into_nodes(program: Program, nodes: Sequence[int]) -> list[int]:
    """The elements that enter each node in all steps of a program of all ranks."""
    into = [0] * (max(nodes) + 1)
    by_position = np.array(nodes)
    for step in program.steps:
        boxes = step.boxes
        receiver = np.broadcast_to(boxes.receiver[:, None], boxes.sender.shape)
        far = (boxes.sender >= 0) & (by_position[boxes.sender] != by_position[receiver])
        elements = np.broadcast_to(boxes.elements[:, None], boxes.sender.shape)
        for node in range(len(into)):
            into[node] += int(elements[far & (by_position[receiver] == node)].sum())
    return into
