"""Measures suites, one after another."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from shardweave.bench.harness.ranks import RanksFailed
from shardweave.bench.harness.results import Missing, Results, Row

INSTALL = {
    "autoparallel": "pip install git+https://github.com/meta-pytorch/autoparallel@a54c252",
    "torchtitan": "pip install torchtitan==0.3.0",
}


class Sink:
    """Puts what a suite measures into results."""

    def __init__(self, suite: str, results: Results) -> None:
        self.suite, self._results = suite, results

    def begin(self, case: str) -> None:
        """Show progress."""
        print(f"{self.suite}: {case}", file=sys.stderr, flush=True)

    def row(self, case: str, contender: str, samples: Sequence[float], **rest: Any) -> None:
        self._results.rows.append(Row(self.suite, case, contender, tuple(samples), **rest))

    def absent(self, case: str, contender: str, why: str) -> None:
        """Record that the contender is not installed, or refuses the case."""
        self._results.absent.append(Missing(self.suite, case, contender, why))

    def fault(self, case: str, contender: str, why: str) -> None:
        """Record a wrong result, which is not timed."""
        self._results.faults.append(Missing(self.suite, case, contender, why))


def why_absent(contender: str, error: Exception) -> str:
    """The reason why a contender could not be made; for a library that is not installed, how to install it."""
    if isinstance(error, ImportError) and contender in INSTALL:
        return f"not installed ({error}); to measure it too: {INSTALL[contender]}"
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]


def suite(name: str) -> ModuleType:
    """The module of a suite, with `cases(scale)`, the contenders of each case, and `measure(cases, scale, sink)`."""
    return import_module(f"shardweave.bench.suites.suite_{name}")


def measure(cases: Mapping[str, Sequence[str]], scale: str) -> Results:
    """Measure the cases of each suite. This process may have no threads: ranks are forked from it.

    Returns:
        The results. A contender without a result is a fault, and so are ranks that failed; what they had measured
        before is kept.
    """
    results = Results(scale)
    for name, selected in cases.items():
        if not selected:
            continue
        sink = Sink(name, results)
        try:
            suite(name).measure(selected, scale, sink)
        except RanksFailed as failed:
            sink.fault("", "", f"{failed}; their output is above")
            continue
        known = {row.key for row in results.rows} | {one.key for one in (*results.absent, *results.faults)}
        for case, contenders in suite(name).cases(scale).items():
            for contender in contenders:
                if case in selected and (name, case, contender) not in known:
                    sink.fault(case, contender, "nothing was measured")
    return results
