"""What has to be reached on a GPU beside what was: the page of it, and the result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..harness.machine import now
from ..harness.result_file import Missing, Results
from ..harness.result_file import Row as Measured
from .graph_timing import Times

SUITE, COPY = "kernels", "copy"
NO_FIGURE = "dry run: no figure"
_WRONG = "AssertionError"


@dataclass
class Row:
    """One line of the report.

    Attributes:
        value: what was reached, in `unit`; None where it could not be measured, for the reason in `note`.
        target: what has to be reached: at least where `at_least`, else at most. None: nothing has to.
        detail: what the value was computed from.
        rounds: seconds a call of each contender, ours first, where the value is computed from times.
        moved: bytes read and written in a call of any of them. None: it has no ceiling.
        absent: contenders that could not be measured, and why.
    """

    name: str
    unit: str
    target: float | None
    at_least: bool
    value: float | None = None
    note: str = ""
    detail: dict[str, Any] | None = None
    rounds: dict[str, Times] = field(default_factory=dict)
    moved: int | None = None
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def as_results(rows: Sequence[Row], about: dict[str, Any], dry: bool, command: str) -> Results:
    """The same in the form of all results: each contender of each row with its rounds, the targets with ours."""
    measured: list[Measured] = []
    absent: list[Missing] = []
    faults: list[Missing] = []
    for row in rows:
        case = row.name.removesuffix(" (no target)")
        if row.value is not None:
            measured += _measured(row, case)
        elif _WRONG in row.note:
            faults.append(Missing(SUITE, case, "ours", row.note))
        else:
            absent.append(Missing(SUITE, case, "ours", row.note))
        absent += [Missing(SUITE, case, contender, why) for contender, why in row.absent.items()]
    scale = "dry" if dry else "full"
    return Results(now(), command, scale, about, tuple(measured), tuple(absent), tuple(faults))


def _measured(row: Row, case: str) -> list[Measured]:
    target = {"target": row.target, "at least": row.at_least, "reached": row.value, "of": row.unit, "met": row.met}
    detail = {**target, **(row.detail or {})}
    if not row.rounds:
        assert row.value is not None
        return [Measured(SUITE, case, "ours", row.unit, (row.value,), note=row.note, detail=detail)]
    ceiling = row.rounds.get(COPY)
    return [
        Measured(
            SUITE, case, contender, "µs", tuple(seconds * 1e6 for seconds in times.rounds),
            bytes=row.moved,
            bound_bytes=row.moved,
            share_of_ceiling=ceiling.seconds / times.seconds if ceiling else None,
            detail=detail if contender == "ours" else {},
        )
        for contender, times in row.rounds.items()
    ]  # fmt: skip


def shown(row: Row, dry: bool) -> str:
    if row.value is None:
        return row.note
    if dry:
        return NO_FIGURE
    value = f"{row.value:.1%}" if row.unit == "of the ceiling" else f"{row.value:.2f} {row.unit}"
    return f"{value} {row.note}".strip()


def as_markdown(rows: Sequence[Row], about: dict[str, Any], dry: bool = False) -> str:
    lines = [f"# Kernels on {about['device']}", "", "`make gpu`", ""]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in about.items() if name != "device"]
    lines += ["", "GB/s count bytes read and written; the ceiling is `copy_` of as many bytes in the same run.", ""]
    lines += ["| what | reached | target | met | µs | GB/s | ceiling GB/s |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        row = replace(row, value=None, detail=None, note=NO_FIGURE) if dry and row.value is not None else row
        target = "-"
        if row.target is not None:
            number = f"{row.target:.0%}" if row.unit == "of the ceiling" else f"{row.target:g} {row.unit}"
            target = f"{'≥' if row.at_least else '≤'} {number}"
        met = {True: "yes", False: "**no**", None: "-"}[row.met]
        detail = row.detail or {}
        figures = [
            f"{detail[name]:.1f}" if name in detail else "-"
            for name in ("microseconds", "gigabytes_per_s", "ceiling_gigabytes_per_s")
        ]
        lines.append(f"| {row.name} | {shown(row, dry)} | {target} | {met} | {' | '.join(figures)} |")
    for row in rows:
        if not dry and row.detail and "kinds" in row.detail:
            # fmt: off
            lines += ["", "Host work, µs a call: through `DTensor.redistribute`, stock on a fake group and ours on "
                      "a transport that meets nobody; in the loop inside it, stock; by windows, launches (of boxes "
                      "+ of signals) excluded and made; by messages, launches and torch.distributed excluded.", ""]
            # fmt: on
            lines += ["| kind | stock | ours | loop, stock | windows | launched | launches | messages |"]
            lines += ["|---|---|---|---|---|---|---|---|"]
            for kind in row.detail["kinds"]:
                names = ("stock", "ours", "inner_stock", "windows", "windows_launched", "messages")
                cells = ["-" if kind[n] is None else f"{kind[n]:.1f}" for n in names]
                cells.insert(5, f"{kind['boxes']} + {kind['signals']}")
                lines.append(f"| {kind['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
