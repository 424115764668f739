"""Programs as SVG: the parts of the tensor that each rank holds before and after each step, and the transfers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

from ...errors import ArgumentError
from ..exchange.steps import Step
from ..layouts.mesh import Mesh
from ..program_base import ProgramBase
from .arrows import MAX_ARROWS, Arrows, depth
from .explain import mesh_dims_of_step, notes, title_as_planned, totals
from .panels import Panels
from .regions import stages
from .svg_primitives import Place, Sheet, text_width, wrapped

_MAX_RANKS = 64
_WIDTH = 1380.0  # preferred width of the sheet: a laptop screen
_MARGIN = 24.0
_GAP = 184.0  # between two columns, for the caption and the arrows of a step
_APART = 16.0  # between two panels
_STRIP = 17.0  # over each panel, for its rank and coordinate
_NODE_STRIP = 16.0  # over each node, for its number
_UNIT = re.compile(r"(?<=\d) (?=[KMG]?i?B)")  # no line break between a number and its unit


def draw(program: ProgramBase, *, panel_width: float | None = None) -> str:
    """Draw a program as an SVG document, with one column per layout and one panel per rank.

    A panel is the whole tensor. The part that the rank holds is filled, in the colour and with the number of the rank
    that sent it. Areas are to scale. The document suits light and dark backgrounds and is deterministic.

    Args:
        panel_width: the width of a panel in pixels, so that several drawings have one scale; default: as wide as a
            sheet of 1,380 pixels allows.

    Raises:
        ArgumentError: `program` is not a Program, is the program of a single rank, has over 64 ranks, or consists of
            too many pieces to be drawn; `panel_width` is not a positive number.
    """
    if not isinstance(program, ProgramBase):
        raise ArgumentError(f"program: a {type(program).__name__}; allowed in a drawing: a Program")
    if program.rank is not None:
        raise ArgumentError(f"program: of rank {program.rank} alone; allowed in a drawing: of all ranks (rank=None)")
    if program.mesh.size > _MAX_RANKS:
        raise ArgumentError(f"program: of {program.mesh.size} ranks; allowed in a drawing: up to {_MAX_RANKS}")
    if panel_width is not None and not 0 < panel_width < math.inf:
        raise ArgumentError(f"panel_width: {panel_width}; allowed: a positive number, or None")
    return _Drawing(program, panel_width).document()


class _Grid:
    """The mesh on the sheet: the first half of its dims run down, the others across, with more space between outer
    dims."""

    def __init__(self, mesh: Mesh) -> None:
        half = (mesh.ndim + 1) // 2
        self._down, self._across = mesh.shape[:half], mesh.shape[half:]
        self.rows, self.columns = math.prod(self._down), math.prod(self._across)
        if mesh.ndim == 1 and mesh.size > 8:
            self.columns = math.ceil(math.sqrt(mesh.size))
            self.rows, self._down = math.ceil(mesh.size / self.columns), ()

    def place(self, row: int, column: int, step: tuple[float, float]) -> tuple[float, float]:
        """The offset of a panel from the start of the grid."""
        x = column * step[0] + _APART * _changes(column, self._across)
        return x, row * step[1] + _APART * _changes(row, self._down)

    def rectangles(self, group: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """First row, last row, first column and last column of rectangles that cover a group of positions."""
        spans: dict[int, tuple[int, ...]] = {}
        for position in group:
            row, column = divmod(position, self.columns)
            spans[row] = (*spans.get(row, ()), column)
        runs = [(row, low, high) for row, columns in sorted(spans.items()) for low, high in _runs(sorted(columns))]
        while runs:
            first, low, high = runs[0]
            last = first
            while (last + 1, low, high) in runs:
                last += 1
            runs = [run for run in runs if run[1:] != (low, high) or not first <= run[0] <= last]
            yield first, last, low, high


def _changes(index: int, sizes: Sequence[int]) -> int:
    """The number of changes of outer coordinates up to an index into flattened dims of the given sizes."""
    return sum(index // math.prod(sizes[k:]) for k in range(1, len(sizes)))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last number of each run of consecutive numbers."""
    starts = [n for n in numbers if n - 1 not in numbers]
    return list(zip(starts, [n for n in numbers if n + 1 not in numbers], strict=True))


