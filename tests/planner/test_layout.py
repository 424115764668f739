from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import brute_force_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import placement_types as torch_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from shardweave.errors import ArgumentError, LayoutSyntaxError, UnsupportedError
from shardweave.planner import Layout, Partial, Replicate, Shard, StridedShard

pytestmark = pytest.mark.plan

TOKENS = ("R", "S0", "S1", "S2", "P")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    op = draw(st.sampled_from(["sum", "avg", "max", "min", "prod"]))
    dims = st.integers(0, 3).map(Shard)
    placements = draw(st.lists(st.one_of(st.just(Replicate()), dims, st.just(Partial(op))), min_size=1, max_size=5))
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append(mesh_dim)
    return Layout(placements, {dim: draw(st.permutations(mesh_dims)) for dim, mesh_dims in cuts.items()})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts())
def test_parse_inverts_str(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@pytest.mark.parametrize("mesh_dims", [1, 2, 3])
def test_parse_keeps_tokens_and_orders(mesh_dims: int) -> None:
    for text in oracle.layout_texts(mesh_dims, TOKENS):
        layout, spec = Layout.parse(text), oracle.read(text)
        assert str(layout) == text
        assert tuple(map(str, layout.placements)) == spec.tokens
        assert dict(layout.orders) == spec.orders
        assert layout.has_partial == bool(spec.partial_dims)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("  S0   R ", "S0 R"),
        ("Psum R", "P R"),
        ("S0 S0 @ 0:0,1", "S0 S0"),
        ("S0 R @ 0:0", "S0 R"),
        ("S0 S0@0:1,0", "S0 S0 @ 0:1,0"),
        ("S1 S0 S1 S0 @ 1:2,0 0:3,1", "S1 S0 S1 S0 @ 0:3,1 1:2,0"),
        ("S12 R", "S12 R"),
    ],
)
def test_parse_canonical_form(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical
    assert Layout.parse(text) == Layout.parse(canonical)


def test_order_first_cut_first() -> None:
    layout = Layout.parse("S0 S0 S1 @ 0:1,0")
    assert (layout.order(0), layout.order(1), layout.order(2)) == ((1, 0), (2,), ())
    assert Layout([Shard(0), Shard(0), Shard(1)], {0: [1, 0]}) == layout
    assert Layout([Shard(0), Shard(0), Shard(1)]) != layout


def test_without_size_one_replicates_size_one_dims() -> None:
    layout = Layout.parse("S0 S0 P S0 @ 0:3,1,0")
    assert layout.without_size_one((2, 1, 1, 2)) == Layout.parse("S0 R R S0 @ 0:3,0")
    assert layout.without_size_one((2, 2, 2, 2)) is layout
    assert layout.without_size_one((1, 1, 1, 1)) == Layout.parse("R R R R")


# Strided shards


def torch_order(tokens: tuple[str, ...], mesh_shape: tuple[int, ...]) -> dict[int, tuple[int, ...]] | None:
    """The shard order that torch finds for strided placements."""
    placements: list = []
    for token in tokens:
        dim, _, factor = token[1:].partition("/")
        if token == "R":
            placements.append(TorchReplicate())
        else:
            placements.append(_StridedShard(int(dim), split_factor=int(factor)) if factor else TorchShard(int(dim)))
    mesh = SimpleNamespace(size=lambda mesh_dim: mesh_shape[mesh_dim], ndim=len(mesh_shape), shape=mesh_shape)
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(placements), mesh)  # type: ignore[arg-type]
    return None if order is None else {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (2, 3), (2, 2, 2), (2, 3, 4), (4, 2, 1)], ids=str)
def test_parse_strided_shards_match_torch(mesh_shape: tuple[int, ...]) -> None:
    choices = ("R", "S0", "S1", "S0/2", "S0/3", "S0/4", "S0/6", "S0/8", "S1/2")
    decoded = unchanged = 0
    for tokens in product(choices, repeat=len(mesh_shape)):
        if not any("/" in token for token in tokens):
            continue
        expected = torch_order(tokens, mesh_shape)
        layout = Layout.parse(" ".join(tokens), mesh_shape)
        assert Layout.parse(str(layout), mesh_shape) == Layout.parse(str(layout)) == layout
        if expected is None:
            assert layout.strided_dims
            unchanged += 1
        else:
            assert dict(layout.orders) == expected, tokens
            assert not layout.strided_dims
            decoded += 1
    assert decoded and unchanged


