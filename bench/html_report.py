"""`python -m shardweave report RESULTS …`: one HTML page of tables and pictures, that loads nothing else."""

from __future__ import annotations

import importlib.util
import reprlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .markdown import UNIT, WRONG, absent_lines, as_markdown, machine_lines, notes, table_cells
from .projection_rows import VERSION
from .projection_rows import Row as Projected
from .result_file import Results, Row, is_number, read, read_versioned
from .theme import THEME

_PROJECTED_FIELDS: dict[str, Any] = {
    "workload": str, "case": str, "topology": str, "ranks": int, "mesh": str, "calls": int, "ours_us": int | float,
    "stock_us": int | float | None, "ours_bytes": int, "stock_bytes": int | None,
}  # fmt: skip
_STYLE = """
html { background: var(--page); color: var(--ink); }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; max-width: 1080px; margin: 0 auto;
  padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; } p { margin: .4rem 0; max-width: 52rem; }
p, li { overflow-wrap: anywhere; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .92em; }
figure { margin: 1rem 0; } figcaption { color: var(--muted); font-size: .92em; max-width: 52rem; }
svg { display: block; width: 100%; height: auto; } svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .87em; width: 100%; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { white-space: normal; min-width: 14rem; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } tr.first td { border-top: 1px solid var(--muted); }
tr.ours td { background: var(--band); } .note { color: var(--muted); } .wrong { color: var(--stock); font-weight: 600; }
details > summary { cursor: pointer; color: var(--muted); margin: .6rem 0; }
@media print { body { max-width: none; } }
"""
_ABOUT = {
    "redistribute": "Redistributions on ranks of this machine. Each result was checked before it was timed.",
    "kernels": "Kernels, beside a bare copy of as many bytes, which some may beat: none of them computes more than "
    "a few operations a byte.",
    "dispatch": "Tokens to their experts and back, with experts that do nothing.",
    "host": "What a cached call costs the host, with nobody to meet and nothing to move.",
    "plan": "Planning, of requests that nobody asked for before; and bytes that plans move, counted.",
}


def read_projection(path: Path) -> dict[str, Any]:
    """The file's object; its rows as `projection_rows.Row`.

    Raises:
        ArgumentError: it is missing, cut short, of another version or something else.
    """
    given = read_versioned(path, "--projection", VERSION, "what `python -m shardweave.bench.projection` writes", "rows")
    for row in given["rows"]:
        if not isinstance(row, dict) or not row.keys() >= _PROJECTED_FIELDS.keys():
            raise ArgumentError(
                f"--projection: a row of {str(path)!r} lacks one of {', '.join(_PROJECTED_FIELDS)}; allowed: all"
            )
        for name, kind in _PROJECTED_FIELDS.items():
            least = 1 if name == "ranks" else 0
            figure = is_number(row[name]) and row[name] >= least
            if not (isinstance(row[name], kind) and (figure or isinstance(row[name], str | None))):
                raise ArgumentError(
                    f"--projection: {name} of a row of {str(path)!r} is {reprlib.repr(row[name])}; allowed: what "
                    "`python -m shardweave.bench.projection` writes"
                )
    return {**given, "rows": [Projected(**{name: row[name] for name in _PROJECTED_FIELDS}) for row in given["rows"]]}


