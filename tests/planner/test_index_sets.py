from __future__ import annotations

import math
from itertools import product

import brute_force_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.planner import Layout, Mesh
from shardweave.planner.exchange.node_change import shard_boxes
from shardweave.planner.layouts import spans
from shardweave.planner.layouts.index_sets import (
    boxes_of_all,
    cells_meeting,
    cut,
    held_box,
    held_sizes,
    held_span,
)
from shardweave.planner.layouts.node_layout import Kind, NodeLayout
from shardweave.planner.layouts.nodes import RankNodes
from shardweave.planner.layouts.spans import (
    Spans,
    common_runs,
    cut_shards,
    held_spans,
    runs_in_common,
    shards_meeting,
    spans_of_shards,
)

pytestmark = pytest.mark.plan


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(0, 7), st.integers(1, 9))
def test_cut_matches_torch_chunk(extent: int, start: int, parts: int) -> None:
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
def test_held_box_matches_oracle(case: tuple[tuple[int, ...], tuple[int, ...], str]) -> None:
    mesh_shape, shape, text = case
    mesh, layout = Mesh(mesh_shape), Layout.parse(text)
    whole = torch.arange(math.prod(shape)).view(shape)
    for position, expected in enumerate(oracle.held_indices(mesh_shape, shape, text)):
        box = held_box(shape, layout, mesh_shape, mesh.coordinate(position))
        assert torch.equal(whole[tuple(slice(*span) for span in box)], expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple), st.data())
def test_cells_meeting_exact_for_plain_cuts(extent: int, sizes: tuple[int, ...], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, extent))
    high = data.draw(st.integers(low, extent))
    mesh = Mesh(sizes or (1,))
    cuts = tuple(range(len(sizes)))
    expected = []
    for position in range(mesh.size):
        coordinate = mesh.coordinate(position)[: len(sizes)]
        start, stop = held_span(extent, tuple((n, 1, c) for n, c in zip(sizes, coordinate, strict=True)))
        if max(start, low) < min(stop, high):
            expected.append(list(coordinate))
    assert cells_meeting(extent, cuts, sizes, [(low, high)]).tolist() == expected


parts = st.lists(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, 6), st.integers(0, n - 1))))


def indices(extent: int, cuts: list[tuple[int, int, int]]) -> torch.Tensor:
    """The indices that are left after cutting with torch.chunk."""
    held = torch.arange(extent)
    for number, split, index in cuts:
        pieces = [piece.chunk(number) for piece in held.chunk(split)]
        held = torch.cat([piece[index] for piece in pieces if index < len(piece)] or [held[:0]])
    return held


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 60), parts)
def test_held_spans_match_torch_chunk(extent: int, cuts: list[tuple[int, int, int]]) -> None:
    held = held_spans(extent, tuple(cuts))
    found = [i for low, high in held.tolist() for i in range(low, high)]
    assert found == indices(extent, cuts).tolist()
    assert (held[:, 0] < held[:, 1]).all() and (held[1:, 0] > held[:-1, 1]).all()


def check_common_runs(extent: int, held: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]]) -> None:
    a, b = indices(extent, held), indices(extent, wanted)
    found = []
    for source, target, count, length, source_step, target_step in common_runs(
        extent, tuple(held), tuple(wanted)
    ).tolist():
        for i in range(count):
            for k in range(length):
                here, there = a[source + i * source_step + k], b[target + i * target_step + k]
                assert here == there
                found.append(int(here))
    assert found == sorted(set(a.tolist()) & set(b.tolist()))


SPANS = st.integers(0, 60), parts, parts


@settings(max_examples=100, deadline=None, derandomize=True)
@given(*SPANS)
def test_common_runs_match_intersection(extent: int, held: list, wanted: list) -> None:
    check_common_runs(extent, held, wanted)


@pytest.mark.long
def test_common_runs_match_intersection_long() -> None:
    settings(max_examples=5000, deadline=None, database=None)(given(*SPANS)(check_common_runs))()


CUTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3)


def grid(cuts: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The parts of every shard, row-major."""
    return list(product(*(range(number) for number, _ in cuts)))


def shards(cuts: list[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    return [[(*cut, part) for cut, part in zip(cuts, parts, strict=True)] for parts in grid(cuts)]


def all_spans(extent: int, cuts: list[tuple[int, int]]) -> Spans:
    return spans_of_shards(extent, cuts, np.array(grid(cuts), dtype=np.int64).reshape(len(grid(cuts)), len(cuts)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 60), CUTS, st.integers(1, 1 << 20))
def test_spans_of_shards_match_torch_chunk(extent: int, cuts: list[tuple[int, int]], most: int) -> None:
    """All shards at once, in batches of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_MOST_PIECES", most)
        found = all_spans(extent, cuts)
    held = [indices(extent, shard) for shard in shards(cuts)]
    of_shard: list[list[int]] = [[] for _ in held]
    for shard, local, start, stop in zip(found.shard, found.local, found.start, found.stop, strict=True):
        assert local == len(of_shard[shard])
        of_shard[shard] += range(start, stop)
    assert of_shard == [x.tolist() for x in held]
    assert found.sizes(len(held)).tolist() == [len(x) for x in held]
    kept = list(range(0, len(held), 2))
    some = found.select(np.array(kept, dtype=np.int64))
    assert some.sizes(len(kept)).tolist() == [len(held[k]) for k in kept]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 60) | st.integers((1 << 58) - 60, 1 << 58), CUTS, st.integers(1, 1 << 20))
