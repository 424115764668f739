"""Measured results as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .results import Results, Row

_LEAST_ON_LINK = 1 << 20  # bytes; fewer are over before the link is full


def as_markdown(results: Results, about: Mapping[str, Any]) -> str:
    """
    Args:
        about: `machine.provenance()`.
    """
    lines = ["# Measured", "", *provenance_lines(about)]
    lines += ["", "**A dry run on tiny sizes: no figure here means anything.**"] if results.scale == "dry" else []
    if results.faults:
        lines += ["", "**Wrong results, and what has none because it failed:**", ""]
        lines += [f"- {fault}" for fault in results.faults]
    for suite, group in groupby(results.rows, key=lambda row: row.suite):
        rows = list(group)
        heads, body = table_cells(rows)
        lines += ["", f"## {suite}", "", *table(heads, body), ""]
        lines += ["Times of a round: median (quartiles); of several ranks each round is the slowest rank's.", ""]
        lines += [f"- {line}" for line in remarks(rows)]
    if results.absent:
        lines += ["", "Not measured:", "", *(f"- {line}" for line in absent_lines(results))]
    return "\n".join(lines).rstrip() + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, ["---"] * len(heads), *rows)]


def provenance_lines(about: Mapping[str, Any]) -> list[str]:
    """Of `machine.provenance()`."""
    of = about["machine"]
    gpus, changed = ", ".join(of["gpus"]) or "no GPU", of["uncommitted_changes"] not in ("none", "unknown")
    return [
        f"`{about['command']}`, {about['date']}.",
        "",
        f"{of['cpu']}, {of['cores']} cores, {of['memory_gib']} GiB; {gpus}; "
        f"last-level cache {of['last_level_cache_mib']:g} MiB.",
        f"{of['system']}, Python {of['python']}, torch {of['torch']}, triton {of['triton']}; "
        f"commit {of['commit'][:12]}{', with uncommitted changes' * changed}.",
    ]


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The heads, and the cells of each row, ours first in each case. Columns without any entry are left out."""
    heads = ["case", "contender", "median", "quartiles", "÷ ours", "bytes", "bound", "of link", "of bare copy", "cache"]
    body = []
    for case, group in groupby(rows, key=lambda row: row.case):
        ours, *_ = of_case = sorted(group, key=lambda row: not row.is_ours)
        for row in of_case:
            unit = ours.median if ours.is_ours and row is not ours else 0.0
            low, high = row.quartiles
            cold = row.detail.get("cold")
            body.append([
                case, row.contender, f"{figure(row.median * 1e6)} µs", f"{figure(low * 1e6)} to {figure(high * 1e6)}",
                f"{row.median / unit:.2f}" if unit else "",
                *("" if count is None else f"{count:,}" for count in (row.bytes, row.bound_bytes)),
                _share_of_link(row),
                "" if row.share_of_ceiling is None else f"{row.share_of_ceiling:.0%}",
                "" if cold is None else "cold" if cold else "warm",
            ])  # fmt: skip
    shown = [i for i in range(len(heads)) if any(cells[i] for cells in body)]
    return [heads[i] for i in shown], [[cells[i] for i in shown] for cells in body]


def _share_of_link(row: Row) -> str:
    """How much of the rate of the link the bytes take; nothing where they are few."""
    rate = row.detail.get("gigabits")
    if rate is None or not row.bytes or row.bytes < _LEAST_ON_LINK:
        return ""
    return f"{row.bytes * 8e-9 / rate / row.median:.0%}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What bytes are counted, and the notes of rows, each once."""
    counted = dict.fromkeys(row.detail["bytes are"] for row in rows if "bytes are" in row.detail)
    notes: dict[str, list[Row]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(row.note, []).append(row)
    return [f"Bytes: {what}" for what in counted] + [
        f"{first.contender}: {note}" if more else f"{first.case}, {first.contender}: {note}"
        for note, (first, *more) in notes.items()
    ]


def absent_lines(results: Results) -> list[str]:
    """A line for each contender of a suite and each reason."""
    cases = Counter((one.suite, one.contender, one.why) for one in results.absent)
    return [f"{suite}: {who} ({n} case{'s' * (n > 1)}): {why}" for (suite, who, why), n in cases.items()]


def figure(value: float) -> str:
    """Three digits, and no more than are whole."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
