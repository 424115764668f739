"""Drawings of programs, parsed: regions, colours, tooltips, and room for text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import brute_force_oracle as oracle
import numpy as np
import pytest

from shardweave.errors import ArgumentError
from shardweave.planner import NVLINK_INFINIBAND, Layout, Mesh, Program, draw, plan
from shardweave.planner.layouts.index_sets import boxes_of_all
from shardweave.planner.layouts.node_layout import NodeLayout
from shardweave.planner.render.explain import totals

pytestmark = pytest.mark.plan

NODES_OF_4 = replace(NVLINK_INFINIBAND, node_size=4)
NODES_OF_2 = replace(NVLINK_INFINIBAND, node_size=2)
REQUESTS: dict[str, tuple] = {
    "identity": ((2, 2), (8, 6), "float32", "S0 S1", "S0 S1"),
    "swap": ((2, 2), (8, 6), "float32", "S0 S1", "S1 S0"),
    "uneven": ((2, 2), (7, 5), "float32", "S0 S0", "R S0"),
    "empty_shards": ((2, 4), (3,), "float32", "S0 S0", "R S0"),
    "empty_tensor": ((2, 2), (0, 4), "float32", "S0 R", "S1 R"),
    "scalar": ((2, 2), (), "float64", "P P", "R R"),
    "gradient": ((4, 4), (16, 16), "float32", "P S0", "S0 S0"),
    "all_reduce": ((4, 4), (16, 16), "float32", "P P", "R R"),
    "max": ((2, 2), (8, 6), "float32", "Pmax R", "S1 R"),
    "sixteen_in_a_row": ((16,), (24, 8), "float32", "S0", "S1"),
    "three_mesh_dims": (Mesh((2, 2, 2), ("pp", "dp", "tp")), (8, 6, 4), "float32", "S0 S1 S2", "S1 S0 S0"),
    "four_mesh_dims": ((2, 2, 2, 2), (5, 6, 3, 4), "float32", "S0 S1 S2 S3", "S1 S0 R R"),
    "ranks_of_a_world": (Mesh((2, 2), ("dp", "tp"), (13, 5, 9, 7)), (8, 6), "float32", "S0 S1", "R S1"),
    "strided": ((2, 2), (24, 6), "float32", "S0/3 R", "S0//2 S1"),
    "long_shapes": ((2, 4), (128257, 4096), "bfloat16", "S0 S1", "S1 S0"),
}
ON_NODES: dict[str, tuple] = {
    "gather_over_nodes": ((2, 4), (64, 64), "bfloat16", "S0 S0", "R R", NODES_OF_4),
    "three_exchanges": (Mesh((4, 4), ("dp", "tp")), (64, 64), "bfloat16", "S0 S0", "R R", NODES_OF_2),
    "odd_nodes": ((3, 4), (24, 12), "float32", "S0 S1", "R R", replace(NODES_OF_4, node_size=5)),
    "many_names": (
        Mesh((2, 2), ("a dim with a rather long name, in words", "x" * 60)),
        (64, 64),
        "float32",
        "P S0",
        "R R",
        NODES_OF_2,
    ),
}
NAMES = [*REQUESTS, *ON_NODES]
# In a tensor of 128257 rows, thin regions are drawn thicker than to scale.
FLAT = [n for n in NAMES if n != "long_shapes" and len({**REQUESTS, **ON_NODES}[n][1]) in (1, 2)]


def planned(name: str) -> Program:
    if name in REQUESTS:
        return plan(*REQUESTS[name])
    *request, topology = ON_NODES[name]
    return plan(*request, topology=topology)


def tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.get(name, "")) for name in names]


class Drawn(NamedTuple):
    """One region of a panel; rectangles are x, y, width, height with the panel's sides as 1."""

    senders: tuple[int, ...]
    rectangles: list[tuple[float, ...]]
    title: str


