"""Routings for tests of the token kernels, and the expected results by loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

POISON = 12345.0


@dataclass
class Case:
    """The ids of all ranks and the bounds of physical experts. `rows[r][t][k]` is (destination, row), or None."""

    ids: list[np.ndarray]  # [T, K] each
    experts: int
    bounds: tuple[int, ...]
    align: int = 1
    capacity: int = 0
    expert_capacity: int | None = None
    batched: bool = False
    physical_expert_of: list[np.ndarray] | None = None  # of each rank
    rows: list[list[list[tuple[int, int] | None]]] = field(default_factory=list)
    physical_expert: list[np.ndarray] = field(default_factory=list)
    place: list[np.ndarray] = field(default_factory=list)
    matrix: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def physical_experts(self) -> int:
        return self.bounds[-1]

    def solve(self) -> Case:
        """Compute the expected values."""
        self.matrix = np.zeros((self.ranks, self.physical_experts + 1), np.int32)
        for r, ids in enumerate(self.ids):
            physical_expert, place = np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32)
            for t, k in np.ndindex(*ids.shape):
                expert = int(ids[t, k])
                if 0 <= expert < self.experts:
                    s = int(self.physical_expert_of[r][expert]) if self.physical_expert_of else expert
                    physical_expert[t, k], place[t, k] = s, self.matrix[r, s]
                    self.matrix[r, s] += 1
                elif expert != -1:
                    self.matrix[r, -1] += 1
            self.physical_expert.append(physical_expert)
            self.place.append(place)
        for destination in range(self.ranks):
            end = 0
            for s in range(self.bounds[destination], self.bounds[destination + 1]):
                kept = int(self.matrix[:, s].sum())
                if self.expert_capacity is not None:
                    kept = min(kept, self.expert_capacity)
                begin, length = end, -(-kept // self.align) * self.align
                end += self.expert_capacity if self.batched else length
                self.begins.append(min(begin, self.capacity))
                self.ends.append(min(end, self.capacity))
                self.kept.append(min(kept, self.ends[-1] - self.begins[-1]))
        for r, ids in enumerate(self.ids):
            collected = []
            for t in range(len(ids)):
                pairs = zip(self.physical_expert[r][t], self.place[r][t], strict=True)
                collected.append([self._row(r, int(s), int(p)) for s, p in pairs])
            self.rows.append(collected)
        return self

    def _row(self, rank: int, physical_expert: int, place: int) -> tuple[int, int] | None:
        if physical_expert < 0:
            return None
        in_group = int(self.matrix[:rank, physical_expert].sum()) + place
        if in_group >= self.kept[physical_expert]:
            return None
        destination = next(o for o in range(self.ranks) if self.bounds[o] <= physical_expert < self.bounds[o + 1])
        return destination, self.begins[physical_expert] + in_group

    def padding(self, destination: int) -> list[int]:
        return [
            row
            for s in range(self.bounds[destination], self.bounds[destination + 1])
            for row in range(self.begins[s] + self.kept[s], self.ends[s])
        ]


def even_bounds(physical_experts: int, ranks: int) -> tuple[int, ...]:
    """Divide evenly; the first ranks have one more where the number does not divide."""
    each, more = divmod(physical_experts, ranks)
    return tuple(r * each + min(r, more) for r in range(ranks + 1))


def routing(rng: np.random.Generator, kind: str, tokens: int, k: int, experts: int) -> np.ndarray:
    if kind == "uniform":
        ids = rng.integers(0, experts, (tokens, k))
    elif kind == "zipf":
        ids = np.minimum(rng.zipf(1.3, (tokens, k)) - 1, experts - 1)
    elif kind == "hot":
        ids = np.full((tokens, k), experts - 1)
    elif kind == "none":
        ids = np.full((tokens, k), -1)
    else:  # holes, bad ids, repetitions
        ids = rng.integers(-3, experts + 3, (tokens, k))
        ids[:, k - 1] = ids[:, 0]
    return ids