def run(paths: Sequence[Path], out: Path, projection: Path | None, markdown: Path | None) -> int:
    """Write the page, and the tables as Markdown where that is asked for.

    Raises:
        ArgumentError: results that cannot be read, a file that cannot be written, matplotlib not being there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("report: matplotlib is not installed; allowed: pip install 'shardweave[report]'")
    results = [read(path, "RESULTS") for path in paths]
    projected = None if projection is None else read_projection(projection)
    written = [("--out", out, page(results, projected))]
    if markdown is not None:
        written.append(("--markdown", markdown, "\n".join(map(as_markdown, results))))
    for option, path, text in written:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{option}: {str(path)!r} cannot be written: {error}; allowed: a file") from None
        print(f"written: {path}")
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
            listed = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in absent_lines(one))
            body.append(f"<details><summary>Not measured</summary><ul>{listed}</ul></details>")
    body += _projection(projected)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>shardweave, measured</title>\n'
        f"<style>{THEME}{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _machine(results: Results) -> list[str]:
    dry = '<p class="wrong">A dry run on tiny sizes: no figure here means anything.</p>'
    lines = [f"<p>{escape(line)}</p>" for line in machine_lines(results.machine)]
    wrong = "".join(f"<li>{escape(str(fault))}</li>" for fault in results.faults)
    gpus = ", ".join(results.machine["gpus"]) or results.machine["cpu"]
    return [
        f"<h2>{escape(gpus)}, {escape(results.date[:10])}</h2>",
        f"<p><code>{escape(results.command)}</code></p>",
        *lines,
        *([dry] if results.scale == "dry" else []),
        *([f'<p class="wrong">{escape(WRONG)}</p><ul class="wrong">{wrong}</ul>'] if wrong else []),
    ]


def _section(suite: str, rows: Sequence[Row], number: int) -> list[str]:
    from . import pictures

    shown: list[tuple[Callable[[], str | None], str]] = {
        "redistribute": [
            (lambda: pictures.time_against_size(rows), "Time over size. Bands are from quartile to quartile; both axes "
             "are logarithmic. The dashed line is a bare copy of the bytes that a rank has to receive."),
            (lambda: pictures.ratios(rows, "models"), "Redistributions of real models: how many times as long stock "
             "DTensor takes."),
        ],
        "kernels": [
            (lambda: pictures.beside_copies(rows), "Each kernel beside a bare copy: bandwidth, with all that is read "
             "and written counted."),
        ],
        "dispatch": [
            (lambda: pictures.ratios(rows, "dispatch", "torch.distributed"), "How many times as long dispatch and "
             "combine take by all-to-alls of torch.distributed."),
        ],
        "host": [
            (lambda: pictures.ratios(rows, "host"), "Host work of a cached call: how many times as much stock does."),
        ],
        "plan": [
            (lambda: pictures.bytes_by_bound(rows), "Bytes that the rank receives that receives most, by the bound: "
             "what part of the pairs of layouts stays at or below. A plan at 1 moves what has to move, and no more."),
        ],
    }.get(suite, [])  # fmt: skip
    body = [f"<h3>{escape(suite)}</h3>", f"<p>{escape(_ABOUT.get(suite, ''))}</p>"]
    for draw, caption in shown:
        svg = draw()
        if svg is not None:
            body.append(_figure(svg, caption, number))
    return [*body, *_table(rows)]


def _figure(svg: str, caption: str, number: int) -> str:
    # Of several result files each has its own pictures, whose parts need names of their own.
    for mark in ('id="', 'href="#', "url(#"):
        svg = svg.replace(mark, f"{mark}f{number}-")
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(rows: Sequence[Row]) -> list[str]:
    heads, body = table_cells(rows)
    lines = [
        '<div class="scroll"><table><thead><tr>' + "".join(f"<th>{h}</th>" for h in heads) + "</tr></thead><tbody>"
    ]
    for number, (row, cells) in enumerate(body):
        first = number == 0 or body[number - 1][0].case != row.case
        kind = " ".join(filter(None, ("first" if first else "", "ours" if row.is_ours else "")))
        shown = cells if first else ["", *cells[1:]]
        lines.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in shown) + "</tr>")
    lines.append("</tbody></table></div>")
    lines += [f'<p class="note">{escape(line)}.</p>' for line in notes(rows)]
    whats = dict.fromkeys(str(row.detail["bytes are"]) for row in rows if "bytes are" in row.detail)
    lines += [f'<p class="note">Bytes: {escape(what)}.</p>' for what in whats]
    return [f"<details{'' if len(rows) > 60 else ' open'}><summary>All rows</summary>", *lines, "</details>"]


def _projection(given: Mapping[str, Any] | None) -> list[str]:
    from . import pictures

    body = ["<h2>At scale, projected</h2>"]
    if given is None:
        return [*body, "<p>No projection was given: <code>python -m shardweave.bench.projection</code> makes one, and "
                "<code>--projection FILE</code> shows it here.</p>"]  # fmt: skip
    svg = pictures.cost_against_ranks(given["rows"])
    body.append(f"<p><code>{escape(str(given.get('command', '')))}</code></p>")
    body.append(
        "<p>Not measured: the planner's cost model, of stock's plans and of ours, over the number of ranks.</p>"
    )
    if svg is None:
        return [*body, "<p>None of its rows has both sides.</p>"]
    caption = (
        "Of each workload, all redistributions of one step together. Both axes are logarithmic. Where one line hides "
        "another, they differ by less than its width."
    )
    return [*body, _figure(svg, caption, 99)]