class Picture:
    """An SVG, and its panels by (column, rank)."""

    def __init__(self, program: Program) -> None:
        self.svg = draw(program)
        self.root = ElementTree.fromstring(self.svg)
        self.view = [float(x) for x in self.root.attrib["viewBox"].split()]
        self.panels: dict[tuple[int, int], list[Drawn]] = {}
        for panel in (e for e in self.root.iter() if e.get("class") == "rank"):
            frame = next(e for e in panel if e.get("class", "").startswith("panel"))
            place = numbers(frame, "x", "y", "width", "height")
            drawn = [self._region(e, place) for e in panel if e.get("class") == "region"]
            self.panels[int(panel.attrib["data-column"]), int(panel.attrib["data-rank"])] = drawn

    def _region(self, group: ElementTree.Element, place: list[float]) -> Drawn:
        marks = [e for e in group if e.get("class") in ("held", "moved", "kept", "filled")]
        x, y, width, height = place
        rectangles = []
        for left, top, across, down in (numbers(e, "x", "y", "width", "height") for e in marks if tag(e) == "rect"):
            rectangles.append(((left - x) / width, (top - y) / height, across / width, down / height))
        return Drawn(tuple(map(int, group.attrib["data-senders"].split())), rectangles, group[0].text or "")

    def texts(self) -> Iterator[tuple[str, float, float, float, float]]:
        """Each text with its left, top, right and bottom, at 0.6 em per character."""
        for element in (e for e in self.root.iter() if tag(e) == "text"):
            text, (x, y, size) = element.text or "", numbers(element, "x", "y", "font-size")
            width = 0.6 * size * len(text)
            left = x - width / 2 if element.get("text-anchor") == "middle" else x
            below = 0.0 if re.fullmatch(r"[\d+=.Σ-]*", text) else 0.2 * size
            yield text, left, y - 0.75 * size, left + width, y + below


@pytest.mark.parametrize("name", NAMES)
def test_draw_has_panel_per_rank_and_caption_per_step(name: str) -> None:
    program = planned(name)
    picture = Picture(program)
    columns = range(len(program.steps) + 1)
    assert set(picture.panels) == {(c, program.mesh.rank_at(p)) for c in columns for p in range(program.mesh.size)}
    layouts = [e.text for e in picture.root.iter() if e.get("class") == "layout"]
    assert layouts == [str(program.source), *(str(step.target) for step in program.steps)]
    shown = " ".join(e.text or "" for e in picture.root.iter() if tag(e) == "text").replace("\u00a0", " ")
    for number, step in enumerate(program.steps, 1):
        assert f"{number}. {step.kind}" in shown
        if step.reduce:
            assert str(step.reduce) in shown
    for line in totals(program):
        assert line.split(":")[0].strip() in shown
    assert ("nothing to do" in shown) == program.is_identity
    assert f"{program.dtype}{list(program.shape)}" in shown


