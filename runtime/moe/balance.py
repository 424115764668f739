"""balance_experts: an expert map that divides the tokens of skewed routing evenly among ranks. numpy only.

Groups of experts are assigned to nodes first. Inside each node experts get replicas and places: replicas by the largest
load of a replica, places by longest processing time first, then swaps and other replicas while they lower the largest
load, from several starts. Loads are those of the dispatcher's own rule for replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ArgumentError, shown
from .config import MOST_RANKS, whole_number

Placement = list[list[int]]
"""The experts of each rank."""
MOST_TRIES = 40_000
"""The changes of placements that are examined, of all nodes together: about a second."""
MOST_SWAPS = 2_000
"""The swaps of groups between nodes, likewise."""
RESTARTS = 30
EVEN = 1.001
"""Ranks whose largest load is this many times the mean are not improved further."""


@dataclass(frozen=True)
class BalancedExperts:
    """The result of `balance_experts`.

    Attributes:
        expert_map: the experts of each rank, for `DispatchOptions(expert_map=)` and `move_experts`.
        per_rank: the (token, k) pairs of each rank with this map.
        imbalance: the maximum of per_rank divided by its mean; 1 without tokens.
        crossing: the fraction of pairs whose expert is on another node than their token; 0 without tokens.
    """

    expert_map: tuple[tuple[int, ...], ...]
    per_rank: tuple[float, ...]
    imbalance: float
    crossing: float


def balance_experts(
    pairs: torch.Tensor, experts_per_rank: int, *, nodes: int = 1, groups: int | None = None
) -> BalancedExperts:
    """Choose the experts of each rank, replicas included, so that ranks have equal numbers of (token, k) pairs.

    The objective is the largest number of pairs of a node, then of a rank. A replica counts the pairs that
    `TokenDispatcher` sends to it: a rank uses its own replica, else replica r mod n of n. The largest number
    of a node (without nodes: of a rank) is never above that of experts in order, repeated until all ranks are full. The
    result depends on the arguments only: ranks with equal arguments choose the same map. `pairs` is read on the host.

    Args:
        pairs: [W, E], the pairs of each expert by source rank: `routed.load().per_source`, or the sum of several.
        experts_per_rank: the physical experts of each rank, replicas included: at least E / W, and at most the experts
            of a node. Each expert is at most once on a rank.
        nodes: ranks are on this many nodes, W / nodes consecutive ones each. All replicas of an expert are on one node.
        groups: the router chooses experts of few groups, E / groups consecutive experts each: groups stay whole on a
            node, so that a token's rows cross to few nodes. A multiple of `nodes`. Default: E, each expert by itself.

    Raises:
        ArgumentError: a shape, dtype or number that is not allowed; pairs that are negative or not finite.
    """
    table = _checked_pairs(pairs)
    ranks, experts = table.shape
    nodes = whole_number("nodes", nodes, 1, MOST_RANKS)
    groups = experts if groups is None else whole_number("groups", groups, 1, experts)
    if ranks % nodes:
        raise ArgumentError(f"nodes: {nodes}; allowed: a divisor of the {ranks} ranks")
    if experts % groups or groups % nodes:
        raise ArgumentError(f"groups: {groups}; allowed: a divisor of {experts} experts, a multiple of {nodes} nodes")
    each = experts // nodes
    least = -(-each * nodes // ranks)
    experts_per_rank = whole_number("experts_per_rank", experts_per_rank, least, each)
    ranks_of = np.arange(ranks).reshape(nodes, -1)
    expert_map: Placement = []
    for node, own in enumerate(_experts_of_nodes(table, nodes, groups)):
        expert_map += _NodeSearch(table, own, ranks_of[node].tolist(), experts_per_rank, MOST_TRIES // nodes).run()
    loads, crossing = np.zeros(ranks), 0.0
    for expert in range(experts):
        sent = _by_rank(table, expert, [r for r, held in enumerate(expert_map) if expert in held])
        loads += sent
        (node_of,) = {r * nodes // ranks for r, held in enumerate(expert_map) if expert in held}
        crossing += table[:, expert].sum() - table[ranks_of[node_of], expert].sum()
    total = loads.sum()
    return BalancedExperts(
        tuple(tuple(held) for held in expert_map),
        tuple(loads.tolist()),
        float(loads.max() / loads.mean()) if total else 1.0,
        float(crossing / total) if total else 0.0,
    )


def _checked_pairs(pairs: torch.Tensor) -> np.ndarray:
    """Return `pairs` as float64."""
    if not isinstance(pairs, torch.Tensor) or pairs.dim() != 2 or 0 in pairs.shape or pairs.is_complex():
        given = f"{pairs.dtype} of shape {tuple(pairs.shape)}" if isinstance(pairs, torch.Tensor) else shown(pairs)
        raise ArgumentError(f"pairs: {given}; allowed: numbers [W, E], W ranks and E experts, at least one each")
    table: np.ndarray = pairs.detach().cpu().double().numpy()
    if not np.isfinite(table).all() or table.min() < 0:
        raise ArgumentError(f"pairs: {table.min()} to {table.max()}; allowed: finite numbers, at least 0")
    return table


def _by_rank(table: np.ndarray, expert: int, replicas: Sequence[int]) -> np.ndarray:
    """Return the pairs of an expert that arrive at each rank, [W]. `replicas`: the ranks that have it, ascending."""
    destination = np.array(replicas)[np.arange(len(table)) % len(replicas)]
    destination[list(replicas)] = replicas
    return np.bincount(destination, table[:, expert], len(table))


def _experts_of_nodes(table: np.ndarray, nodes: int, groups: int) -> list[list[int]]:
    """Return the experts of each node: groups in descending order of pairs, each to the node with the fewest pairs that
    has room; then swaps that lower the largest load, and those that lower the pairs that cross nodes without raising
    it."""
    ranks, experts = table.shape
    each = experts // groups
    # [nodes, groups]: pairs by source node.
    sent = table.reshape(nodes, ranks // nodes, groups, each).sum((1, 3))
    load, at = sent.sum(0), np.zeros(groups, np.int64)
    loads, room = np.zeros(nodes), np.full(nodes, groups // nodes)
    for group in np.argsort(-load, kind="stable"):
        # Of equal nodes the one that has most of the tokens.
        node = min(np.flatnonzero(room), key=lambda n: (loads[n], -sent[n, group]))
        at[group], loads[node], room[node] = node, loads[node] + load[group], room[node] - 1
    in_order = np.arange(groups) * nodes // groups
    of = min((_swapped(of, load, sent) for of in (at, in_order)), key=lambda of: np.bincount(of, load).max())
    return [[g * each + e for g in np.flatnonzero(of == n).tolist() for e in range(each)] for n in range(nodes)]


def _swapped(of: np.ndarray, load: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Return the node of each group after swaps of two groups, each the best one."""
    nodes, groups = sent.shape
    of, number = of.copy(), np.arange(groups)
    for by_load in (True, False):
        for _ in range(MOST_SWAPS):
            loads = np.bincount(of, load, nodes)
            # [groups, groups]: what the node of the first gives to that of the second.
            given = load[:, None] - load
            first, second = loads[of][:, None] - given, loads[of] + given
            if by_load:
                change = first**2 + second**2 - (loads**2)[of][:, None] - (loads**2)[of]
                allowed = loads[of][:, None] == loads.max()
            else:
                kept = sent[of, number]
                moved = sent[of]  # [i, j]: pairs of group j that the node of group i sends
                change = kept[:, None] + kept - moved - moved.T
                allowed = np.maximum(first, second) <= loads.max()
            change = np.where(allowed & (of[:, None] != of), change, 0.0)
            a, b = np.unravel_index(change.argmin(), change.shape)
            if change[a, b] >= -1e-9 * (loads**2 if by_load else load).sum():
                break
            of[a], of[b] = of[b], of[a]
    return of


