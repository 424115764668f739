"""`python -m shardweave compare A.json B.json`: what B took by what A took, case by case, and whether that is noise.

The rule. Of every row that both files have, the ratio B ÷ A of the medians gets an interval that holds 95 of 100
resamplings (bootstrap, `RESAMPLED` times, a fixed seed; samples of the same requests are drawn together). Rounds of one
run say little of the next run of the machine, so rows of contenders that are not ours, whose code no commit here
changes, say how far the machine itself was off: the drift of a case is the largest of 1, the ninth decile of all their
ratios, and their ratios on this case, with which ours was timed in turns. A row of ours has regressed if its whole
interval lies above (1 + threshold) × drift and its best round is slower by more than that as well (of samples of the
same requests: if three of four are slower at all); something else on the machine rarely lasts through all rounds.
Improved is the same with A and B exchanged. What is counted ("×") has neither noise nor drift: there the means are
compared, and any rise is a regression.

What went wrong in B fails as a regression does, and so does a row of ours that B lacks, of a suite that it measured
whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.markup import escape

from ...errors import ArgumentError
from .machine import kind
from .result_file import Results, Row, read
from .terminal import console_of_tables, table

THRESHOLD = 0.10
RESAMPLED = 4000
_CONFIDENCE = 0.95
_SEED = 20
_ROUNDING = 1e-9
_FEWEST_YARDSTICKS = 3  # fewer say nothing of a machine


@dataclass(frozen=True)
class Compared:
    """One row in both files: B by A, and its interval."""

    row: Row
    before: Row
    ratio: float
    low: float
    high: float
    verdict: str  # "slower", "faster" or "", of ours alone


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Compared, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    slower_machine: float
    faster_machine: float
    threshold: float
    notes: tuple[str, ...]
    failures: tuple[str, ...]  # faults in B, and rows of ours that it lacks

    @property
    def regressions(self) -> list[Compared]:
        return [one for one in self.rows if one.verdict == "slower"]


def compare(before: Results, after: Results, threshold: float = THRESHOLD, subset: bool = False) -> Comparison:
    """
    Args:
        subset: `after` may have fewer suites and cases: those it lacks are not named. So it is where other cases were
            asked for.

    Raises:
        ArgumentError: a threshold that is negative, infinite or no number.
    """
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ArgumentError(f"--threshold: {threshold!r}; allowed: a finite number from 0 on, of which 0.1 is 10%")
    subset = subset or after.match not in ("", before.match)
    old = {row.key: row for row in before.rows}
    pairs = [(old[row.key], row) for row in after.rows if row.key in old and old[row.key].unit == row.unit]
    found = [(a, b, *interval(a, b)) for a, b in pairs]
    yardsticks = [(b.case, ratio) for _, b, ratio, _, _ in found if not b.is_ours and b.unit != "×"]
    slower_machine, faster_machine = _drift([ratio for _, ratio in yardsticks])
    by_case: dict[str, list[float]] = {}
    for case, ratio in yardsticks:
        by_case.setdefault(case, []).append(ratio)
    rows = []
    for a, b, ratio, low, high in found:
        drift = max(slower_machine, *by_case.get(b.case, ()), 1.0), min(faster_machine, *by_case.get(b.case, ()), 1.0)
        rows.append(Compared(b, a, ratio, low, high, _verdict(a, b, low, high, drift, threshold)))
    both = {b.key for _, b in pairs}
    suites = {row.suite for row in after.rows}
    missing = [row for row in before.rows if row.key not in both and not (subset and row.suite not in suites)]
    if subset:
        cases = {(row.suite, row.case) for row in after.rows}
        missing = [row for row in missing if (row.suite, row.case) in cases]
    lacking = [] if subset or before.scale != after.scale else _lacking(missing, after)
    return Comparison(
        tuple(rows),
        tuple(named(row) for row in missing),
        tuple(named(row) for row in after.rows if row.key not in both),
        slower_machine,
        faster_machine,
        threshold,
        tuple(_notes(before, after, len(yardsticks))),
        (*(f"WRONG in B: {fault}" for fault in after.faults), *(f"MISSING in B: {what}" for what in lacking)),
    )


def _lacking(missing: Sequence[Row], after: Results) -> Iterator[str]:
    """What `after` neither has nor says to be at fault, of ours and of suites that it measured."""
    suites = {r.suite for r in after.rows} | {a.suite for a in after.absent} | {f.suite for f in after.faults}
    faults = {(fault.suite, fault.case, fault.contender) for fault in after.faults}
    absent = {(one.suite, one.case, one.contender): f": {one.why}" for one in after.absent}
    for row in missing:
        if row.is_ours and row.suite in suites and row.key not in faults:
            yield named(row) + absent.get(row.key, "")


def _verdict(a: Row, b: Row, low: float, high: float, drift: tuple[float, float], threshold: float) -> str:
    if not b.is_ours:
        return ""
    if b.unit == "×":
        return "slower" if low > 1 + _ROUNDING else "faster" if high < 1 - _ROUNDING else ""
    slower, faster = (1 + threshold) * drift[0], drift[1] / (1 + threshold)
    if a.paired and b.paired and len(a.samples) == len(b.samples):
        each = np.asarray(b.samples, float) / np.maximum(a.samples, _ROUNDING)
        fewest, most = np.quantile(each, (0.25, 0.75))
        slower_throughout, faster_throughout = fewest > 1, most < 1
    else:
        best = min(b.samples) / max(min(a.samples), _ROUNDING)
        slower_throughout, faster_throughout = best > slower, best < faster
    if low > slower and slower_throughout:
        return "slower"
    return "faster" if high < faster and faster_throughout else ""


def interval(a: Row, b: Row) -> tuple[float, float, float]:
    """B by A, and the interval's ends: of medians; of paired samples the median of ratios; of counts, of means."""
    x, y = np.asarray(a.samples, float), np.asarray(b.samples, float)
    if b.unit == "×":
        ratio = float(np.mean(y) / np.mean(x)) if np.any(x) else math.inf if np.any(y) else 1.0
        return ratio, ratio, ratio
    generator = np.random.default_rng(_SEED)
    with np.errstate(divide="ignore", invalid="ignore"):
        if a.paired and b.paired and len(x) == len(y):
            ratios = _defined(y / x)
            drawn = ratios[generator.integers(len(ratios), size=(RESAMPLED, len(ratios)))]
            ratio, of_drawn = float(np.median(ratios)), np.median(drawn, axis=1)
        else:
            ratio = float(_defined(np.median(y) / np.median(x)))
            of_drawn = _defined(_medians(y, generator) / _medians(x, generator))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(of_drawn, (tail, 1 - tail))
    return ratio, float(low), float(high)


