"""Measured results as pictures: SVG for light and dark pages. The docstring of a chart is its caption in the report.

Text and axes have the colour of the page's text, backgrounds are transparent, and the colours of contenders contrast
with white and with black. Text is outlines, so that no font is needed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...planner.render.explain import format_bytes
from .result_file import UNITS, Row, contenders, is_ours

COLOURS = {"ours": "#0b70ba", "ours2": "#4398cf", "stock": "#c24e00", "other": "#00805c", "other2": "#8a4b9e",
           "copy": "#6b7280"}  # fmt: skip
_MARKS = {"ours": "o", "ours2": "D", "stock": "s", "other": "^", "other2": "v", "copy": "|"}
_INK = "#010101"  # replaced by the colour of the page's text
_PAINTED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_PAINTED, _INK),
    "svg.fonttype": "path",
    "svg.hashsalt": "shardweave",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
_WIDTH = 10.4  # inches
_LEGEND_WIDTH = 120  # letters of a line

Panel = Callable[[Axes], None]


def colour_name(contender: str) -> str:
    """The colour of ours, its variants, stock, a bare copy or another contender."""
    if is_ours(contender):
        return "ours" if contender in ("ours", "ours, torch reference") else "ours2"
    return {"stock": "stock", "copy": "copy", "torch.distributed": "other"}.get(contender, "other2")


def _look(contender: str) -> dict[str, Any]:
    name = colour_name(contender)
    return {"color": COLOURS[name], "marker": _MARKS[name], "label": contender}


def _picture(ylabel: str, height: float, panels: Sequence[Panel]) -> str | None:
    """An SVG file with the panels side by side and a common legend; None if there is no panel."""
    if not panels:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        for ax, draw in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            draw(ax)
        figure.axes[0].set_ylabel(ylabel)
        entries = (entry for ax in figure.axes for entry in zip(*ax.get_legend_handles_labels(), strict=True))
        handles = {label: handle for handle, label in entries}
        most = max(1, min(6, _LEGEND_WIDTH // (max(map(len, handles)) + 6)))
        figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=most)
        out, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def time_against_size(rows: Sequence[Row]) -> str | None:
    """Time over size. Bands are from quartile to quartile; both axes are logarithmic. The dashed line is a bare copy of
    the bytes that a rank has to receive."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.detail.get("sweep"):
            kinds.setdefault(row.detail["sweep"], []).append(row)

    def panel(kind: str, ax: Axes) -> None:
        for contender in contenders(kinds[kind]):
            line = [row for row in kinds[kind] if row.contender == contender]
            line.sort(key=lambda row: row.detail["tensor_bytes"])
            x = [row.detail["tensor_bytes"] for row in line]
            lower, middle, upper = (
                [of(row) * UNITS[row.unit] * 1e6 for row in line]
                for of in (lambda row: row.quartiles[0], lambda row: row.median, lambda row: row.quartiles[1])
            )
            ax.plot(x, middle, linestyle="--" if contender == "copy" else "-", **_look(contender))
            ax.fill_between(x, lower, upper, color=_look(contender)["color"], alpha=0.18, linewidth=0)
        detail = kinds[kind][0].detail
        ax.set(xscale="log", yscale="log", title=f"{kind}: {detail['source']} → {detail['target']}")
        ax.set_xlabel("bytes of the whole tensor")
        low, high = ax.get_xlim()
        ticks = [2**k for k in range(0, 60, 2) if low <= 2**k <= high]
        ax.set_xticks(ticks, list(map(format_bytes, ticks)), rotation=45)
        ax.minorticks_off()

    return _picture("µs a call, slowest rank", 3.9, [partial(panel, kind) for kind in kinds])


def beside_copies(rows: Sequence[Row]) -> str | None:
    """Each kernel beside a bare copy in the same run: bandwidth, with all that is read and written counted."""
    shown = [row for row in rows if row.bytes and row.share_of_ceiling is not None]
    cases = list(dict.fromkeys(row.case for row in shown))

    def panel(ax: Axes) -> None:
        for row in shown:
            rate = (row.bytes or 0) / (row.median * UNITS[row.unit]) / 1e9
            look = {**_look(row.contender), "linestyle": "none", "markersize": 6.5}
            if row.contender == "copy":
                look |= {"label": "a bare copy", "markersize": 15, "markeredgewidth": 2.5}
            elif colour_name(row.contender) == "other2":
                look["label"] = "other libraries and torch's operations"
            ax.plot(rate, cases.index(row.case), zorder=3 if row.is_ours else 2, **look)
        ax.set_yticks(range(len(cases)), [case if len(case) < 62 else f"{case[:60]}…" for case in cases])
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel("GB/s, bytes read and written")

    return _picture("", 1.3 + 0.34 * len(cases), [panel] * bool(cases))
