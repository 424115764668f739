"""Drawings of programs, parsed: regions, colours, tooltips, and room for text."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, replace

import brute_force_oracle as oracle
import numpy as np
import pytest

from shardweave.errors import ArgumentError
from shardweave.planner import NVLINK_INFINIBAND, Exchange, Layout, Mesh, Program, TransferTable, draw, plan
from shardweave.planner.layouts.index_sets import boxes_of_all
from shardweave.planner.layouts.node_layout import NodeLayout
from shardweave.planner.render.explain import totals

pytestmark = pytest.mark.plan

NODES_OF_4 = replace(NVLINK_INFINIBAND, node_size=4)
NODES_OF_2 = replace(NVLINK_INFINIBAND, node_size=2)
REQUESTS: dict[str, tuple] = {
    "identity": ((2, 2), (8, 6), "float32", "S0 S1", "S0 S1"),
    "swap": ((2, 2), (8, 6), "float32", "S0 S1", "S1 S0"),
    "local": ((2, 2), (8, 6), "float32", "R R", "S0 S1"),
    "uneven": ((2, 2), (7, 5), "float32", "S0 S0", "R S0"),
    "reversed_order": ((2, 3), (11, 4), "bfloat16", "S0 S0", "S0 S0 @ 0:1,0"),
    "empty_shards": ((2, 4), (3,), "float32", "S0 S0", "R S0"),
    "empty_tensor": ((2, 2), (0, 4), "float32", "S0 R", "S1 R"),
    "scalar": ((2, 2), (), "float64", "P P", "R R"),
    "scalar_average": ((2, 4), (), "float64", "Pavg Pavg", "R R"),
    "gradient": ((4, 4), (16, 16), "float32", "P S0", "S0 S0"),
    "all_reduce": ((4, 4), (16, 16), "float32", "P P", "R R"),
    "max": ((2, 2), (8, 6), "float32", "Pmax R", "S1 R"),
    "filled": ((2, 2), (8, 6), "float32", "S0 R", "Pmax R"),
    "integers_to_sum": ((2, 2), (7, 3), "int64", "R R", "P S0"),
    "one_mesh_dim": ((4,), (8, 8), "float32", "S0", "S1"),
    "sixteen_in_a_row": ((16,), (24, 8), "float32", "S0", "S1"),
    "eleven_in_a_row": ((11,), (24, 8), "float32", "S0", "S1"),
    "size_one": ((1, 4), (9, 5), "float32", "P S0", "R S1"),
    "three_mesh_dims": (Mesh((2, 2, 2), ("pp", "dp", "tp")), (8, 6, 4), "float32", "S0 S1 S2", "S1 S0 S0"),
    "four_mesh_dims": ((2, 2, 2, 2), (5, 6, 3, 4), "float32", "S0 S1 S2 S3", "S1 S0 R R"),
    "two_of_three_dims": ((2, 2), (8, 3, 6), "float32", "S0 S2", "S2 S0"),
    "ranks_of_a_world": (Mesh((2, 2), ("dp", "tp"), (13, 5, 9, 7)), (8, 6), "float32", "S0 S1", "R S1"),
    "gather_4x4": ((4, 4), (16, 16), "float32", "S0 S1", "R R"),
    "swap_4x4": ((4, 4), (16, 12), "float32", "S0 S1", "S1 S0"),
    "strided": ((2, 2), (24, 6), "float32", "S0/3 R", "S0//2 S1"),
    "strided_and_uneven": ((2, 2), (11, 7), "float32", "S1 S0/3", "S0 S0/3"),
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
TO_SCALE = [name for name in NAMES if name != "long_shapes"]
FLAT = [name for name in TO_SCALE if len({**REQUESTS, **ON_NODES}[name][1]) in (1, 2)]


def planned(name: str) -> Program:
    if name in REQUESTS:
        return plan(*REQUESTS[name])
    *request, topology = ON_NODES[name]
    return plan(*request, topology=topology)


def tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def title(element: ElementTree.Element) -> str:
    return element[0].text or ""


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.get(name, "")) for name in names]


@dataclass
class Drawn:
    """One region of a panel; rectangles are x, y, width, height with the panel's sides as 1."""

    senders: tuple[int, ...]
    kind: str
    fill: str | None
    rectangles: list[tuple[float, ...]]
    labels: list[str]
    title: str