def _medians(samples: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.median(samples[generator.integers(len(samples), size=(RESAMPLED, len(samples)))], axis=1)


def _defined(ratios: np.ndarray) -> np.ndarray:
    """Nothing by nothing is 1."""
    return np.where(np.isnan(ratios), 1.0, ratios)


def _drift(yardsticks: Sequence[float]) -> tuple[float, float]:
    if len(yardsticks) < _FEWEST_YARDSTICKS:
        return 1.0, 1.0
    low, high = np.quantile(yardsticks, (0.1, 0.9))
    return max(1.0, float(high)), min(1.0, float(low))


def named(row: Row) -> str:
    return f"{row.suite}: {row.case}: {row.contender}"


def _notes(before: Results, after: Results, yardsticks: int) -> list[str]:
    notes = []
    kinds = [kind(results.machine) for results in (before, after)]
    if kinds[0] != kinds[1]:
        notes.append(f"The machines are not of one kind: {kinds[0]} and {kinds[1]}. Ratios say little of the code.")
    for name in ("torch", "triton", "python"):
        versions = [results.machine.get(name) for results in (before, after)]
        if versions[0] != versions[1]:
            notes.append(f"{name} {versions[0]} in A, {versions[1]} in B: the others' code is not the same either.")
    if before.faults:
        notes.append(f"A has wrong results: {'; '.join(map(str, before.faults))}.")
    if before.scale != after.scale:
        notes.append(f"A is {before.scale}, B is {after.scale}: few cases are in both.")
    if yardsticks < _FEWEST_YARDSTICKS:
        notes.append("Too few rows of others are in both files to tell how far the machine itself was off.")
    return notes


def show(comparison: Comparison) -> int:
    """Print it; 1 where something of ours has regressed or is missing, something of B is wrong, or nothing could be
    compared."""
    c = comparison
    heads = ("case", "contender", ""), ("A", "B", "unit", "B ÷ A", "interval")
    console_of_tables().print(table(None, *heads, [_cells(one) for one in c.rows]))
    print(
        f"\nRatios are B ÷ A, with the interval of 95 of 100 resamplings. Others' rows: the machine was "
        f"{c.slower_machine:.2f} times as slow (ninth decile), {c.faster_machine:.2f} times (first decile).\n"
        f"Regressed: the whole interval, and the best round, above {(1 + c.threshold) * c.slower_machine:.2f}, and "
        f"above {1 + c.threshold:.2f} times what others took more on that case. Of counts: above 1."
    )
    for note in c.notes:
        print(note)
    for name, only in (("A", c.only_before), ("B", c.only_after)):
        for what in only:
            print(f"only in {name}: {what}")
    for failure in c.failures:
        print(failure)
    if not c.rows:
        print("Nothing is in both files: nothing was compared.")
        return 1
    for one in c.regressions:
        print(f"REGRESSED: {named(one.row)}: {one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})")
    if not c.regressions:
        print(f"No regression beyond noise in {sum(one.row.is_ours for one in c.rows)} rows of ours.")
    return int(bool(c.regressions or c.failures))


def _cells(one: Compared) -> list[str]:
    a, b = one.before, one.row
    found = (f"{b.suite}: {b.case}", b.contender, one.verdict, f"{a.median:.4g}", f"{b.median:.4g}", b.unit,
             f"{one.ratio:.2f}", f"{one.low:.2f} to {one.high:.2f}")  # fmt: skip
    return [escape(cell) for cell in found]


def run(before: Path, after: Path, threshold: float) -> int:
    """
    Raises:
        ArgumentError: a file that is missing, cut short, of another version or something else; as for `compare`.
    """
    return show(compare(read(before, "A"), read(after, "B"), threshold))
