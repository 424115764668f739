"""`python -m shardweave report RESULTS …`: one HTML page of tables and pictures, that loads nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..planning.projection_rows import Row as Projected
from .markdown import UNIT, WRONG, absent_lines, bytes_are, machine_lines, notes, table_cells
from .result_file import Results, Row, load, read
from .theme import THEME
from .writable import check_writable

_STYLE = """
html { background: var(--page); color: var(--ink); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; } p { margin: .4rem 0; max-width: 52rem; }
p, li { overflow-wrap: anywhere; } code { font-family: ui-monospace, Consolas, monospace; font-size: .92em; }
figure { margin: 1rem 0; } figcaption { color: var(--muted); font-size: .92em; max-width: 52rem; }
svg { display: block; width: 100%; height: auto; } svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .87em; width: 100%; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { white-space: normal; min-width: 14rem; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } tr.first td { border-top: 1px solid var(--muted); }
tr.ours td { background: var(--band); } .note { color: var(--muted); } .wrong { color: var(--stock); font-weight: 600; }
details > summary { cursor: pointer; color: var(--muted); margin: .6rem 0; }
"""
_ABOUT = {
    "redistribute": "Redistributions on ranks of this machine. Each result was checked before it was timed.",
    "kernels": "Kernels, beside a bare copy of as many bytes, which some may beat: none of them computes more than "
    "a few operations a byte.",
    "dispatch": "Tokens to their experts and back, with experts that do nothing.",
    "host": "What a cached call costs the host, with nobody to meet and nothing to move.",
    "plan": "Planning, of requests that nobody asked for before; and bytes that plans move, counted.",
}
_CAPTIONS = {
    "redistribute": "Time over size. Bands are from quartile to quartile; both axes are logarithmic. The dashed "
    "line is a bare copy of the bytes that a rank has to receive.",
    "kernels": "Each kernel beside a bare copy: bandwidth, with all that is read and written counted.",
    "plan": "Bytes that the rank receives that receives most, by the bound: what part of the pairs of layouts stays at "
    "or below. A plan at 1 moves what has to move, and no more.",
}


def read_projection(path: Path) -> dict[str, Any]:
    """The file's object; its rows as `projection_rows.Row`.

    Raises:
        ArgumentError: it is missing, cut short or something else.
    """
    what = "what `python -m shardweave.bench.planning.projection` writes"
    given = load(path, "--projection", what, "command", "rows")
    try:
        return {**given, "rows": [Projected(**row) for row in given["rows"]]}
    except TypeError as error:
        raise ArgumentError(f"--projection: {str(path)!r} is something else: {error}; allowed: {what}") from None


def run(paths: Sequence[Path], out: Path, projection: Path | None) -> int:
    """Write the page.

    Raises:
        ArgumentError: results that cannot be read, a file that cannot be written, matplotlib not being there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("report: matplotlib is not installed; allowed: pip install 'shardweave[report]'")
    check_writable("--out", out)
    results = [read(path, "RESULTS") for path in paths]
    out.write_text(page(results, None if projection is None else read_projection(projection)), encoding="utf-8")
    print(f"written: {out}")
    return 0


def page(results: Sequence[Results], projected: Mapping[str, Any] | None = None) -> str:
    body = ["<h1>shardweave, measured</h1>"]
    body.append(
        f"<p>Times are {escape(UNIT)}. “Ours” is shardweave; everyone else was measured in the same run, in turns. A "
        "share of a bare copy is what a copy of the bytes takes in that run, by what the contender takes: over 100% it "
        "was faster.</p>"
    )
    for number, one in enumerate(results):
        body += _machine(one)
        for suite, rows in groupby(one.rows, key=lambda row: row.suite):
            body += _section(suite, list(rows), number)
        if one.absent:
            lines = [line.removeprefix("- ") for line in absent_lines(one)]
            body.append(f"<details><summary>Not measured</summary>{_list(lines)}</details>")
    body += _projection(projected)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>shardweave, measured</title>\n'
        f"<style>{THEME}{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _list(lines: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _machine(results: Results) -> list[str]:
    named = ", ".join(results.machine["gpus"]) or results.machine["cpu"]
    lines = [f"<h2>{escape(named)}, {escape(results.date[:10])}</h2>", f"<p><code>{escape(results.command)}</code></p>"]
    lines += [f"<p>{escape(line)}</p>" for line in machine_lines(results.machine)]
    if results.scale == "dry":
        lines.append('<p class="wrong">A dry run on tiny sizes: no figure here means anything.</p>')
    if results.faults:
        lines.append(f'<p class="wrong">{escape(WRONG)}</p>' + _list([*map(str, results.faults)], "wrong"))
    return lines


def _section(suite: str, rows: Sequence[Row], number: int) -> list[str]:
    from . import charts

    draw: Callable[[Sequence[Row]], str | None] | None = {
        "redistribute": charts.time_against_size,
        "kernels": charts.beside_copies,
        "plan": charts.bytes_by_bound,
    }.get(suite)
    body = [f"<h3>{escape(suite)}</h3>", f"<p>{escape(_ABOUT.get(suite, ''))}</p>"]
    svg = draw and draw(rows)
    return [*body, *([_figure(svg, _CAPTIONS[suite], number)] if svg else []), *_table(rows)]


def _figure(svg: str, caption: str, number: int) -> str:
    # Of several result files each has its own pictures, whose parts need names of their own.
    for mark in ('id="', 'href="#', "url(#"):
        svg = svg.replace(mark, f"{mark}f{number}-")
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(rows: Sequence[Row]) -> list[str]:
    heads, body = table_cells(rows)
    lines = ['<div class="scroll"><table><tr>' + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"]
    before = None
    for row, cells in body:
        first, before = row.case != before, row.case
        kind = f"{'first ' * first}{'ours' * row.is_ours}"
        shown = cells if first else ["", *cells[1:]]
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in shown) + "</tr>")
    lines.append("</table></div>")
    lines += [f'<p class="note">{escape(line)}.</p>' for line in (*notes(rows), *bytes_are(rows))]
    return [f"<details{'' if len(rows) > 60 else ' open'}><summary>All rows</summary>", *lines, "</details>"]


def _projection(given: Mapping[str, Any] | None) -> list[str]:
    from . import charts

    if given is None:
        return []
    body = ["<h2>At scale, projected</h2>", f"<p><code>{escape(str(given['command']))}</code></p>"]
    body.append("<p>Not measured: the planner's cost model, of stock's plans and of ours.</p>")
    svg = charts.cost_against_ranks(given["rows"])
    caption = (
        "Of each workload, all redistributions of one step together, over the number of ranks. Both axes are "
        "logarithmic. Where one line hides another, they differ by less than its width."
    )
    return [*body, _figure(svg, caption, 99) if svg else "<p>None of its rows has both sides.</p>"]
