from __future__ import annotations

import math

import brute_force_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner import Layout, Mesh
from shardweave.planner.index_sets import cells_meeting, cut, held_box, held_span

pytestmark = pytest.mark.plan


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(0, 7), st.integers(1, 9))
def test_cut_is_torch_chunk(extent: int, start: int, parts: int) -> None:
    chunks = list(torch.arange(start, start + extent).chunk(parts))
    chunks += [torch.empty(0, dtype=torch.long)] * (parts - len(chunks))
    for index, chunk in enumerate(chunks):
        low, high = cut((start, start + extent), parts, index)
        assert list(range(low, high)) == chunk.tolist()


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple))
    tokens = draw(
        st.lists(
            st.sampled_from(["R", "P", *(f"S{d}" for d in range(len(shape)))]),
            min_size=len(mesh_shape),
            max_size=len(mesh_shape),
        )
    )
    orders = {dim: draw(st.permutations(dims)) for dim, dims in oracle.read(" ".join(tokens)).orders.items()}
    odd = " ".join(f"{dim}:{','.join(map(str, order))}" for dim, order in sorted(orders.items()))
    return mesh_shape, shape, " ".join(tokens) + (f" @ {odd}" if odd else "")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cut_tensors())
def test_held_box_holds_the_oracles_indices(case: tuple[tuple[int, ...], tuple[int, ...], str]) -> None:
    mesh_shape, shape, text = case
    mesh, layout = Mesh(mesh_shape), Layout.parse(text)
    whole = torch.arange(math.prod(shape)).view(shape)
    for position, expected in enumerate(oracle.held_indices(mesh_shape, shape, text)):
        box = held_box(shape, layout, mesh_shape, mesh.coordinate(position))
        assert torch.equal(whole[tuple(slice(*span) for span in box)], expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple), st.data())
def test_cells_meeting_finds_every_cell_that_meets(extent: int, sizes: tuple[int, ...], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, extent))
    high = data.draw(st.integers(low, extent))
    mesh = Mesh(sizes or (1,))
    order = range(len(sizes))
    expected = []
    for position in range(mesh.size):
        coordinate = mesh.coordinate(position)[: len(sizes)]
        start, stop = held_span(extent, order, sizes, coordinate)
        if max(start, low) < min(stop, high):
            expected.append(list(coordinate))
    assert cells_meeting(extent, sizes, (low, high)).tolist() == expected
