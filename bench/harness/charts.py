"""Measured results as pictures: SVG to stand inside an HTML page, coloured by its style sheet.

matplotlib knows no style sheets, so it draws in colours that stand for names, which are put in their place afterwards:
one picture then serves light and dark pages. Backgrounds are transparent; text is outlines, so that no font is missing.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ...planner.render.explain import format_bytes
from ..planning.projection_rows import Row as Projected
from ..planning.projection_rows import totals
from .result_file import UNITS, Row, contenders, is_ours

# The colour that stands for a name of the style sheet.
NAMES = {
    name: f"#0a0b{i:02x}" for i, name in enumerate(("ink", "muted", "grid", "ours", "ours2", "stock", "other", "other2",
                                                    "ceiling"))
}  # fmt: skip
_SIDES = {"copy": "ceiling", "torch.distributed": "other"}
_MARKS = {"ours": "o", "ours2": "D", "stock": "s", "other": "^", "other2": "v", "ceiling": "|"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": NAMES["ink"],
    "axes.labelcolor": NAMES["ink"],
    "axes.edgecolor": NAMES["muted"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": NAMES["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": NAMES["muted"],
    "ytick.color": NAMES["muted"],
    "xtick.labelcolor": NAMES["ink"],
    "ytick.labelcolor": NAMES["ink"],
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_WIDTH = 10.4  # inches
_LEGEND_WIDTH = 120  # letters of a line


def colour_name(contender: str) -> str:
    """Of a side: ours and its other ways, stock, a bare copy, anyone else."""
    if contender == "ours" or contender == "ours, torch reference":
        return "ours"
    if is_ours(contender):
        return "ours2"
    if contender == "stock, graph":
        return "other2"
    if contender.startswith("stock"):
        return "stock"
    return _SIDES.get(contender, "other2")


@contextmanager
def _figure(name: str, rows: int, columns: int, height: float) -> Iterator[tuple[Figure, np.ndarray]]:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)


def themed(figure: Figure, name: str, about: str) -> str:
    """The figure as an `<svg>` element: colours by name, ids that begin with `name`, nothing from elsewhere."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its own style sheet would be the whole page's.
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    for colour, code in NAMES.items():
        svg = svg.replace(code, f"var(--{colour})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    # Inside HTML the names of XML are not needed.
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    escaped = about.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return re.sub(
        r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escaped}">', svg, count=1
    )


def time_against_size(rows: Sequence[Row]) -> str | None:
    """Redistributions of one kind each, over the tensor's size; bands from quartile to quartile."""
    swept = [row for row in rows if row.detail.get("sweep")]
    kinds = list(dict.fromkeys(row.detail["sweep"] for row in swept))
    if not kinds:
        return None
    with _figure("size", 1, len(kinds), 3.9) as (figure, axes):
        for ax, kind in zip(axes[0], kinds, strict=True):
            of_kind = [row for row in swept if row.detail["sweep"] == kind]
            for contender in contenders(of_kind):
                line = sorted(
                    (row for row in of_kind if row.contender == contender), key=lambda r: r.detail["tensor_bytes"]
                )
                _curve(ax, contender, [row.detail["tensor_bytes"] for row in line], line)
            first = of_kind[0].detail
            ax.set(xscale="log", yscale="log", title=f"{kind}: {first['source']} → {first['target']}")
            ax.set_xlabel("bytes of the whole tensor")
            _byte_ticks(ax)
        axes[0][0].set_ylabel("µs a call, slowest rank")
        _legend(figure, axes[0][0])
        return themed(figure, "size", "Time of a call over the tensor's size, for each kind of redistribution")


def _curve(ax: Axes, contender: str, x: Sequence[float], rows: Sequence[Row]) -> None:
    colour = colour_name(contender)
    dashed = "--" if contender == "copy" else "-"
    y = [row.median * UNITS[row.unit] * 1e6 for row in rows]
    ax.plot(x, y, dashed, color=NAMES[colour], marker=_MARKS[colour], markersize=4.5, linewidth=1.6, label=contender)
    low, high = ([row.quartiles[end] * UNITS[row.unit] * 1e6 for row in rows] for end in (0, 1))
    ax.fill_between(x, low, high, color=NAMES[colour], alpha=0.18, linewidth=0)


def _byte_ticks(ax: Axes) -> None:
    low, high = ax.get_xlim()
    at = [2**k for k in range(0, 60, 2) if low <= 2**k <= high]
    ax.set_xticks(at, [format_bytes(n) for n in at], rotation=45)
    ax.minorticks_off()


