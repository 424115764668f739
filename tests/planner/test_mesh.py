from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.errors import ArgumentError
from shardweave.planner import Mesh

pytestmark = pytest.mark.plan

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def test_mesh_has_sizes_names_and_ranks() -> None:
    mesh = Mesh((2, 3), ("dp", "tp"), ranks=(5, 4, 3, 2, 1, 0))
    assert (mesh.shape, mesh.names, mesh.ndim, mesh.size) == ((2, 3), ("dp", "tp"), 2, 6)
    assert [mesh.rank_at(p) for p in range(6)] == [5, 4, 3, 2, 1, 0]
    assert str(mesh) == "2×3 (dp, tp)"
    assert Mesh(4).shape == (4,)


def test_mesh_of_ranks_in_order_equals_the_mesh_without_ranks() -> None:
    assert Mesh((2, 2), ranks=range(4)) == Mesh([2, 2])
    assert hash(Mesh((2, 2), ranks=range(4))) == hash(Mesh((2, 2)))
    assert Mesh((2, 2), ranks=(0, 2, 1, 3)) != Mesh((2, 2))
    assert Mesh((2, 2)).rank_at(3) == 3


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes)
def test_coordinate_and_position_are_inverse_and_row_major(shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape)
    assert [mesh.position(mesh.coordinate(p)) for p in range(mesh.size)] == list(range(mesh.size))
    assert [mesh.coordinate(p) for p in range(mesh.size)] == sorted(mesh.coordinate(p) for p in range(mesh.size))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shapes, st.data())
def test_subgroup_varies_exactly_its_dims(shape: tuple[int, ...], data: st.DataObject) -> None:
    mesh = Mesh(shape)
    position = data.draw(st.integers(0, mesh.size - 1))
    dims = data.draw(st.lists(st.sampled_from(range(mesh.ndim)), unique=True))
    here = mesh.coordinate(position)
    expected = [
        p
        for p in range(mesh.size)
        if all(a == b for d, (a, b) in enumerate(zip(mesh.coordinate(p), here, strict=True)) if d not in dims)
    ]
    group = mesh.subgroup(position, dims)
    assert list(group) == expected
    assert len(group) == math.prod(shape[d] for d in dims)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (((),), ["mesh", "()", "at least one dim"]),
        (((2, 0),), ["mesh", "(2, 0)", "at least 1"]),
        (((2, -1),), ["mesh", "(2, -1)", "at least 1"]),
        (((2, 2), ("a",)), ["mesh", "names ('a',)", "2 different names"]),
        (((2, 2), ("a", "a")), ["mesh", "names ('a', 'a')", "2 different names"]),
        (((2, 2), None, (0, 1, 2)), ["mesh", "ranks (0, 1, 2)", "4 different ranks", "(2, 2)"]),
        (((2, 2), None, (0, 1, 2, 2)), ["mesh", "ranks (0, 1, 2, 2)", "4 different ranks"]),
        (((2, 2), None, (0, 1, 2, -3)), ["mesh", "ranks (0, 1, 2, -3)", ">= 0"]),
    ],
)
def test_mesh_refuses(arguments: tuple, parts: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        Mesh(*arguments)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize("position", [-1, 4])
def test_coordinate_refuses_a_position_outside(position: int) -> None:
    with pytest.raises(ArgumentError, match=rf"rank: position {position} is outside the mesh \(2, 2\); allowed: 0..3"):
        Mesh((2, 2)).coordinate(position)