class Picture:
    """An SVG, and its panels by (column, rank)."""

    def __init__(self, program: Program) -> None:
        self.svg = draw(program)
        self.root = ElementTree.fromstring(self.svg)
        self.view = [float(x) for x in self.root.attrib["viewBox"].split()]
        self.panels: dict[tuple[int, int], list[Drawn]] = {}
        self.chips: dict[int, str] = {}  # the colour of each rank
        self.arrows = [e for e in self.root.iter() if e.get("class") == "arrow"]
        for panel in (e for e in self.root.iter() if e.get("class") == "rank"):
            frame = next(e for e in panel if e.get("class", "").startswith("panel"))
            place = numbers(frame, "x", "y", "width", "height")
            self.chips[int(panel.attrib["data-rank"])] = panel[1].attrib["fill"]
            drawn = [self._region(e, place) for e in panel if e.get("class") == "region"]
            self.panels[int(panel.attrib["data-column"]), int(panel.attrib["data-rank"])] = drawn

    def _region(self, group: ElementTree.Element, place: list[float]) -> Drawn:
        marks = [e for e in group if e.get("class") in ("held", "moved", "kept", "filled")]
        x, y, width, height = place
        rectangles = []
        for left, top, across, down in (numbers(e, "x", "y", "width", "height") for e in marks if tag(e) == "rect"):
            rectangles.append(((left - x) / width, (top - y) / height, across / width, down / height))
        return Drawn(
            tuple(map(int, group.attrib["data-senders"].split())),
            marks[0].attrib["class"],
            marks[0].get("fill"),
            rectangles,
            [e.text or "" for e in group if tag(e) == "text"],
            title(group),
        )

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


@pytest.mark.parametrize("name", TO_SCALE)
def test_draw_areas_proportional_to_elements(name: str) -> None:
    program = planned(name)
    layouts = [program.source, *(step.target for step in program.steps)]
    for (column, rank), drawn in Picture(program).panels.items():
        position = list(program.mesh.rank_array).index(rank)
        held = math.prod(program.local_shape(layouts[column], position))
        assert bool(drawn) == (held > 0)
        if program.shape:
            area = sum(width * height for region in drawn for _, _, width, height in region.rectangles)
            assert area == pytest.approx(held / max(math.prod(program.shape), 1), rel=2e-3)


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
def test_draw_colours_labels_and_tooltips(name: str) -> None:
    program = planned(name)
    picture = Picture(program)
    moved: set[tuple[int, int, int]] = set()
    for (column, rank), drawn in picture.panels.items():
        for region in drawn:
            kind = "filled" if not region.senders else "kept" if region.senders == (rank,) else "moved"
            assert region.kind == (kind if column else "held")
            if len(region.senders) == 1:
                assert region.fill == picture.chips[region.senders[0]]
                assert region.labels in ([], [str(region.senders[0])])
                assert re.search(rf"\b{region.senders[0]}\b", region.title)
            assert region.title.startswith(f"rank {rank} ")
            for sender in region.senders:
                if column and sender != rank:
                    moved.add((column, sender, rank))
    for column, step in enumerate(program.steps, 1):
        sender, receiver = np.broadcast_arrays(step.boxes.sender, step.boxes.receiver[:, None])
        pairs = {(a, b) for a, b in zip(sender.ravel().tolist(), receiver.ravel().tolist(), strict=True)}
        wanted = {(program.mesh.rank_at(a), program.mesh.rank_at(b)) for a, b in pairs if a not in (b, -1)}
        assert {(a, b) for c, a, b in moved if c == column} == wanted
    few = [n for c in range(1, len(program.steps) + 1) if (n := sum(k[0] == c for k in moved)) <= 24]
    assert len(picture.arrows) == sum(few)


def test_draw_arrow_tooltips_and_widths() -> None:
    arrows = {title(a): float(a[1].attrib["stroke-width"]) for a in Picture(planned("uneven")).arrows}
    assert arrows["rank 0 → rank 2: 10 elements, 40 B"] == 3
    assert arrows["rank 3 → rank 1: 5 elements, 20 B"] == 2
    assert len(arrows) == 6


def test_draw_region_tooltips() -> None:
    titles = [e.text for e in Picture(planned("swap")).root.iter() if tag(e) == "title"]
    assert "rank 1 at (0,1) under S0 S1: 12 elements, 48 B, of 48" in titles
    assert "rank 1 holds: [0:4, 3:6], 12 elements, 48 B" in titles
    assert "rank 1 receives from rank 2: [4:8, 0:3], 12 elements, 48 B" in titles
    assert "rank 0 keeps: [0:4, 0:3], 12 elements, 48 B" in titles
    titles = [e.text for e in Picture(planned("max")).root.iter() if tag(e) == "title"]
    assert "rank 0 reduces from ranks 0, 2 (max of 2): [0:8, 0:3], 24 elements, 96 B" in titles


def test_draw_hatches_partial() -> None:
    root = Picture(planned("gradient")).root
    hatched = {p.get("data-column") for p in root.iter() for e in p.iter() if e.get("class") == "partial"}
    assert {"0"} <= hatched and "1" not in hatched
    assert "hatch" not in draw(plan((1, 4), (8, 8), "float32", "P S0", "P S1")).split("</style>")[1]


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


@pytest.mark.parametrize("name", NAMES)
def test_draw_rectangles_inside_sheet(name: str) -> None:
    picture = Picture(planned(name))
    for element in picture.root.iter():
        if tag(element) == "rect" and element.get("x"):
            x, y, width, height = numbers(element, "x", "y", "width", "height")
            assert 0 <= x and x + width <= picture.view[2] and 0 <= y and y + height <= picture.view[3]