def test_parse_own_strided_shard_is_kept() -> None:
    layout = Layout.parse("S0//2 S0", (2, 2))
    assert layout.placements == (StridedShard(0, 2, own=True), Shard(0)) and str(layout) == "S0//2 S0"
    assert layout.order(0) == (0, 1) and layout.cuts(0) == ((0, 2), 1)
    assert Layout((StridedShard(0, 2), Shard(0))).decoded((2, 2)) == Layout.parse("S0 S0 @ 0:1,0")
    assert Layout.parse("S0/2 S0") == Layout((StridedShard(0, 2), Shard(0)))


def test_parse_own_strided_shard_with_order() -> None:
    text = "S0 S0//3 S0 @ 0:1,0,2"
    layout = Layout.parse(text, (2, 2, 2))
    assert str(layout) == text and layout.cuts(0) == ((1, 3), 0, 2) and layout.decoded((2, 2, 2)) == layout
    thirds = torch.arange(31).chunk(3)
    second = torch.cat([third.chunk(2)[1] for third in thirds])
    # The shard at (0, 1, 1), cut by the middle mesh dim, then the first, then the last.
    assert oracle.held_indices((2, 2, 2), (31,), text)[3].equal(second.chunk(2)[0].chunk(2)[1])


def test_parse_order_and_strided_shard_of_different_dims() -> None:
    layout = Layout.parse("S0/2 S0 S1 S1 @ 1:3,2", (2, 2, 2, 2))
    assert layout == Layout.parse("S0 S0 S1 S1 @ 0:1,0 1:3,2")
    with pytest.raises(
        LayoutSyntaxError, match="tensor dim 0 has both a strided shard and an order; allowed: one of them"
    ):
        Layout.parse("S0/2 S0 @ 0:1,0", (2, 2))
    with pytest.raises(ArgumentError, match="tensor dim 0 has both a strided shard and an order; allowed: one of them"):
        Layout((StridedShard(0, 2), Shard(0)), {0: (1, 0)})
    with pytest.raises(ArgumentError, match="mesh dim 0 has split factor 0; allowed: 1 and up"):
        Layout((StridedShard(0, 0), Shard(0)))


# Errors


@pytest.mark.parametrize(
    ("text", "caret", "parts"),
    [
        ("", 0, ["no placements"]),
        ("@ 0:1,0", 0, ["no placements"]),
        ("S0 X", 3, ["'X'", "R", "S<dim>", "P<op>"]),
        ("S-1 R", 0, ["'S-1'", "S<dim>"]),
        ("R s0", 2, ["'s0'"]),
        ("S0/0 R", 0, ["'S0/0'", "S<dim>/<split>"]),
        ("S0  Pmean", 5, ["'mean'", "sum, avg, max, min, prod"]),
        ("S0 S0 @", 6, ["no order after '@'"]),
        ("S0 S0 @ 0", 8, ["'0'", "<tensor dim>:<mesh dim>"]),
        ("S0 S0 @ 0:1,0 @ 0:0,1", 14, ["'@'"]),
        ("S0 S0 @ 0:1,1", 8, ["1,1", "repeats a mesh dim"]),
        ("S0 S0 @ 0:1,0 0:0,1", 14, ["second order for tensor dim 0"]),
        ("S0 R @ 0:1,0", 7, ["tensor dim 0", "[0]", "1,0"]),
        ("S0 S0 @ 0:1", 8, ["tensor dim 0", "[0, 1]", "order 1 of"]),
        ("S0/2 S0 @ 1:0", 10, ["tensor dim 1", "[]", "order 0 of"]),
        ("S0 S9999999999999999999", 4, ["a number of 19 digits", "allowed: up to 2**58"]),
        ("(Shard(dim=0), Shard)", 15, ["not a placement; allowed: Replicate(), Shard(dim), Partial(op)"]),
        ("[Shard(0), Shard(-1)]", 17, ["negative tensor dim", "allowed: 0 and up"]),
        ("S(0)Q", 4, ["not a placement"]),
        ("P(norm)R", 2, ["unknown op 'norm'", "sum, avg, max, min, prod"]),
        ("S(0)[0]S(0)[0]", 12, ["second index 0 in the order of tensor dim 0"]),
        ("S(0)[0]S(0)", 0, ["order 0 of tensor dim 0; allowed: a permutation of mesh dims [0, 1]"]),
        ("R[0]S(0)", 2, ["index in an order; allowed: after a shard only"]),
    ],
)
def test_parse_invalid_text(text: str, caret: int, parts: list[str]) -> None:
    with pytest.raises(LayoutSyntaxError) as error:
        Layout.parse(text)
    lines = str(error.value).split("\n")
    assert lines[-2:] == [f"  {text}", "  " + " " * caret + "^"]
    assert [part for part in parts if part not in lines[0]] == []
    assert (error.value.text, error.value.position) == (text, caret)


