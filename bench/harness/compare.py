"""`python -m shardweave compare A.json B.json`: what B took by what A took, case by case, and whether that is noise.

Of every row that both files have, the ratio B ÷ A of the medians gets an interval that holds 95 of 100 resamplings
(samples of the same requests are drawn together). The rows of other contenders, whose code no commit here changes, give
the drift of the machine: for each case the largest of 1, the ninth decile of all their ratios, and their ratios on this
case, which was timed in turns with ours. A row of ours is slower if its whole interval and its best round are above
(1 + threshold) × drift, because other programs rarely disturb all rounds (samples of the same requests are no rounds:
there the interval decides); it is faster if A is slower than B.

A wrong result in B fails as a regression does, and so does a row of ours that B lacks although it measured the suite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.markup import escape

from ...errors import ArgumentError
from .machine import kind
from .result_file import Results, Row, read
from .terminal import console_of_tables, print_rows

THRESHOLD = 0.10
_RESAMPLED = 4000
_TAIL = 0.025  # on either side of the interval
_SEED = 20
_MIN_OTHERS = 3  # rows of others: fewer say nothing about a machine


@dataclass(frozen=True)
class Compared:
    """One row in both files: the ratio B ÷ A and its interval."""

    row: Row
    before: Row
    ratio: float
    low: float
    high: float
    verdict: str  # of our rows: "slower", "faster" or ""


@dataclass(frozen=True)
class Comparison:
    rows: list[Compared]
    drift: float
    threshold: float
    notes: list[str]
    failures: list[str]  # faults in B, and rows of ours that it lacks

    @property
    def regressions(self) -> list[Compared]:
        return [one for one in self.rows if one.verdict == "slower"]


def compare(before: Results, after: Results, threshold: float = THRESHOLD, subset: bool = False) -> Comparison:
    """Compare all rows that both have.

    Args:
        subset: rows of cases that `after` did not measure are not named. The same holds if `after` was restricted to
            other cases than `before`.

    Raises:
        ArgumentError: a threshold that is negative, infinite or not a number.
    """
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ArgumentError(f"--threshold: {threshold!r}; allowed: a finite number from 0 on, of which 0.1 is 10%")
    subset = subset or after.match not in ("", before.match)
    old = {(row.key, row.unit): row for row in before.rows}
    pairs = [(a, b, *interval(a, b)) for b in after.rows if (a := old.get((b.key, b.unit)))]
    others = [(b.case, ratio) for _, b, ratio, _, _ in pairs if not b.is_ours]
    inverse = [(case, _inverse(ratio)) for case, ratio in others]
    rows = []
    for a, b, ratio, low, high in pairs:
        verdict = ""
        if b.is_ours and _is_slower(a, b, low, (1 + threshold) * _drift(others, b.case)):
            verdict = "slower"
        elif b.is_ours and _is_slower(b, a, _inverse(high), (1 + threshold) * _drift(inverse, b.case)):
            verdict = "faster"
        rows.append(Compared(b, a, ratio, low, high, verdict))
    in_both = {one.row.key for one in rows}
    cases = {row.key[:2] for row in after.rows}
    suites = {suite for suite, _ in cases} | {one.suite for one in after.absent}
    missing = [row for row in before.rows if row.key not in in_both and (not subset or row.key[:2] in cases)]
    notes = _differences(before, after) + [f"only in A: {row.name}" for row in missing]
    notes += [f"only in B: {row.name}" for row in after.rows if row.key not in in_both]
    failures = [f"WRONG in B: {fault}" for fault in after.faults]
    if not subset and before.scale == after.scale:
        known = {one.key: f": {one.why}" for one in after.absent} | {one.key: None for one in after.faults}
        for row in missing:
            if row.is_ours and row.suite in suites and (reason := known.get(row.key, "")) is not None:
                failures.append(f"MISSING in B: {row.name}{reason}")
    return Comparison(rows, _drift(others), threshold, notes, failures)


def interval(a: Row, b: Row) -> tuple[float, float, float]:
    """The ratio b ÷ a and its interval: of medians; of paired samples the median of ratios."""
    x, y = np.asarray(a.samples, float), np.asarray(b.samples, float)
    generator = np.random.default_rng(_SEED)

    def medians(samples: np.ndarray) -> np.ndarray:
        """The median, and those of resamplings."""
        drawn = samples[generator.integers(len(samples), size=(_RESAMPLED, len(samples)))]
        return np.append(np.median(samples), np.median(drawn, axis=1))

    ratio, *drawn = medians(_quotients(y, x)) if _are_paired(a, b) else _quotients(medians(y), medians(x))
    low, high = np.quantile(drawn, (_TAIL, 1 - _TAIL))
    return float(ratio), float(low), float(high)


def _are_paired(a: Row, b: Row) -> bool:
    return a.paired and b.paired and len(a.samples) == len(b.samples)


def _quotients(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """0 ÷ 0 is 1."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.nan_to_num(np.divide(y, x), nan=1.0, posinf=np.inf)


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _drift(others: Sequence[tuple[str, float]], case: str | None = None) -> float:
    """How much slower the machine was, by the ratios of other contenders on each case."""
    ratios = [ratio for _, ratio in others]
    decile = float(np.quantile(ratios, 0.9)) if len(ratios) >= _MIN_OTHERS else 1.0
    return max(1.0, decile, *(ratio for other, ratio in others if other == case))


