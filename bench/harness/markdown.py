"""Measured results as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .result_file import Results, Row, contenders

UNIT = "of a round: median (quartiles); of several ranks each round is the slowest rank's"

WRONG = "Wrong results, and what has none because it failed:"


def as_markdown(results: Results) -> str:
    about = {"command": results.command, "date": results.date, "machine": results.machine}
    lines = ["# Measured", "", *provenance_lines(about), ""]
    if results.scale == "dry":
        lines += ["**A dry run on tiny sizes: no figure here means anything.**", ""]
    if results.faults:
        lines += [f"**{WRONG}**", "", *(f"- {fault}" for fault in results.faults), ""]
    for suite, rows in groupby(results.rows, key=lambda row: row.suite):
        lines += [f"## {suite}", "", *table(list(rows)), ""]
    if results.absent:
        lines += ["Not measured:", "", *absent_lines(results), ""]
    return "\n".join(lines).rstrip() + "\n"


def provenance_lines(about: Mapping[str, Any]) -> list[str]:
    """Of `machine.provenance()`."""
    return [f"`{about['command']}`, {about.get('date', '?')}.", "", *machine_lines(about["machine"])]


def machine_lines(about: Mapping[str, Any]) -> list[str]:
    gpus = ", ".join(about["gpus"]) or "no GPU"
    cache = f"; last-level cache {about['last_level_cache_mib']:g} MiB" if "last_level_cache_mib" in about else ""
    return [
        f"{about['cpu']}, {about['cores']} cores, {about.get('memory_gib', '?')} GiB; {gpus}{cache}.",
        f"{about.get('system', '?')}, Python {about.get('python', '?')}, torch {about.get('torch', '?')}, "
        f"triton {about.get('triton', '?')}; commit {str(about.get('commit', '?'))[:12]}"
        + ("." if about.get("uncommitted_changes", "none") in ("none", "unknown") else ", with uncommitted changes."),
    ]


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[tuple[Row, list[str]]]]:
    """A line a case and contender, ours first. What others take by what ours takes stands beside the others; columns
    with nothing in them are left out."""
    heads = ["case", "contender", "median", "quartiles", "÷ ours", "bytes", "bound", "of bare copy", "cache"]
    body = []
    for case, group in groupby(rows, key=lambda row: row.case):
        of_case = {row.contender: row for row in group}
        names = contenders(list(of_case.values()))
        ours = of_case[names[0]] if of_case[names[0]].is_ours else None
        for name in names:
            row = of_case[name]
            low, high = row.quartiles
            cold = row.detail.get("rotation", {}).get("cold")
            ratio = f"{row.median / ours.median:.2f}" if ours and row is not ours and ours.median else ""
            share = "" if row.share_of_ceiling is None else f"{row.share_of_ceiling:.0%}"
            cells = [case, name, f"{figure(row.median)} {row.unit}", f"{figure(low)} to {figure(high)}", ratio,
                     count(row.bytes), count(row.bound_bytes), share,
                     "" if cold is None else "cold" if cold else "warm"]  # fmt: skip
            body.append((row, cells))
    kept = [place for place in range(len(heads)) if any(cells[place] for _, cells in body)]
    return [heads[p] for p in kept], [(row, [cells[p] for p in kept]) for row, cells in body]


def table(rows: Sequence[Row]) -> list[str]:
    heads, body = table_cells(rows)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cells)} |" for _, cells in body]
    lines += ["", f"Times {UNIT}."] if any(row.unit != "×" for row in rows) else []
    lines += [f"{line}." for line in bytes_are(rows)]
    remarks = notes(rows)
    return [*lines, "", *(f"- {line}" for line in remarks)] if remarks else lines


def bytes_are(rows: Sequence[Row]) -> list[str]:
    return [f"Bytes: {what}" for what in dict.fromkeys(r.detail["bytes are"] for r in rows if "bytes are" in r.detail)]


def notes(rows: Sequence[Row]) -> list[str]:
    """What is to be said of rows, each thing once."""
    about: dict[str, list[Row]] = {}
    for row in rows:
        if row.note:
            about.setdefault(row.note, []).append(row)
    return [
        f"{of[0].contender}: {note}" if len(of) > 1 else f"{of[0].case}, {of[0].contender}: {note}"
        for note, of in about.items()
    ]


def absent_lines(results: Results) -> list[str]:
    """A line for each contender of a suite and each reason."""
    cases = Counter((one.suite, one.contender, one.why) for one in results.absent)
    return [f"- {suite}: {who} ({n} case{'s' * (n > 1)}): {why}" for (suite, who, why), n in cases.items()]


def figure(value: float) -> str:
    """Three digits, and no more than are whole."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(given: int | None) -> str:
    return "" if given is None else f"{given:,}"