TORCHS = [Replicate(), Shard(0), Shard(2), Partial(), Partial("avg"), Partial("prod"), StridedShard(1, 4)]


def as_torch_prints(placement: object) -> Any:
    if isinstance(placement, StridedShard):
        return torch_types._StridedShard(placement.dim, split_factor=placement.split)
    if isinstance(placement, Shard):
        return torch_types.Shard(placement.dim)
    if isinstance(placement, Partial):
        return torch_types.Partial("product" if placement.op == "prod" else placement.op)
    return torch_types.Replicate()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_parse_torch_forms(number: int) -> None:
    for placements in product(TORCHS, repeat=number):
        if len({p.op for p in placements if isinstance(p, Partial)}) > 1:
            continue
        theirs = tuple(map(as_torch_prints, placements))
        wanted = Layout(placements)
        # A lone "R" or "P" is also in the form of str(layout), with the same meaning.
        for text in (str(theirs), str(list(theirs)), "".join(map(str, theirs)), ", ".join(map(repr, theirs))):
            assert Layout.parse(text) == wanted, text
        spec = DTensorSpec.format_shard_order_str(theirs, None)
        assert Layout.parse(f"Spec(f32[8, 8, 8]({spec}))") == wanted


def test_parse_torch_shard_order() -> None:
    theirs = tuple(map(torch_types.Shard, (1, 0, 1, 0, 1)))
    order = (ShardOrderEntry(0, (3, 1)), ShardOrderEntry(1, (2, 4, 0)))
    text = DTensorSpec.format_shard_order_str(theirs, order)
    assert text == "S(1)[2]S(0)[1]S(1)[0]S(0)[0]S(1)[1]"
    assert Layout.parse(text) == Layout.parse("S1 S0 S1 S0 S1 @ 0:3,1 1:2,4,0")
    assert Layout.parse("_S(0, 2)S(0)", (2, 2)) == Layout.parse("S0 S0 @ 0:1,0")
    for text in (
        "Partial('avg') Shard(1)",
        'Partial(reduce_op="avg"),Shard( 1 )',
        "P(avg)S(1)",
    ):
        assert Layout.parse(text) == Layout.parse("Pavg S1")


def test_parse_strided_layout_of_wrong_length() -> None:
    with pytest.raises(LayoutSyntaxError, match="2 placements; allowed: 3, one per mesh dim"):
        Layout.parse("S0/2 S0", (2, 2, 2))


@pytest.mark.parametrize(
    ("placements", "orders", "parts"),
    [
        ([Shard(-1)], None, ["mesh dim 0", "tensor dim -1", "allowed: 0 and up"]),
        ([Replicate(), Partial("mean")], None, ["mesh dim 1", "'mean'", "allowed: sum, avg, max, min, prod"]),
        ([Replicate(), "S0"], None, ["mesh dim 1", "'S0'", "allowed: Replicate, Shard, Partial"]),
        ([Shard(0), Shard(0)], {0: (1, 1)}, ["tensor dim 0", "(1, 1)", "repeats a mesh dim"]),
        ([Shard(0), Shard(0)], {0: (1,)}, ["tensor dim 0", "(1,)", "(0, 1)", "allowed: a permutation"]),
        ([Shard(0), Replicate()], {0: (1, 0)}, ["tensor dim 0", "(1, 0)", "(0,)"]),
        ([Shard(0), Shard(0)], {1: (0, 1)}, ["tensor dim 1", "(0, 1)", "()"]),
    ],
)
def test_layout_invalid_arguments(placements: list, orders: dict | None, parts: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        Layout(placements, orders)
    assert [part for part in parts if part not in str(error.value)] == []


def test_layout_mixed_partial_ops() -> None:
    assert str(Layout.parse("P Pavg")) == "P Pavg"
    for a, b in product(("sum", "avg", "max", "min", "prod"), repeat=2):
        if a == b or {a, b} == {"sum", "avg"}:
            assert Layout([Partial(a), Partial(b)]).has_partial
        else:
            with pytest.raises(UnsupportedError, match="do not mix; allowed: one op, or sum and avg") as error:
                Layout([Partial(a), Partial(b)])
            assert repr(a) in str(error.value) and repr(b) in str(error.value)