class _Drawing:
    """The document of one program."""

    def __init__(self, program: ProgramBase, panel_width: float | None) -> None:
        self.program, self.mesh, self.sheet = program, program.mesh, Sheet()
        self.stages = stages(program)
        self.panels = Panels(program, self.stages, self.sheet)
        self.grid = _Grid(self.mesh)
        self.transfers = [stage.transfers() for stage in self.stages[1:]]
        self.arrows = [Arrows(moved, self.grid.columns) for moved in self.transfers]
        self.nodes: dict[int, list[int]] = {}
        if program.topology is not None and program.topology.rank_nodes is not None:
            for position, rank in enumerate(self.mesh.rank_array.tolist()):
                self.nodes.setdefault(program.topology.node_of(rank), []).append(position)
        self._choose_sizes(panel_width)

    def _choose_sizes(self, width: float | None) -> None:
        """Set the size of panels, the same for all and by default as large as the sheet allows, and the places of
        columns."""
        grid, columns = self.grid, len(self.stages)
        if width is None:
            label = max(self.panels.label_width(p) for p in range(self.mesh.size))
            share = (_WIDTH - 2 * _MARGIN - _GAP * (columns - 1)) / columns / grid.columns - _APART
            nested = len(self.panels.across.dims) > 1  # dims inside each other want room
            width = max(min(share, 200.0 if nested else 120.0), label, 44.0)
        height = width * self.panels.drawn_proportion if self.panels.down.dims else 30.0
        self.panel_size = width, height
        gaps = list(zip([None, *self.arrows], [*self.arrows, None], strict=True))
        lanes = max(depth(row, *gap) for gap in gaps for row in range(grid.rows))
        self.strip = _STRIP + (_NODE_STRIP if self.nodes else 0.0)
        self.step = width + _APART, self.strip + height + lanes + 12.0
        x, y = grid.place(grid.rows - 1, grid.columns - 1, self.step)
        self.grid_size = x + width, y + self.step[1]
        widths = [max(self.grid_size[0], text_width(str(stage.layout), 13)) for stage in self.stages]
        self.lefts = [_MARGIN + sum(widths[:i]) + _GAP * i for i in range(columns)]
        self.width = max(self.lefts[-1] + widths[-1] + _MARGIN, 640.0)

    def document(self) -> str:
        program, sheet = self.program, self.sheet
        request, tensor = title_as_planned(program).split("   ")
        y = self._lines(_MARGIN + 14, [request], 16, font_weight="bold")
        y = self._lines(y, [tensor], 12)
        y = self._key(y + 4)
        self.top = self._headings(y + 18) + 10
        for i in range(len(self.stages)):
            self._outline_nodes(i)
            if i:
                self._gap(i - 1)
            for position in range(self.mesh.size):
                self.panels.draw(i, position, self._place(i, position))
        y = self.top + self.grid_size[1] + 20
        if program.is_identity:
            y = self._lines(y, ["nothing to do: the output is the input"], 12)
        lines = totals(program)
        y = self._lines(y, [line for line in lines if not line.startswith(" ")], 12)
        y = self._lines(y, [line.strip() for line in lines if line.startswith(" ")], 11, "muted")
        return sheet.document(self.width, y - 16 + _MARGIN, f"{program.source} → {program.target}")

    def _lines(self, y: float, lines: Sequence[str], size: float, class_: str = "", **attributes: object) -> float:
        """Write lines wrapped to the width of the sheet. Returns the next baseline."""
        for line in lines:
            for part in wrapped(line, self.width - 2 * _MARGIN, size):
                self.sheet.text(_MARGIN, y, part, size, class_, **attributes)
                y += size * 1.5
        return y

    def _headings(self, y: float) -> float:
        """Write layouts over the columns and steps over the gaps. Returns the bottom of the tallest."""
        bottom, last = y, len(self.stages) - 1
        for i, (left, stage) in enumerate(zip(self.lefts, self.stages, strict=True)):
            role = "source" if i == 0 else "target" if i == last else "between"
            self.sheet.text(left, y, "source and target" if last == 0 else role, 11, "muted")
            self.sheet.text(left, y + 17, str(stage.layout), 13, "layout", font_weight="bold")
            bottom = max(bottom, y + 17)
            if stage.step is None:
                continue
            middle, lines = left - _GAP / 2, self._caption(i, stage.step)
            for k, line in enumerate(lines):
                style = {"font_weight": "bold"} if k == 0 else {}
                self.sheet.text(middle, y + 14 * k, line, 11, "caption", text_anchor="middle", **style)
            bottom = max(bottom, y + 14 * (len(lines) - 1))
        return bottom

    def _caption(self, number: int, step: Step) -> list[str]:
        along = mesh_dims_of_step(self.program, step)
        parts = [part for note in notes(self.program, step) for part in note.replace(" (", "\n(").split("\n")]
        lines = [f"{number}. {step.kind}", *([along] if along else []), *parts]
        return [part for line in lines for part in wrapped(_UNIT.sub("\u00a0", line), _GAP - 16, 11)]

    def _key(self, y: float) -> float:
        """Write the legend: how to read the picture, and a swatch per kind of region. Returns the next baseline."""
        y = self._lines(y, [self.panels.how_to_read()], 11, "muted") + 3
        x = _MARGIN
        for text, attributes in self.panels.kinds():
            width = 18 + text_width(text, 11)
            if x + width > self.width - _MARGIN:
                x, y = _MARGIN, y + 18
            for more in attributes:
                self.sheet.add("rect", x=x, y=y - 10, width=12.0, height=12.0, **more)
            self.sheet.text(x + 18, y, text, 11, "muted")
            x += width + 18
        return y + 16 if x > _MARGIN else y

    def _place(self, i: int, position: int) -> Place:
        x, y = self.grid.place(*divmod(position, self.grid.columns), self.step)
        return Place(self.lefts[i] + x, self.top + y + self.strip, *self.panel_size)

    def _outline_nodes(self, i: int) -> None:
        for node, positions in self.nodes.items():
            for first, last, low, high in self.grid.rectangles(positions):
                start = self._place(i, first * self.grid.columns + low)
                end = self._place(i, last * self.grid.columns + high)
                x, y = start.x - 6, start.y - self.strip
                height = end.y + self.step[1] - self.strip - y - 4
                self.sheet.add("rect", class_="node", x=x, y=y, width=end.right + 6 - x, height=height, rx=6)
                self.sheet.text(start.x, y + 12, f"node {node}", 9, "muted")

    def _gap(self, i: int) -> None:
        """Draw the transfers between two columns: an arrow for each pair of ranks, or the number of pairs."""
        moved, arrows = self.transfers[i], self.arrows[i]
        left, right = self.lefts[i] + self.grid_size[0], self.lefts[i + 1]
        if arrows.transfers:
            titles = {
                (a, b): f"rank {self.panels.rank(a)} → rank {self.panels.rank(b)}: {self.panels.size(elements)}"
                for (a, b), elements in moved.items()
            }
            before = self.arrows[i - 1] if i else None
            source, target = partial(self._place, i), partial(self._place, i + 1)
            arrows.draw(self.sheet, source, target, (left, right), before, titles)
            return
        x, y = right - _GAP / 2, self.top + self.grid_size[1] / 2
        self.sheet.add("path", class_="onward", d=f"M{x - 20:.1f},{y - 7:.1f} h22 v-8 l18,15 l-18,15 v-8 h-22 Z")
        note = f"{len(moved)} transfers," if moved else "nothing moves"
        for k, line in enumerate([note, f"over {MAX_ARROWS}: no arrows"] if moved else [note]):
            self.sheet.text(x, y + 30 + 13 * k, line, 10, "muted", text_anchor="middle")
