"""Routings to try the token kernels on, and what they must come to, by loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

POISON = 12345.0


@dataclass
class Case:
    """The ids of all ranks and how slots are divided. `rows[r][t][k]` is (owner, row), or None."""

    ids: list[np.ndarray]  # [T, K] each
    experts: int
    bounds: tuple[int, ...]
    align: int = 1
    capacity: int = 0
    expert_capacity: int | None = None
    batched: bool = False
    slot_of: list[np.ndarray] | None = None  # of each rank
    rows: list[list[list[tuple[int, int] | None]]] = field(default_factory=list)
    slot: list[np.ndarray] = field(default_factory=list)
    place: list[np.ndarray] = field(default_factory=list)
    matrix: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def slots(self) -> int:
        return self.bounds[-1]

    def solve(self) -> Case:
        """Fill in what is expected."""
        self.matrix = np.zeros((self.ranks, self.slots + 1), np.int32)
        for r, ids in enumerate(self.ids):
            slot, place = np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32)
            for t, k in np.ndindex(*ids.shape):
                expert = int(ids[t, k])
                if 0 <= expert < self.experts:
                    s = int(self.slot_of[r][expert]) if self.slot_of else expert
                    slot[t, k], place[t, k] = s, self.matrix[r, s]
                    self.matrix[r, s] += 1
                elif expert != -1:
                    self.matrix[r, -1] += 1
            self.slot.append(slot)
            self.place.append(place)
        for owner in range(self.ranks):
            end = 0
            for s in range(self.bounds[owner], self.bounds[owner + 1]):
                kept = int(self.matrix[:, s].sum())
                if self.expert_capacity is not None:
                    kept = min(kept, self.expert_capacity)
                begin, length = end, -(-kept // self.align) * self.align
                end += self.expert_capacity if self.batched else length
                self.begins.append(min(begin, self.capacity))
                self.ends.append(min(end, self.capacity))
                self.kept.append(min(kept, self.ends[-1] - self.begins[-1]))
        for r, ids in enumerate(self.ids):
            found = []
            for t in range(len(ids)):
                pairs = zip(self.slot[r][t], self.place[r][t], strict=True)
                found.append([self._row(r, int(s), int(p)) for s, p in pairs])
            self.rows.append(found)
        return self

    def _row(self, rank: int, slot: int, place: int) -> tuple[int, int] | None:
        if slot < 0:
            return None
        in_group = int(self.matrix[:rank, slot].sum()) + place
        if in_group >= self.kept[slot]:
            return None
        owner = next(o for o in range(self.ranks) if self.bounds[o] <= slot < self.bounds[o + 1])
        return owner, self.begins[slot] + in_group

    def padding(self, owner: int) -> list[int]:
        return [
            row
            for s in range(self.bounds[owner], self.bounds[owner + 1])
            for row in range(self.begins[s] + self.kept[s], self.ends[s])
        ]


def even_bounds(slots: int, ranks: int) -> tuple[int, ...]:
    """The first ranks have one slot more where they do not divide."""
    each, more = divmod(slots, ranks)
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


def combined(
    case: Case, rank: int, buffers: list[torch.Tensor], weights: torch.Tensor | None, add: torch.Tensor | None
) -> torch.Tensor:
    """The definition of combine, token by token in NumPy's float32."""
    hidden, dtype = buffers[0].shape[1], buffers[0].dtype
    out = torch.empty((len(case.ids[rank]), hidden), dtype=dtype)
    for t, entries in enumerate(case.rows[rank]):
        total = np.zeros(hidden, np.float32)
        for owner in range(case.ranks):
            partial = np.zeros(hidden, np.float32)
            for k, entry in enumerate(entries):
                if entry is not None and entry[0] == owner:
                    value = buffers[owner][entry[1]].float().numpy()
                    partial = partial + (value if weights is None else value * np.float32(weights[t, k].item()))
            total = total + torch.from_numpy(partial).to(dtype).float().numpy()
        if add is not None:
            total = total + add[t].float().numpy()
        out[t] = torch.from_numpy(total).to(dtype)
    return out
