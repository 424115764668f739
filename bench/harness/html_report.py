"""`python -m shardweave report RESULTS …`: one HTML page of tables and pictures, that loads nothing else."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from .markdown import DRY, UNIT, WRONG, absent_lines, machine_lines, remarks, table_cells
from .result_file import Results, Row, read
from .writable import check_writable

_STYLE = """
:root { color-scheme: light dark; background: Canvas; color: light-dark(#1c1f23, #e8eaed); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
p, li, figcaption { max-width: 52rem; overflow-wrap: anywhere; } figure { margin: 1rem 0; }
svg { display: block; width: 100%; height: auto; } div { overflow-x: auto; } figcaption, summary { font-size: .92em; }
table { border-collapse: collapse; font-size: .87em; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } th:first-child, td:first-child { white-space: normal; }
tr.ours td { background: #8882; } .wrong { font-weight: 600; color: light-dark(#c24e00, #ff9d57); }
"""
_ABOUT = {
    "redistribute": "Redistributions on ranks of this machine. Each result was checked before it was timed.",
    "kernels": "Kernels, beside a bare copy of as many bytes, which some may beat: none of them computes more than a "
    "few operations a byte.",
    "dispatch": "Tokens to their experts and back, with experts that do nothing.",
    "host": "The host time of a cached call, without peers and without data.",
    "plan": "Planning, of requests that are not cached.",
}


def run(paths: Sequence[Path], out: Path) -> int:
    """Write the page.

    Raises:
        ArgumentError: results that cannot be read, a file that cannot be written, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("report: matplotlib is not installed; allowed: pip install 'shardweave[report]'")
    check_writable("--out", out)
    results = [read(path, "RESULTS") for path in paths]
    out.write_text(page(results), encoding="utf-8")
    print(f"written: {out}")
    return 0


def page(results: Sequence[Results]) -> str:
    from . import charts

    chart_of = {
        "redistribute": charts.time_against_size,
        "kernels": charts.beside_copies,
    }
    body = [
        "<h1>shardweave, measured</h1>",
        _p(
            f"Times are {UNIT}. “Ours” is shardweave; everyone else was measured in the same run, in turns. A share of "
            "a bare copy is what a copy of the bytes takes in that run, by what the contender takes: over 100% it was "
            "faster."
        ),
    ]
    for one in results:
        machine = ", ".join(one.machine["gpus"]) or one.machine["cpu"]
        body += [f"<h2>{escape(machine)}, {escape(one.date[:10])}</h2>", f"<p><code>{escape(one.command)}</code></p>"]
        body += map(_p, machine_lines(one.machine))
        body += [f'<div class="wrong">{_p(DRY)}</div>'] if one.scale == "dry" else []
        if one.faults:
            body += [f'<div class="wrong">{_p(WRONG)}{_list(map(str, one.faults))}</div>']
        for suite, group in groupby(one.rows, key=lambda row: row.suite):
            rows = list(group)
            body += [f"<h3>{escape(suite)}</h3>", _p(_ABOUT.get(suite, ""))]
            body += [*_figure(chart_of.get(suite), rows), *_table(rows)]
        if one.absent:
            body.append(f"<details><summary>Not measured</summary>{_list(absent_lines(one))}</details>")
    # Every picture has the same ids, which have to differ within a page.
    body = [re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{number}-", part) for number, part in enumerate(body)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>shardweave, measured</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _p(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _list(lines: Any) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _figure(chart: Callable[[Any], str | None] | None, rows: Sequence[Any]) -> list[str]:
    svg = chart and chart(rows)
    if not svg:
        return []
    caption = escape(" ".join(str(chart.__doc__).split()))
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")  # HTML knows both
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
    return [f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"]


def _table(rows: Sequence[Row]) -> list[str]:
    heads, body = table_cells(rows)
    lines = ["<div><table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for row, cells in body:
        kind = ' class="ours"' if row.is_ours else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    is_open = "" if len(rows) > 60 else ' open=""'
    lines += ["</table></div>", _list(remarks(rows)), "</details>"]
    return [f"<details{is_open}><summary>All rows</summary>", *lines]