def _is_slower(a: Row, b: Row, low: float, allowed: float) -> bool:
    """Whether `b` took more than `allowed` times what `a` took, in its whole interval and in its best round."""
    return low > allowed and (_are_paired(a, b) or min(b.samples) > allowed * min(a.samples))


def _differences(before: Results, after: Results) -> list[str]:
    """What else differs than the code."""
    a, b = (
        {"kind of machine": kind(one.machine), "scale": one.scale, "torch": one.machine.get("torch"),
         "triton": one.machine.get("triton"), "python": one.machine.get("python")}
        for one in (before, after)
    )  # fmt: skip
    return [f"{key}: {a[key]} in A, {b[key]} in B: ratios say little of the code" for key in a if a[key] != b[key]]


def show(comparison: Comparison) -> int:
    """Print the comparison.

    Returns:
        The exit status: 1 if a row of ours is slower or missing, a result in B is wrong, or no row is in both files.
    """
    c = comparison
    cells = [
        [escape(cell) for cell in (
            f"{o.row.suite}: {o.row.case}", o.row.contender, o.verdict, f"{o.before.median:.4g}", f"{o.row.median:.4g}",
            o.row.unit, f"{o.ratio:.2f}", f"{o.low:.2f} to {o.high:.2f}",
        )]
        for o in c.rows
    ]  # fmt: skip
    figures = ("A", "B", "unit", "B ÷ A", "interval")
    print_rows(console_of_tables(), None, ("case", "contender", "verdict"), figures, cells)
    print(
        f"\nRatios are B ÷ A, with the interval of 95 of 100 resamplings. Others' rows: the machine was "
        f"{c.drift:.2f} times as slow (ninth decile).\n"
        f"Regressed: the whole interval, and the best round, above {(1 + c.threshold) * c.drift:.2f}, and "
        f"above {1 + c.threshold:.2f} times what others took more on that case."
    )
    lines = [*c.notes, *c.failures]
    lines += [f"REGRESSED: {o.row.name}: {o.ratio:.2f} ({o.low:.2f} to {o.high:.2f})" for o in c.regressions]
    if not c.rows:
        lines.append("Nothing is in both files: nothing was compared.")
    elif not c.regressions:
        lines.append(f"No regression beyond noise in {sum(one.row.is_ours for one in c.rows)} rows of ours.")
    print("\n".join(lines))
    return int(bool(c.regressions or c.failures or not c.rows))


def run(before: Path, after: Path, threshold: float) -> int:
    """Compare two result files, print the comparison and return the exit status.

    Raises:
        ArgumentError: a file that cannot be read, or as for `compare`.
    """
    return show(compare(read(before, "A"), read(after, "B"), threshold))
