"""Requests in which every rank keeps a slice of its shard."""

from __future__ import annotations

import itertools

import pytest
import torch
from brute_force_oracle import Sizes, held_indices, layout_texts

from shardweave.planner import Local, Mesh, planner_of

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


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_local_slice_found_for_local_steps(mesh_shape: Sizes) -> None:
    for source, target in itertools.product(layout_texts(len(mesh_shape), ("R", "S0", "S1")), repeat=2):
        planner = planner_of(mesh_shape, 2, "float32", source, target, rank=0)
        steps = planner.program((64, 64)).steps  # even sizes, so that no exchange happens to be local
        assert (planner.local_slice is not None) == (len(steps) == 1 and type(steps[0]) is Local), (source, target)


@pytest.mark.parametrize("source,target", [("P", "S0"), ("R", "P"), ("S0/2 R", "S0/2 S1"), ("S0", "P"), ("Pavg", "R")])
def test_local_slice_none_if_reduced_or_strided(source: str, target: str) -> None:
    mesh_shape = (2,) * len(source.split())
    assert planner_of(mesh_shape, 2, "float32", source, target, rank=0).local_slice is None
