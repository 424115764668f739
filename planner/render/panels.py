"""Panels: each shows the whole tensor, with the part that one rank holds filled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...errors import ArgumentError
from ..layouts.dtypes import ITEMSIZE
from ..program_base import ProgramBase, format_bytes
from .regions import Region, Runs, Stage
from .svg_primitives import COLOURS, Place, Sheet, colour, text_on, text_width, wrapped

_MAX_PIECES = 20_000
_KEPT = 0.3  # opacity of regions that did not move


class _Axis:
    """One side of a panel: nested tensor dims, outermost first, mapped to positions between 0 and 1.

    An outer dim is cut into segments wherever a region starts or stops; each segment, to scale, spans the whole next
    dim. So a region consists of few rectangles, and areas are proportional to elements.
    """

    def __init__(self, dims: Sequence[int], shape: Sequence[int], regions: Sequence[Region]) -> None:
        self.dims, self.sizes = dims, [shape[d] for d in dims]
        self._cuts = [sorted({end for r in regions for run in r.runs[d] for end in run} | {0, shape[d]}) for d in dims]

    def places(self, runs: Sequence[Runs], level: int = 0) -> list[tuple[float, float]]:
        """The intervals of a region, from the dim at `level` inwards."""
        if level == len(self.dims):
            return [(0.0, 1.0)]
        inside = self.places(runs, level + 1)
        size, places = self.sizes[level], []
        for start, stop in runs[self.dims[level]]:
            whole = inside == [(0.0, 1.0)]
            ends = [start, stop] if whole else [c for c in self._cuts[level] if start <= c <= stop]
            for low, high in pairwise(ends):
                places += [((low + (high - low) * a) / size, (low + (high - low) * b) / size) for a, b in inside]
        return places

    def seams(self) -> list[float]:
        """The boundaries between segments of the outermost dim, if there are inner dims."""
        return [cut / self.sizes[0] for cut in self._cuts[0][1:-1]] if len(self.dims) > 1 else []

    def __str__(self) -> str:
        return " inside ".join(f"dim {d}" for d in reversed(self.dims))


class Panels:
    """Draws the panels of one program.

    Attributes:
        down, across: the tensor dims along the sides.

    Raises:
        ArgumentError: the regions consist of too many pieces to be drawn.
    """

    def __init__(self, program: ProgramBase, stages: Sequence[Stage], sheet: Sheet) -> None:
        self.program, self.mesh, self.stages, self.sheet = program, program.mesh, stages, sheet
        shape = self.program.shape
        regions = [r for stage in self.stages for held in stage.regions for r in held]
        # Dims that every region spans are left out, unless fewer than two dims would be shown.
        cut = [d for d, n in enumerate(shape) if any(r.runs[d] != ((0, n),) for r in regions)]
        whole = sorted(set(range(len(shape))) - set(cut), key=lambda d: (shape[d] == 1, d))
        dims = sorted(cut + whole[: max(0, 2 - len(cut))])
        self._left_out = len(shape) - len(dims)
        half = len(dims) // 2
        self.down, self.across = (_Axis(some, shape, regions) for some in (dims[:half], dims[half:]))
        pieces = sum(len(self.down.places(r.runs)) * len(self.across.places(r.runs)) for r in regions)
        if pieces > _MAX_PIECES:
            raise ArgumentError(
                f"program: its shards consist of {pieces} pieces; allowed in a drawing: {_MAX_PIECES}. Draw a smaller "
                f"shape with the same layouts"
            )

    def how_to_read(self) -> str:
        """The first line of the legend."""
        if not self.program.shape:
            text = "Each panel is the one value of the tensor."
        elif not self.down.dims:
            text = f"Each panel is the whole tensor, {self.across} from left to right."
        else:
            text = f"Each panel is the whole tensor, {self.down} downwards and {self.across} from left to right."
        for axis in (self.down, self.across):
            if len(axis.dims) > 1:
                outer, *inner = (f"dim {d}" for d in axis.dims)
                text += f" Dotted lines divide {outer}; each part holds all of {' and '.join(inner)}."
        if self._left_out:
            text += " The dims left out are whole everywhere."
        if self.down.dims and self.drawn_proportion != self.proportion:
            p = self.proportion
            ratio = f"{p:.3g} to 1" if p > 1 else f"1 to {1 / p:.3g}"
            text += f" Height and width are not to scale ({ratio}); areas inside a panel are."
        text += " Colours and numbers show which rank sent a part."
        if self.mesh.size > COLOURS:
            text += f" Colours repeat every {COLOURS} ranks: point at a part for its rank."
        return text

    @property
    def proportion(self) -> float:
        """Height divided by width, in elements."""
        tall, wide = (max(math.prod(axis.sizes), 1) for axis in (self.down, self.across))
        return tall / wide

    @property
    def drawn_proportion(self) -> float:
        """Height divided by width, as drawn."""
        return min(max(self.proportion, 0.6), 1.4)

    def rank(self, position: int) -> str:
        return str(self.mesh.rank_at(position))

    def coordinate(self, stage: Stage, position: int) -> str | None:
        """Of a rank in the mesh of a column; None where the rank is not in it."""
        at = self.program.coordinate_in(stage.mesh, position)
        return None if at is None else f"({','.join(map(str, at))})"

    def label_width(self, position: int) -> float:
        widest = max(text_width(self.coordinate(stage, position) or "", 9) for stage in self.stages)
        return text_width(self.rank(position), 10) + widest + 14

    def size(self, elements: int) -> str:
        nbytes = format_bytes(elements * ITEMSIZE[self.program.dtype])
        return f"{elements} element{'' if elements == 1 else 's'}, {nbytes}"

    def kinds(self) -> Iterator[tuple[str, list[dict[str, object]]]]:
        """The kinds of region in the picture, with the rectangles of a swatch of each."""
        after = [r for stage in self.stages[1:] for held in stage.regions for r in held]
        if any(len(r.senders) == 1 and not r.kept for r in after):
            yield "received", [{"class_": "moved", "fill": colour(1)}]
        if any(r.kept for r in after):
            yield "kept", [{"fill": colour(0), "fill_opacity": _KEPT}, {"fill": "none", "stroke": colour(0)}]
        if any(len(r.senders) > 1 for r in after):
            yield "reduced from several ranks", [{"fill": self.sheet.stripes([colour(0), colour(1)])}]
        if any(not r.senders for r in after):
            yield "filled", [{"class_": "filled"}]
        if any(map(self._partial, self.stages)):
            yield "partial: still to be reduced", [{"class_": "panel"}, {"fill": self.sheet.hatch()}]
        without = {
            "empty" if self.coordinate(stage, position) else "not in this mesh"
            for stage in self.stages
            for position, held in enumerate(stage.regions)
            if not held
        }
        if without:
            yield " or ".join(sorted(without)), [{"class_": "panel without"}]

    def _partial(self, stage: Stage) -> bool:
        return stage.layout.without_size_one(stage.mesh.shape).has_partial

    def draw(self, column: int, position: int, place: Place) -> None:
        """Draw the panel of one rank in one column, under its number and coordinate."""
        sheet, stage = self.sheet, self.stages[column]
        regions = stage.regions[position]
        rank, coordinate = self.rank(position), self.coordinate(stage, position)
        held = sum(r.elements for r in regions)
        share = f"{self.size(held)}, of {math.prod(self.program.shape)}"
        where = f"at {coordinate}" if coordinate else "not in the mesh"
        title = f"rank {rank} {where} under {stage.layout}: {share}"
        sheet.open(title, class_="rank", data_rank=rank, data_column=column)
        chip = text_width(rank, 10) + 6
        sheet.add("rect", x=place.x, y=place.y - 15, width=chip, height=12.0, rx=3, fill=colour(position))
        sheet.text(place.x + 3, place.y - 5.5, rank, 10, text_on(colour(position)), font_weight="bold")
        if coordinate:
            sheet.text(place.x + chip + 4, place.y - 5.5, coordinate, 9, "muted")
        box = dict(zip(("x", "y", "width", "height"), place, strict=True))
        sheet.add("rect", class_="panel" if regions else "panel without", **box)
        for region in regions:
            self._region(stage, region, place)
        for at in self.down.seams():
            y = place.y + at * place.height
            sheet.add("path", class_="seam", d=f"M{place.x:.1f},{y:.1f} H{place.right:.1f}")
        for at in self.across.seams():
            x = place.x + at * place.width
            sheet.add("path", class_="seam", d=f"M{x:.1f},{place.y:.1f} V{place.bottom:.1f}")
        if not regions:
            lines = ["empty"] if coordinate else wrapped("not in mesh", place.width, 10)
            x, y = place.x + place.width / 2, place.y + place.height / 2 - 6 * (len(lines) - 1)
            for i, line in enumerate(lines):
                sheet.text(x, y + 3.5 + 12 * i, line, 10, "muted", text_anchor="middle")
        sheet.close()

    def _region(self, stage: Stage, region: Region, panel: Place) -> None:
        sheet, ranks = self.sheet, [self.rank(s) for s in region.senders]
        holder, first = self.rank(region.holder), stage.step is None
        ranges = ", ".join(_written(runs) for runs in region.runs)
        sheet.open(
            f"rank {holder} {_verb(stage, region, ranks)}: [{ranges}], {self.size(region.elements)}",
            class_="region",
            data_holder=holder,
            data_senders=" ".join(ranks),
        )
        paint: dict[str, object] = {"class_": "held" if first else "moved"}
        if not ranks:
            paint = {"class_": "filled"}
        elif len(ranks) > 1:
            paint["fill"] = sheet.stripes([colour(s) for s in region.senders])
        else:
            paint["fill"] = colour(region.senders[0])
        kept = region.kept and not first
        if kept:
            paint |= {"class_": "kept", "fill_opacity": _KEPT}
        pieces = [
            Place(panel.x + x * panel.width, panel.y + y * panel.height, width * panel.width, height * panel.height)
            for y, height in ((low, high - low) for low, high in self.down.places(region.runs))
            for x, width in ((low, high - low) for low, high in self.across.places(region.runs))
        ]
        for piece in pieces:
            # At least one pixel, so that it stays visible.
            width, height = max(piece.width, 1.0), max(piece.height, 1.0)
            # An outline would cover a thin rectangle.
            outline = {"style": "stroke: none"} if min(width, height) < 4 else {}
            self._mark(piece.x, piece.y, width, height, **paint, **outline)
            if kept and min(width, height) > 6:
                rim = {"class_": "rim", "fill": "none", "stroke": colour(region.holder)}
                self._mark(piece.x + 1, piece.y + 1, width - 2, height - 2, **rim)
            if self._partial(stage):
                self._mark(piece.x, piece.y, width, height, class_="partial", fill=sheet.hatch())
        self._number(stage, region, max(pieces, key=lambda p: p.width * p.height), panel)
        sheet.close()

    def _mark(self, x: float, y: float, width: float, height: float, **attributes: object) -> None:
        """Draw a rectangle, or a dot for the value of a tensor without dims."""
        if self.program.shape:
            self.sheet.add("rect", x=x, y=y, width=width, height=height, **attributes)
        else:
            self.sheet.add("circle", cx=x + height * 0.6, cy=y + height / 2, r=height * 0.4, **attributes)

    def _number(self, stage: Stage, region: Region, piece: Place, panel: Place) -> None:
        """Write the senders of a region, if there is room."""
        step, ranks = stage.step, [self.rank(s) for s in region.senders]
        op = step.reduce.op if step and step.reduce else "sum"
        if len(ranks) > 1:
            texts = [("+" if op == "sum" else ",").join(ranks), f"{'Σ' if op == 'sum' else op}{len(ranks)}"]
        else:
            texts = ranks or [f"={step.fill}" if step else ""]
        alone = len(stage.regions[region.holder]) == 1
        for text, size in [(text, size) for text in texts for size in (11, 9)]:
            width, height = text_width(text, size), 0.75 * size  # digits have no descenders
            spot = self._spot(width, height, piece, panel, alone)
            if spot is None:
                continue
            x, y, inside = spot
            plain = len(ranks) == 1 and not self._partial(stage)
            if inside and not plain:
                plate = {"x": x - width / 2 - 1, "y": y - height / 2 - 1, "width": width + 2, "height": height + 2}
                self.sheet.add("rect", class_="plate", rx=2, **plate)
            on_colour = inside and plain and not (region.kept and step)
            class_ = text_on(colour(region.senders[0])) if on_colour else ""
            self.sheet.text(x, y + height / 2, text, size, class_, text_anchor="middle")
            return

    def _spot(
        self, width: float, height: float, piece: Place, panel: Place, alone: bool
    ) -> tuple[float, float, bool] | None:
        """The centre of a text and whether that lies in its region; None if there is no room."""
        x, y = piece.x + piece.width / 2, piece.y + piece.height / 2
        if not self.program.shape:
            x = piece.x + piece.height * 1.25 + width / 2  # beside the dot
            return (x, y, False) if x + width / 2 <= panel.right else None
        if width + 3 <= piece.width and height + 1.5 <= piece.height:
            return x, y, True
        if not alone or width > panel.width:
            return None
        # A region that is alone in its panel may have its text beside it.
        x = min(max(x, panel.x + width / 2), panel.right - width / 2)
        away = 2 + height / 2
        y = piece.bottom + away if piece.bottom + height + 4 <= panel.bottom else piece.y - away
        return None if y - height / 2 < panel.y else (x, y, False)


def _verb(stage: Stage, region: Region, ranks: Sequence[str]) -> str:
    """The verb phrase of a region's tooltip."""
    step = stage.step
    if step is None:
        return "holds"
    if not ranks:
        return f"fills with {step.fill}"
    reduced = f" ({step.reduce})" if step.reduce else ""
    if region.kept:
        return f"keeps{reduced}"
    if len(ranks) == 1:
        return f"receives from rank {ranks[0]}{reduced}"
    return f"reduces from ranks {', '.join(ranks)}{reduced}"


def _written(runs: Runs) -> str:
    """Index ranges as in Python, of many only the first eight."""
    text = "∪".join(f"{start}:{stop}" for start, stop in runs[:8])
    return f"{text}∪… ({len(runs)} runs)" if len(runs) > 8 else text
