"""Requests in which every rank keeps a slice of its shard."""

from __future__ import annotations

import itertools

import pytest
import torch
from brute_force_oracle import Sizes, held_indices, layout_texts

from shardweave.planner import Mesh, planner_of

SHAPES: tuple[Sizes, ...] = ((7, 5), (1, 4), (0, 3), (12, 8))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 3), (2, 1)], ids=str)
def test_local_slice_matches_oracle(mesh_shape: Sizes) -> None:
    texts = list(layout_texts(len(mesh_shape), ("R", "S0", "S1")))
    sliced = 0
    for source, target in itertools.product(texts, repeat=2):
        for rank in range(Mesh(mesh_shape).size):
            planner = planner_of(mesh_shape, 2, "float32", source, target, rank=rank)
            if planner.local_slice is None:
                continue
            for shape in SHAPES:
                held, start, extent = planner.local_slice.of(shape)
                before, after = (held_indices(mesh_shape, shape, text)[rank] for text in (source, target))
                assert held == tuple(before.shape)
                box = tuple(slice(low, low + n) for low, n in zip(start, extent, strict=True))
                assert torch.equal(before[box], after), (source, target, shape, rank)
                sliced += 1
    assert sliced
