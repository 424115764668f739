"""A pytest plugin that writes each test's outcome down when it is known, so that a killed run leaves what was.

`pytest -p shardweave.bench.outcomes`, with SHARDWEAVE_TEST_OUTCOMES=FILE in the environment; `summary(FILE)` reads it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "SHARDWEAVE_TEST_OUTCOMES"
_COUNTED = {"failed": "failures", "error": "errors", "skipped": "skipped"}


def _write(test: str, outcome: str) -> None:
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed and report.when != "call":
        _write(report.nodeid, "error")
    elif report.when == "call" or report.skipped:
        _write(report.nodeid, report.outcome)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(nodeid, "finished")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "error")


def summary(file: Path) -> dict[str, Any]:
    """Numbers of tests that ended, how; the names of those that failed, and of those that had not ended."""
    lines = list(_lines(file)) if file.exists() else []
    ended = {test for test, outcome in lines if outcome == "finished"}
    counts = Counter(outcome for _, outcome in lines)
    return {
        "tests": len(ended),
        **{name: counts[outcome] for outcome, name in _COUNTED.items()},
        "failed": list(dict.fromkeys(test for test, outcome in lines if outcome in ("failed", "error"))),
        "running": [test for test, outcome in lines if outcome == "started" and test not in ended],
    }


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            test, outcome = json.loads(line)
        except ValueError:  # the last one, of a run that was killed as it wrote
            continue
        yield test, outcome