def mask_of(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> np.ndarray:
    """[ranks, elements] whether the rank has values of the element."""
    if not isinstance(layout, NodeLayout):
        return oracle.held_mask(mesh.shape, shape, str(layout))
    mask = np.zeros((mesh.size, *shape), dtype=bool)
    for position, box in enumerate(boxes_of_all(shape, layout, mesh)[1]):
        mask[(position, *(slice(*span) for span in box))] = True
    return mask.reshape(mesh.size, -1)


@pytest.mark.parametrize("name", FLAT)
def test_draw_regions_match_oracle(name: str) -> None:
    program = planned(name)
    shape, mesh = program.shape, program.mesh
    held = [mask_of(layout, mesh, shape) for layout in (program.source, *(step.target for step in program.steps))]
    rows, columns = (1, *shape) if len(shape) == 1 else shape
    positions = {mesh.rank_at(p): p for p in range(mesh.size)}
    for (column, rank), drawn in Picture(program).panels.items():
        covered = np.zeros((rows, columns), dtype=int)
        for region in drawn:
            mask = np.zeros((rows, columns), dtype=bool)
            for x, y, width, height in region.rectangles:
                down = np.abs((np.arange(rows) + 0.5) / rows - y - height / 2) < height / 2
                across = np.abs((np.arange(columns) + 0.5) / columns - x - width / 2) < width / 2
                mask |= down[:, None] & across
            covered += mask
            for sender in region.senders:
                assert held[max(column - 1, 0)][positions[sender]][mask.ravel()].all()
        assert (covered.ravel() == held[column][positions[rank]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_draw_text_inside_sheet_without_overlap(name: str) -> None:
    picture = Picture(planned(name))
    left, top, width, height = picture.view
    texts = list(picture.texts())
    for text, x0, y0, x1, y1 in texts:
        assert left <= x0 and top <= y0 and x1 <= left + width and y1 <= top + height, text
    for i, (text, x0, y0, x1, y1) in enumerate(texts):
        for other, a0, b0, a1, b1 in texts[i + 1 :]:
            assert x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0, (text, other)


def test_draw_cross_mesh() -> None:
    program = plan((2, 2), (8, 6), "float32", "S0 S1", "S0", target_mesh=Mesh((2,), ranks=(3, 7)))
    picture = Picture(program)
    text = "".join(e.text or "" for e in picture.root.iter() if tag(e) == "text")
    assert "from mesh to mesh" in text and "S0 on 2 of ranks 3, 7" in text
    held = {key: [r.title.split("[")[1].split("]")[0] for r in drawn] for key, drawn in picture.panels.items()}
    assert held[0, 3] == ["4:8, 3:6"] and held[0, 7] == held[1, 0] == held[1, 1] == held[1, 2] == []
    assert held[1, 3] == ["0:4, 0:3", "0:4, 3:6"] and held[1, 7] == ["4:8, 0:3", "4:8, 3:6"]
    scalar = Picture(plan((2,), (), "float32", "R", "R", target_mesh=Mesh((1,), ranks=(5,))))
    assert [len(scalar.panels[1, rank]) for rank in (0, 1, 5)] == [0, 0, 1]


def test_draw_escapes_names() -> None:
    mesh = Mesh((2, 2), ("<b>&\"'", "]]>\x00\ud800 \u65e5\u672c"))
    picture = Picture(plan(mesh, (8, 6), "float32", "S0 S1", "S1 S0"))
    picture.svg.encode()
    shown = "".join(e.text or "" for e in picture.root.iter() if tag(e) == "text")
    assert "<b>&\"'" in shown and "]]>\ufffd\ufffd" in shown


def test_draw_deterministic() -> None:
    for name in ("gradient", "three_exchanges"):
        program = planned(name)
        assert draw(program) == draw(Program.from_json(program.to_json())) == program.to_svg()


def test_panel_width_gives_drawings_one_scale() -> None:
    def widths(name: str, **size: float) -> set[str | None]:
        panels = ElementTree.fromstring(draw(planned(name), **size)).iter("{http://www.w3.org/2000/svg}rect")
        return {panel.get("width") for panel in panels if panel.get("class", "").startswith("panel")}

    assert widths("swap", panel_width=90) == widths("uneven", panel_width=90) == {"90"} != widths("swap")
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="panel_width: .*; allowed: a positive number, or None"):
            draw(planned("swap"), panel_width=wrong)


def test_draw_invalid_programs() -> None:
    with pytest.raises(ArgumentError, match=r"of rank 1 alone; allowed in a drawing: of all ranks"):
        draw(plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0", rank=1))
    with pytest.raises(ArgumentError, match=r"of 65 ranks; allowed in a drawing: up to 64"):
        draw(plan((65,), (8, 6), "float32", "S0", "S1"))
    with pytest.raises(ArgumentError, match="allowed in a drawing: a Program"):
        draw("S0 S1")  # type: ignore[arg-type]
    assert len(Picture(plan((8, 8), (64, 64), "float32", "S0 S1", "R R")).panels) == 128


def test_plan_command_svg(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardweave.__main__ import main

    request = ["plan", "--mesh", "2,2", "--shape", "8,6", "S0 S1", "S1 S0", "--svg"]
    program = planned("swap")
    assert main([*request, str(tmp_path / "plan.svg")]) == 0
    assert capsys.readouterr().out == f"{program.explain()}\n"
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") == draw(program)
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    assert main([*request, str(folder)]) == 2
    assert f"--svg: '{folder}' cannot be written" in capsys.readouterr().err


def test_notebooks_show_what_can_be_drawn() -> None:
    program = plan((2,), (4, 4), "float32", "S0", "S1")
    assert program._repr_svg_() == draw(program)
    assert plan((2,), (4, 4), "float32", "S0", "S1", rank=0)._repr_svg_() is None
    assert plan((65,), (65, 4), "float32", "S0", "R")._repr_svg_() is None
