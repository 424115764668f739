from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.errors import ArgumentError
from shardweave.planner import Mesh

pytestmark = pytest.mark.plan

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def test_mesh_attributes() -> None:
    mesh = Mesh((2, 3), ("dp", "tp"), ranks=(5, 4, 3, 2, 1, 0))
    assert (mesh.shape, mesh.names, mesh.ndim, mesh.size) == ((2, 3), ("dp", "tp"), 2, 6)
    assert [mesh.rank_at(p) for p in range(6)] == [5, 4, 3, 2, 1, 0]
    assert str(mesh) == "2×3 (dp, tp)"
    assert Mesh(4).shape == (4,)


def test_mesh_with_arange_ranks_equals_default() -> None:
    assert Mesh((2, 2), ranks=range(4)) == Mesh([2, 2])
    assert hash(Mesh((2, 2), ranks=range(4))) == hash(Mesh((2, 2)))
    assert Mesh((2, 2), ranks=(0, 2, 1, 3)) != Mesh((2, 2))
    assert Mesh((2, 2)).rank_at(3) == 3


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes)
def test_coordinate_and_position_are_inverse(shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape)
    assert [mesh.position(mesh.coordinate(p)) for p in range(mesh.size)] == list(range(mesh.size))
    assert [mesh.coordinate(p) for p in range(mesh.size)] == sorted(mesh.coordinate(p) for p in range(mesh.size))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shapes, st.data())
