"""The labels and the key of drawings: ranks outside a mesh, distorted proportions, nested dims, repeated colours."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from shardweave.planner import Mesh, draw, plan

pytestmark = pytest.mark.plan


def texts(svg: str) -> str:
    """All text of a drawing, tooltips excluded."""
    return " ".join(e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text"))


def test_draw_labels_ranks_outside_a_mesh() -> None:
    svg = draw(plan((2, 3), (8, 6), "float32", "S0 S1", "S1", target_mesh=Mesh((3,), ranks=(6, 7, 8))))
    assert texts(svg).count("not in mesh") == 9 and "empty" not in texts(svg)
    panels = [e for e in ElementTree.fromstring(svg).iter() if e.get("data-rank")]
    titles = {(e.get("data-column"), e.get("data-rank")): e[0].text or "" for e in panels}
    assert titles["0", "4"].startswith("rank 4 at (1,1) under")
    assert titles["1", "7"].startswith("rank 7 at (1) under")
    assert titles["1", "4"].startswith("rank 4 not in the mesh under")


def test_draw_labels_empty_shards() -> None:
    svg = draw(plan((4,), (3,), "float32", "S0", "R"))
    assert "empty" in texts(svg) and "mesh" not in texts(svg)


def test_draw_states_distorted_proportions() -> None:
    assert "not to scale (31.3 to 1)" in texts(draw(plan((2, 4), (128257, 4096), "bfloat16", "S0 S1", "S1 S0")))
    assert "not to scale" not in texts(draw(plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0")))


def test_draw_explains_nested_dims() -> None:
    text = texts(draw(plan((2, 2), (4, 6, 8), "float32", "S0 S1", "S1 S2")))
    assert "Dotted lines divide dim 1; each part holds all of dim 2." in text


@pytest.mark.parametrize("ranks", [16, 17])
def test_draw_states_repeated_colours(ranks: int) -> None:
    assert ("Colours repeat every 16 ranks" in texts(draw(plan((ranks,), (ranks, 4), "float32", "S0", "R")))) == (
        ranks > 16
    )
