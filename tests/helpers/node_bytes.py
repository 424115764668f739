"""The elements that enter and leave nodes: the least there can be, by brute force, and those of a program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import brute_force_oracle as oracle
import numpy as np

from shardweave.planner import Program, Step

_PARTS = 12
_ROUNDS, _FINER = 4, 4  # each further round tries weights nearer to the best of the last


def least_into_busiest_node(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str, nodes: Sequence[int]
) -> float:
    """The least that the node with the most receives from others, in elements, unless nodes relay sums.

    For any weights of the nodes, of sum 1, the weighted mean of what enters them is at most what enters the busiest.
    For each element the least that it adds to that mean is known: a node that wants it and lacks a term receives one
    value at least, and one node, which need not want it, receives as many as bring all terms. The result is the largest
    of these means over many weights. By duality of linear programs the best weights give what can be reached if any
    share of the elements may take each of these ways.

    Where a single node wants an element, all its terms are added there: another node that added some first would
    receive them in its place, but in a step before, so that nothing is done sooner.

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
    found: list[tuple[np.ndarray, np.ndarray, int]] = []
    terms = {place: i for i, place in enumerate(dict.fromkeys(map(tuple, places[:, reduced].tolist())))}
    for group in dict.fromkeys(map(tuple, places[:, kept].tolist())):
        has = np.zeros((number, len(terms), held.shape[1]), dtype=bool)
        wants = np.zeros((number, held.shape[1]), dtype=bool)
        for position, node in enumerate(nodes):
            if tuple(places[position, kept]) == group:
                has[node, terms[tuple(places[position, reduced])]] |= held[position]
                wants[node] |= wanted[position]
        patterns = np.concatenate([has.reshape(-1, held.shape[1]), wants])
        for pattern, count in zip(*_distinct_columns(patterns), strict=True):
            found.append((_missing(pattern[:-number].reshape(number, -1)), pattern[-number:], count))
    weights, largest = _weights(number), 0.0
    for _ in range(_ROUNDS):
        means = np.zeros(len(weights))
        for missing, wants, count in found:
            means += count * _least_mean(missing, wants, weights)
        largest = max(largest, float(means.max()))
        best = weights[means.argmax()]
        weights = best + (weights - best) / _FINER
    return largest


def _weights(number: int) -> np.ndarray:
    """[n, nodes] weights of nodes: all multiples of 1/`_PARTS` for up to 4 nodes; otherwise those of one node, and
    equal."""
    if number > 4:
        return np.concatenate([np.eye(number), np.full((1, number), 1 / number)])
    bars = np.array(list(combinations(range(_PARTS + number - 1), number - 1)), dtype=np.int64)
    bars = bars.reshape(-1, number - 1)
    return (np.diff(bars, axis=1, prepend=-1, append=_PARTS + number - 1) - 1) / _PARTS


def _distinct_columns(table: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
    columns, counts = np.unique(table, axis=1, return_counts=True)
    return list(columns.T), counts.tolist()


def _missing(has: np.ndarray) -> np.ndarray:
    """[nodes] the least number of other nodes that bring a node all terms: `has` [nodes, terms]."""
    number = len(has)
    missing = np.zeros(number, dtype=np.int64)
    for node in range(number):
        others = [n for n in range(number) if n != node]
        sets = (list(c) for count in range(number) for c in combinations(others, count))
        missing[node] = next(len(c) for c in sets if has[[node, *c]].any(axis=0).all())
    return missing


def _least_mean(missing: np.ndarray, wants: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[n] the weighted mean of the values of one element that enter nodes: `missing`, `wants` [nodes], `weights`
    [n, nodes]."""
    if wants.sum() <= 1:
        return weights @ (wants * missing)
    lacking = wants & (missing > 0)
    return weights @ lacking + (weights * (missing - lacking)).min(axis=1)


def into_nodes(program: Program, nodes: Sequence[int]) -> list[int]:
    """The elements that enter each node in all steps of a program of all ranks."""
    into = np.zeros(max(nodes) + 1, dtype=np.int64)
    for step in program.steps:
        into += _between_nodes(step, nodes).sum(axis=0)
    return into.tolist()


def through_busiest_node(program: Program, nodes: Sequence[int]) -> int:
    """The elements that enter or leave the busiest node of each step, whichever are more, added up: the time of links
    that carry both directions at once."""
    between = [_between_nodes(step, nodes) for step in program.steps]
    return sum(int(max(step.sum(axis=0).max(), step.sum(axis=1).max())) for step in between)


def _between_nodes(step: Step, nodes: Sequence[int]) -> np.ndarray:
    """[nodes, nodes] the elements that each node sends to each other one."""
    by_position, number = np.array(nodes), max(nodes) + 1
    sender = step.boxes.sender
    receiver = np.broadcast_to(step.boxes.receiver[:, None], sender.shape)
    elements = np.broadcast_to(step.boxes.elements[:, None], sender.shape)
    far = (sender >= 0) & (by_position[sender] != by_position[receiver])
    between = np.zeros((number, number), dtype=np.int64)
    np.add.at(between, (by_position[sender[far]], by_position[receiver[far]]), elements[far])
    return between


def most_counted(nbytes: int) -> int:
    """The most that a link may count for so many bytes of data: with headers of packets and acknowledgements, gloo's
    own messages and barriers."""
    return int(nbytes * 1.02) + (1 << 15)