class _NodeSearch:
    """Places the experts of a node on its ranks, `each` physical experts on a rank.

    Args:
        tries: the number of changes that may be examined.
    """

    def __init__(self, table: np.ndarray, experts: Sequence[int], ranks: Sequence[int], each: int, tries: int) -> None:
        self._table, self._experts, self._ranks, self._each, self._tries = table, experts, ranks, each, tries
        self._contributions: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def run(self) -> Placement:
        """Return the best placement that is found from three kinds of starts: by descending load, in numerical order,
        and random changes of the best so far."""
        n, size, random = len(self._experts), len(self._ranks), np.random.default_rng(0)
        in_order = [[self._experts[(i * self._each + j) % n] for j in range(self._each)] for i in range(size)]
        best, score = in_order, self._score(in_order)
        for start in (self._packed(), in_order, *[None] * RESTARTS):
            found = self._improved(start if start is not None else _shaken(best, random))
            if (new := self._score(found)) < score:
                best, score = found, new
            if self._tries <= 0:
                break
        return [sorted(held) for held in best]

    def _contribution(self, expert: int, held: tuple[int, ...]) -> np.ndarray:
        """Return the pairs of an expert on each rank of the node, if the ranks `held` have it."""
        key = expert, held
        if key not in self._contributions:
            everywhere = _by_rank(self._table, expert, [self._ranks[i] for i in held])
            self._contributions[key] = everywhere[list(self._ranks)]
        return self._contributions[key]

    def _where(self, placed: Placement) -> dict[int, tuple[int, ...]]:
        return {e: tuple(i for i, held in enumerate(placed) if e in held) for e in self._experts}

    def _loads(self, where: dict[int, tuple[int, ...]]) -> np.ndarray:
        loads: np.ndarray = np.sum([self._contribution(e, held) for e, held in where.items()], axis=0)
        return loads

    def _score(self, placed: Placement) -> float:
        return float(self._loads(self._where(placed)).max())

    def _packed(self) -> Placement:
        """Give each spare slot to the expert with most pairs for each replica, then place replicas in descending order
        of pairs, each on the rank with the fewest pairs that has room and no replica of this expert."""
        load, size = self._table.sum(0), len(self._ranks)
        number = dict.fromkeys(self._experts, 1)
        for _ in range(size * self._each - len(self._experts)):
            more = max((e for e in self._experts if number[e] < size), key=lambda e: (load[e] / number[e], -e))
            number[more] += 1
        placed: Placement = [[] for _ in self._ranks]
        loads = [0.0] * size
        for expert in sorted(self._experts, key=lambda e: (-load[e] / number[e], e)):
            for _ in range(number[expert]):
                free = [i for i, held in enumerate(placed) if len(held) < self._each and expert not in held]
                if not free:
                    _make_room(placed, expert, self._each)
                    continue
                i = min(free, key=lambda i: (loads[i], i))
                placed[i].append(expert)
                loads[i] += load[expert] / number[expert]
        return placed

    def _improved(self, placed: Placement) -> Placement:
        """Return the placement after changes, each the first that lowers the largest load, or at an equal one the sum
        of squares."""
        placed = [list(held) for held in placed]
        where = self._where(placed)
        loads = self._loads(where)
        while loads.max() > EVEN * loads.mean():
            better = self._better(placed, where, loads)
            if better is None:
                break
            slots, changed, loads = better
            for rank, slot, expert in slots:
                placed[rank][slot] = expert
            where |= changed
        return placed

    def _better(
        self, placed: Placement, where: dict[int, tuple[int, ...]], loads: np.ndarray
    ) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, ...]], np.ndarray] | None:
        """Return the first change that is an improvement, and the loads afterwards."""
        largest, squares = loads.max(), (loads**2).sum()
        for slots, changed in self._changes(placed, where, loads):
            if self._tries <= 0:
                break
            self._tries -= 1
            after = loads.copy()
            for e, held in changed.items():
                after += self._contribution(e, held) - self._contribution(e, where[e])
            # The tolerances keep rounding of sums from counting.
            if after.max() < largest * (1 - 1e-9) or (
                after.max() <= largest * (1 + 1e-12) and (after**2).sum() < squares * (1 - 1e-9)
            ):
                return slots, changed, after
        return None

    def _changes(
        self, placed: Placement, where: dict[int, tuple[int, ...]], loads: np.ndarray
    ) -> Iterator[tuple[list[tuple[int, int, int]], dict[int, tuple[int, ...]]]]:
        """Yield (rank, slot, new expert) of the slots that change, and the ranks of the experts that move: swaps of an
        expert of the fullest rank with one of another rank, and other experts in place of replicas."""

        def moved(expert: int, away: int, to: int) -> tuple[int, ...]:
            return tuple(sorted({*where[expert]} - {away} | {to}))

        fullest = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            for i, x in enumerate(placed[fullest]):
                for j, y in enumerate(placed[other]):
                    if other != fullest and x not in placed[other] and y not in placed[fullest]:
                        changed = {x: moved(x, fullest, other), y: moved(y, other, fullest)}
                        yield [(fullest, i, y), (other, j, x)], changed
        for rank, held in enumerate(placed):
            for slot, y in enumerate(held):
                if len(where[y]) > 1:
                    for x in placed[fullest] if rank != fullest else self._experts:
                        if x not in held:
                            fewer = tuple(i for i in where[y] if i != rank)
                            yield [(rank, slot, x)], {x: tuple(sorted((*where[x], rank))), y: fewer}


def _make_room(placed: Placement, expert: int, each: int) -> None:
    """Place an expert that all ranks with room have already: move another expert there, of a rank without this one."""
    i = next(i for i, held in enumerate(placed) if len(held) < each)
    for held in placed:
        movable = [e for e in held if e not in placed[i]]
        if expert not in held and movable:
            held[held.index(movable[-1])] = expert
            placed[i].append(movable[-1])
            return
    raise AssertionError("more replicas than ranks")


def _shaken(placed: Placement, random: np.random.Generator) -> Placement:
    """Return the placement after up to three random swaps."""
    placed = [list(held) for held in placed]
    for _ in range(3):
        a, b = random.integers(len(placed), size=2)
        i, j = random.integers(len(placed[0]), size=2)
        x, y = placed[a][i], placed[b][j]
        if x not in placed[b] and y not in placed[a]:
            placed[a][i], placed[b][j] = y, x
    return placed