def test_cut_shards_cut_by_cut(extent: int, cuts: list[tuple[int, int]], most: int) -> None:
    found, shards = all_spans(extent, []), 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_MOST_PIECES", most)
        for number, split in cuts:
            shard, part = np.divmod(np.arange(shards * number), number)
            found, shards = cut_shards(extent, found, (number, split), shard, part), shards * number
    expected = all_spans(extent, cuts)
    for of_found, of_expected in zip(found, expected, strict=True):
        assert of_found.tolist() == of_expected.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 60), CUTS, CUTS)
def test_runs_in_common_match_common_runs(extent: int, held: list, wanted: list) -> None:
    holder, receiver, runs = runs_in_common(all_spans(extent, held), all_spans(extent, wanted))
    for i, a in enumerate(shards(held)):
        for k, b in enumerate(shards(wanted)):
            of_pair = runs[(holder == i) & (receiver == k)]
            assert of_pair.tolist() == common_runs(extent, tuple(a), tuple(b)).tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 60), CUTS, parts)
def test_shards_meeting_a_strided_shard(extent: int, cuts: list, wanted: list) -> None:
    mine = {*indices(extent, wanted).tolist()}
    every = zip(grid(cuts), shards(cuts), strict=True)
    expected = [list(at) for at, shard in every if mine & {*indices(extent, shard).tolist()}]
    assert shards_meeting(extent, cuts, held_spans(extent, tuple(wanted))).tolist() == expected


def test_common_runs_compact_for_many_spans() -> None:
    """A strided shard of a view may have thousands of spans."""
    assert len(held_spans(1 << 20, ((4, 1 << 12, 1),))) == 1 << 12
    assert len(common_runs(1 << 20, ((4, 1 << 12, 1),), ((4, 1, 2),))) == 1
    assert len(common_runs(1 << 20, ((4, 1 << 12, 1),), ((2, 1 << 13, 0),))) <= 2
    assert common_runs(1 << 20, ((4, 1 << 12, 1),), ((4, 1 << 12, 1),)).tolist() == [[0, 0, 1, 1 << 18, 1, 1]]


@pytest.mark.parametrize("text", ["S0/3 R", "S0//2 S0", "R S0/5", "S0/2 S1/3", "S0/3 S0/2"])
def test_held_sizes_of_strided_shards(text: str) -> None:
    mesh_shape, shape = (2, 3), (11, 7)
    for position, expected in enumerate(oracle.held_indices(mesh_shape, shape, text)):
        coordinate = Mesh(mesh_shape).coordinate(position)
        assert held_sizes(shape, Layout.parse(text), mesh_shape, coordinate) == tuple(expected.shape)


@pytest.mark.parametrize("kind", ["node sums", "node shares", "shares"])
def test_boxes_of_all_match_those_of_each_rank(kind: Kind) -> None:
    mesh, nodes = Mesh((2, 3)), RankNodes((0, 0, 1, 2, 2, 1))
    base = Layout.parse("R S0" if kind != "node sums" else "P S0", mesh.shape)
    layout = NodeLayout(kind, base, 0, (0,), mesh, nodes)
    for shape in ((17, 3), (1, 2), (0, 4)):
        held, valid = boxes_of_all(shape, layout, mesh)
        each = [held_box(shape, layout, mesh.shape, mesh.coordinate(p)) for p in range(mesh.size)]
        assert held.tolist() == [[list(span) for span in box] for box in each]
        assert (held == valid).all() or kind == "node sums"


@pytest.mark.parametrize("extent", [17, 24, 5, 1, 0])
@pytest.mark.parametrize("kind", ["node sums", "node shares"])
def test_ranks_of_a_node_hold_a_part_each(kind: Kind, extent: int) -> None:
    """The parts are those of `torch.chunk`."""
    mesh, nodes = Mesh((2, 3)), [0, 0, 1, 2, 2, 1]
    base = Layout.parse("R S0" if kind != "node sums" else "P S0", mesh.shape)
    layout = NodeLayout(kind, base, 0, (0,), mesh, RankNodes(nodes))
    boxes = shard_boxes(mesh, layout, (extent, 2))
    for position in range(mesh.size):
        column = position % 3
        shard = chunk_of(torch.arange(extent), 3, column)
        near = [p for p in (column, column + 3) if nodes[p] == nodes[position]]
        part = chunk_of(shard, len(near), near.index(position)).tolist()
        (own,) = np.flatnonzero(boxes.position == position)
        at, start, stop = (int(of[own, 0]) for of in (boxes.at, boxes.start, boxes.stop))
        assert list(range(start, stop)) == part
        memory = shard.tolist() if kind == "node sums" else part
        assert memory[at : at + len(part)] == part
        assert held_sizes((extent, 2), layout, mesh.shape, mesh.coordinate(position)) == (len(memory), 2)


def chunk_of(x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    """Part `index` of `torch.chunk`; empty if there is none."""
    chunks = x.chunk(parts) if len(x) else ()
    return chunks[index] if index < len(chunks) else x[:0]