def _legend(figure: Figure, *axes: Axes) -> None:
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, min(6, _LEGEND_WIDTH // (max(map(len, handles)) + 6)))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)


def bytes_by_bound(rows: Sequence[Row]) -> str | None:
    """What part of all pairs of layouts receives at most so many times the bound."""
    counted = [row for row in rows if row.unit == "×"]
    cases = list(dict.fromkeys(row.case for row in counted))
    if not cases:
        return None
    with _figure("bound", 1, len(cases), 3.6) as (figure, axes):
        most = max(max(row.samples) for row in counted)
        for ax, case in zip(axes[0], cases, strict=True):
            for row in counted:
                if row.case == case:
                    x = np.sort(np.asarray(row.samples))
                    share = np.arange(1, len(x) + 1) / len(x) * 100
                    colour = colour_name(row.contender)
                    ax.step(
                        [min(1.0, x[0]), *x, most], [0, *share, 100], where="post", color=NAMES[colour], linewidth=2,
                        label=row.contender, linestyle="--" if colour == "other2" else "-",
                    )  # fmt: skip
            ax.set(xscale="log", title=case, xlim=(0.93, most * 1.05), ylim=(0, 103))
            at = [n for n in (1, 1.5, 2, 3, 5, 10, 20, 50) if n <= most * 1.05]
            ax.set_xticks(at, [f"{n:g}" for n in at])
            ax.minorticks_off()
            ax.set_xlabel("bytes received ÷ bound, of the rank with most")
        axes[0][0].set_ylabel("% of pairs of layouts at most that")
        _legend(figure, *axes[0])
        return themed(figure, "bound", "Distribution of bytes received by the bound, for stock's plans and ours")


def beside_copies(rows: Sequence[Row]) -> str | None:
    """Bandwidth of each kernel beside that of a bare copy of as many bytes in the same run, which it may beat."""
    shown = [row for row in rows if row.bytes and row.share_of_ceiling is not None]
    cases = list(dict.fromkeys(row.case for row in shown))
    if not cases:
        return None
    with _figure("beside-copies", 1, 1, 1.3 + 0.34 * len(cases)) as (figure, axes):
        ax = axes[0][0]
        for place, case in enumerate(cases):
            of_case = [row for row in shown if row.case == case]
            for row in of_case:
                rate = (row.bytes or 0) / (row.median * UNITS[row.unit]) / 1e9
                colour = colour_name(row.contender)
                big = colour == "ceiling"
                ax.plot(
                    rate, place, _MARKS[colour], color=NAMES[colour], markersize=15 if big else 6.5,
                    markeredgewidth=2.5 if big else 0.5, label=_copy_label(row.contender), linestyle="none",
                    zorder=3 if is_ours(row.contender) else 2,
                )  # fmt: skip
        ax.set_yticks(range(len(cases)), [case if len(case) < 62 else f"{case[:60]}…" for case in cases])
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel("GB/s, bytes read and written")
        _legend(figure, ax)
        return themed(figure, "beside-copies", "Bandwidth of each kernel beside that of a bare copy of as many bytes")


def _copy_label(contender: str) -> str:
    if contender == "copy":
        return "a bare copy"
    return contender if colour_name(contender) != "other2" else "other libraries and torch's operations"


def cost_against_ranks(rows: Sequence[Projected]) -> str | None:
    """Of each workload, all redistributions of a step, over the number of ranks; projected."""
    found = totals(rows)
    workloads = list(dict.fromkeys(workload for workload, _, _ in found))
    topologies = list(dict.fromkeys(topology for _, topology, _ in found))
    if not workloads:
        return None
    columns = len(workloads) if len(workloads) < 4 else 2 if len(workloads) == 4 else 3
    lines = math.ceil(len(workloads) / columns)
    with _figure("ranks", lines, columns, 1.0 + 3.1 * lines) as (figure, axes):
        for ax, workload in zip(axes.flat, workloads, strict=False):
            for topology, style in zip(topologies, ("-", "--", ":", "-."), strict=False):
                x = sorted(n for w, t, n in found if (w, t) == (workload, topology))
                for place, side in ((1, "stock"), (0, "ours")):
                    ms = [found[workload, topology, n][place] for n in x]
                    ax.plot(x, ms, style, color=NAMES[side], marker=_MARKS[side], markersize=4, linewidth=1.6,
                            label=f"{side}, {topology}")  # fmt: skip
            ax.set(xscale="log", yscale="log", title=workload, xlabel="ranks")
            low, high = ax.get_xlim()
            at = [n for n in (2, 8, 64, 512, 4096, 32768, 131072) if low <= n <= high]
            ax.set_xticks(at, [f"{n:,}" for n in at], rotation=30)
            ax.minorticks_off()
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter("{x:,.10g}")
        for ax in list(axes.flat)[len(workloads) :]:
            ax.set_visible(False)
        axes[0][0].set_ylabel("ms of a step, projected")
        _legend(figure, *axes.flat)
        return themed(figure, "ranks", "Projected cost of each workload over the number of ranks")