@pytest.mark.parametrize("source", sorted(set(oracle.layout_texts(2, ("R", "S0", "S1", "P")))))
def test_draw_all_layouts_on_2x3(source: str) -> None:
    for target in ("R R", "S1 S0", "S0 S0 @ 0:1,0"):
        program = plan((2, 3), (7, 5), "float32", source, target)
        picture = Picture(program)
        assert len(picture.panels) == 6 * (len(program.steps) + 1)
        for drawn in picture.panels.values():
            assert all(region.rectangles for region in drawn)


def test_draw_small_shards_visible() -> None:
    picture = Picture(plan((2, 2), (100_001, 3), "float32", "S0 S0", "R R"))
    last = picture.panels[0, 3]
    assert all(height > 0.006 for _, _, _, height in last[0].rectangles)
    tiny = Picture(plan((2,), (3, 2**20 + 1), "float32", "S0", "R")).root
    assert all(float(e.get("width", 1)) >= 1 for e in tiny.iter() if tag(e) == "rect")
    one_of_many = Picture(plan((4,), (4 * 10**6 - 2,), "float32", "S0", "R"))
    assert all(region.rectangles for drawn in one_of_many.panels.values() for region in drawn)


def test_draw_node_outlines() -> None:
    root = Picture(planned("gather_over_nodes")).root
    outlines = [numbers(e, "x", "y", "width", "height") for e in root.iter() if e.get("class") == "node"]
    steps = len(planned("gather_over_nodes").steps)
    assert len(outlines) == 2 * (steps + 1)
    frames = [numbers(e, "x", "y", "width", "height") for e in root.iter() if e.get("class", "").startswith("panel ")]
    frames += [numbers(e, "x", "y", "width", "height") for e in root.iter() if e.get("class") == "panel"]
    for x, y, width, height in outlines:
        inside = [f for f in frames if x < f[0] < f[0] + f[2] < x + width and y < f[1] < f[1] + f[3] < y + height]
        assert len(inside) == 4
    assert "node" not in {e.get("class") for e in Picture(planned("swap")).root.iter()}


def test_draw_strided_boxes() -> None:
    """Boxes with two axes along tensor dim 0: pairs of rows, alternating between two senders."""
    layout = Layout.parse("S0")
    n, contributors = 4, 1
    boxes = TransferTable(
        receiver=np.array([0, 0, 1, 1]),
        sender=np.array([0, 1, 0, 1]).reshape(n, contributors),
        source_start=np.array([[0, 0], [0, 0], [2, 0], [2, 0]]),
        target_start=np.array([[0, 0], [2, 0], [0, 0], [2, 0]]),
        extent=np.array([[2, 2, 3]] * n),
        source_step=np.array([[4, 1, 1]] * n),
        target_step=np.array([[4, 1, 1]] * n),
        axes=(0, 0, 1),
    )
    base = plan((2,), (16, 3), "float32", "S0", "S1")
    step = Exchange(base.mesh, layout, base.mesh, layout, boxes, None, 0, (0,))
    picture = Picture(replace(base, target=layout, steps=(step,)))
    first, second = picture.panels[1, 0]
    assert "rank 0 keeps: [0:2∪4:6, 0:3], 12 elements, 48 B" == first.title
    assert "rank 0 receives from rank 1: [2:4∪6:8, 0:3], 12 elements, 48 B" == second.title
    assert [round(y * 16) for _, y, _, _ in second.rectangles] == [2, 6]
    assert [region.title.split("[")[1][:10] for region in picture.panels[1, 1]] == ["8:10∪12:14", "10:12∪14:1"]
    fine = replace(boxes, extent=np.array([[300, 1, 3]] * n))
    with pytest.raises(ArgumentError, match="300 pieces along one tensor dim"):
        draw(replace(base, target=layout, steps=(replace(step, boxes=fine),)))
    combs = replace(boxes, extent=np.array([[2, 1, 200]] * n), target_step=np.array([[4, 1, 2]] * n), axes=(0, 0, 1))
    wide = plan((2,), (16, 400), "float32", "S0", "S1")
    assert (
        len(Picture(replace(wide, target=layout, steps=(replace(step, boxes=combs),))).panels[1, 0][0].rectangles)
        == 400
    )
    combs = replace(combs, extent=np.array([[150, 1, 200]] * n))
    tall = plan((2,), (1200, 400), "float32", "S0", "S1")
    with pytest.raises(ArgumentError, match="120002 pieces; allowed in a drawing: 20000"):
        draw(replace(tall, target=layout, steps=(replace(step, boxes=combs),)))


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


def test_draw_spacing_of_outer_mesh_dims() -> None:
    root = Picture(planned("three_mesh_dims")).root
    first = [p for p in root.iter() if p.get("class") == "rank" and p.get("data-column") == "0"]
    tops = sorted({float(p[1].attrib["y"]) for p in first})
    assert len(tops) == 4 and tops[2] - tops[1] > tops[1] - tops[0] == pytest.approx(tops[3] - tops[2])


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


def test_draw_colour_schemes_and_view_box() -> None:
    svg = draw(planned("swap"))
    assert "@media (prefers-color-scheme: dark)" in svg and "sans-serif" in svg
    root = ElementTree.fromstring(svg)
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"


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