def test_subgroup_along_dims(shape: tuple[int, ...], data: st.DataObject) -> None:
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
        (((2, 2), ("a",)), ["mesh", "names ('a',)", "2 different names"]),
        (((2, 2), None, (0, 1, 2)), ["mesh", "ranks (0, 1, 2)", "4 different ranks", "(2, 2)"]),
        (((2, 2), None, (0, 1, 2, -3)), ["mesh", "ranks (0, 1, 2, -3)", ">= 0"]),
        (((2,), None, (0, 2**70)), ["mesh", "ranks (0, 1180591620717411303424)", "below 16777216"]),
        (((2,), None, range(10**15)), ["mesh", "ranks (0, 1, 2)", "2 different ranks"]),
        (((2,), None, (0, 1.0)), ["mesh: ranks", "(0, 1.0)", "whole numbers"]),
        (((2,), None, 5), ["mesh: ranks 5", "a rank for each position"]),
        (((True, 2),), ["mesh", "(True, 2)", "whole numbers"]),
        ((b"ab",), ["mesh", "b'ab'", "whole numbers"]),
        (((2,), None, {0: "a", 1: "b"}), ["mesh: ranks", "whole numbers"]),
        (((10**50, 2),), ["mesh", "1000", "allowed: up to 16777216"]),
        (((1,) * 25,), ["mesh", "25 dims", "allowed: up to 24"]),
        (((2, 2), ("a", ["b"])), ["mesh", "names ('a', ['b'])"]),
    ],
)
def test_mesh_invalid_arguments(arguments: tuple, parts: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        Mesh(*arguments)
    assert [part for part in parts if part not in str(error.value)] == []


# The layout algebra, against arrays of ranks


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes with ranks in order, permuted or strided, and meshes derived from these."""
    shape = draw(shapes)
    size = math.prod(shape)
    names = draw(st.sampled_from([None, tuple("abcd"[: len(shape)])]))
    kind = draw(st.sampled_from(["arange", "strided", "permuted", "some"]))
    ranks: list[int] | None = list(range(size))
    if kind == "arange":
        ranks = None
    elif kind == "strided":
        ranks = [5 + 3 * r for r in range(size)]
    elif kind == "permuted":
        ranks = draw(st.permutations(range(size)))
    else:
        ranks = draw(st.lists(st.integers(0, 4 * size), min_size=size, max_size=size, unique=True))
    mesh = Mesh(shape, names, ranks)
    for _ in range(draw(st.integers(0, 2))):
        dims = draw(st.permutations(range(mesh.ndim)))
        how = draw(st.sampled_from(["transpose", "submesh", "flatten"]))
        if how == "transpose":
            mesh = mesh.transpose(dims)
        elif how == "submesh":
            mesh = mesh.submesh(draw(st.integers(0, mesh.size - 1)), dims[: max(1, mesh.ndim - 1)])
        else:
            mesh = mesh.flatten(dims[: max(1, mesh.ndim - 1)], name="".join(mesh.names) + "f" if mesh.names else None)
    return mesh


def table_of(mesh: Mesh) -> np.ndarray:
    """The array of `rank_at` of every position."""
    return np.array([mesh.rank_at(p) for p in range(mesh.size)]).reshape(mesh.shape)


def alike(mesh: Mesh, table: np.ndarray) -> bool:
    assert mesh.rank_array.tolist() == table_of(mesh).reshape(-1).tolist()
    assert mesh.ranks is None or list(mesh.ranks) == mesh.rank_array.tolist()
    if mesh.ranks is None:
        assert mesh.rank_array.tolist() == list(range(mesh.size))
    again = Mesh(mesh.shape, mesh.names, mesh.ranks)
    assert again.rank_array.tolist() == mesh.rank_array.tolist()
    return mesh.shape == table.shape and (table_of(mesh) == table).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(meshes(), st.data())
def test_transpose_and_submesh_match_numpy(mesh: Mesh, data: st.DataObject) -> None:
    table = table_of(mesh)
    order = data.draw(st.permutations(range(mesh.ndim)))
    assert alike(mesh.transpose(order), table.transpose(order))
    position = data.draw(st.integers(0, mesh.size - 1))
    dims_kept = order[: data.draw(st.integers(1, mesh.ndim))]
    index = tuple(slice(None) if d in dims_kept else c for d, c in enumerate(mesh.coordinate(position)))
    ascending = sorted(dims_kept)
    assert alike(mesh.submesh(position, dims_kept), table[index].transpose([ascending.index(d) for d in dims_kept]))
    parts = mesh.submeshes(dims_kept)
    assert sorted(r for part in parts for r in part.rank_array.tolist()) == sorted(table.reshape(-1).tolist())
    assert all(part.shape == tuple(mesh.shape[d] for d in dims_kept) for part in parts)
    assert not any(a.overlaps(b) for i, a in enumerate(parts[:4]) for b in parts[:i])
    assert all(part.overlaps(mesh) for part in parts[:4])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(meshes(), st.data())
def test_flatten_and_unflatten_match_numpy(mesh: Mesh, data: st.DataObject) -> None:
    table = table_of(mesh)
    order = data.draw(st.permutations(range(mesh.ndim)))
    dims = order[: data.draw(st.integers(1, mesh.ndim))]
    flat = mesh.flatten(dims, name="flat" if mesh.names else None)
    rest = [d for d in range(mesh.ndim) if d not in dims]
    place = sum(d < min(dims) for d in rest)
    moved = table.transpose([*rest[:place], *dims, *rest[place:]])
    sizes = [mesh.shape[d] for d in dims]
    expected = moved.reshape(
        [*(mesh.shape[d] for d in rest[:place]), math.prod(sizes), *moved.shape[place + len(dims) :]]
    )
    assert alike(flat, expected)
    names = [f"n{i}" for i in range(len(dims))] if mesh.names else None
    assert alike(flat.unflatten(place, sizes, names), moved)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_complement_tiles_world(a: int, gap: int, b: int, step: int, times: int) -> None:
    mesh = Mesh((times * 2, gap, b, step), ("w", "x", "y", "z")).submesh(0, ("y",) if a % 2 else ("x", "z"))
    world = 2 * times * gap * b * step
    starts = mesh.complement(world)
    tiles = np.add.outer(starts.rank_array, mesh.rank_array).reshape(-1)
    assert sorted(tiles.tolist()) == list(range(world))


def test_getitem_by_names() -> None:
    mesh = Mesh((2, 3, 4), ("pp", "dp", "tp"))
    assert mesh["tp"] == Mesh((4,), ("tp",))
    assert mesh["pp", "dp"].rank_array.tolist() == [0, 4, 8, 12, 16, 20]
    assert mesh.submesh(23, "dp").rank_array.tolist() == [15, 19, 23]
    assert mesh.flatten(("tp", "pp"), "fsdp").names == ("fsdp", "dp")
    assert mesh.flatten(("tp", "pp"), "fsdp").submesh(0, "fsdp").ranks == (0, 12, 1, 13, 2, 14, 3, 15)
    assert mesh.unflatten("tp", (2, 2), ("cp", "ep")).names == ("pp", "dp", "cp", "ep")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m["ep"], "mesh dim: 'ep'; allowed: 0, 1, dp, tp"),
        (lambda m: m.submesh(0, 2), "mesh dim: 2; allowed: 0, 1, dp, tp"),
        (lambda m: m.transpose(("dp",)), r"mesh dims: \('dp',\); allowed: all 2 dims, each once"),
        (lambda m: m.flatten(("dp", "dp"), "x"), "repeats a dim"),
        (lambda m: m.flatten(("dp", "tp")), "names .*allowed: 1 different names"),
        (lambda m: m.unflatten("tp", (3, 2), ("a", "b")), r"sizes: \(3, 2\); allowed: .* of the mesh dim, 4"),
        (lambda m: m.unflatten("tp", (2, 2)), "allowed: 2 names|mesh: names None"),
        (lambda m: m.flatten(("tp", "dp"), "x").unflatten("x", (2, 3, 2), ("a", "b", "c")), "cut across"),
        (lambda m: m.complement(13), "world_size: 13; allowed: a multiple of 12"),
        (lambda m: m.complement(12 * 10**9), "world_size: 12000000000; allowed: a multiple of 12, up to 16777216"),
        (lambda m: m.unflatten("tp", (4, *[1] * 30), [str(d) for d in range(31)]), "32 dims; allowed: up to 24"),
        (lambda m: m.transpose((1, 0)).submesh(4, 0).complement(12), "cannot tile any world size"),
    ],
)
def test_mesh_methods_invalid_arguments(call: Callable[[Mesh], Mesh], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call(Mesh((3, 4), ("dp", "tp")))


@pytest.mark.parametrize("position", [-1, 4])
def test_coordinate_position_out_of_range(position: int) -> None:
    with pytest.raises(ArgumentError, match=rf"rank: position {position} is outside the mesh \(2, 2\); allowed: 0..3"):
        Mesh((2, 2)).coordinate(position)
