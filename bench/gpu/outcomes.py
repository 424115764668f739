"""A pytest plugin that writes each test's outcome when the test ends, so that a killed run leaves those that ended.

`pytest -p shardweave.bench.gpu.outcomes`, with SHARDWEAVE_TEST_OUTCOMES=FILE in the environment; `summary([FILE])`
reads it. With SHARDWEAVE_TEST_FORKSERVER=MODULE,MODULE processes that tests spawn start from a server that has imported
these, as this process has: torch's tests spawn new ranks for every test, which takes seconds each. Imports nothing of
shardweave, and works as a copy.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

FILE, FORK = "SHARDWEAVE_TEST_OUTCOMES", "SHARDWEAVE_TEST_FORKSERVER"
_COUNTED = {"failed": "failures", "error": "errors", "skipped": "skipped"}


def _write(test: str, outcome: str, text: str = "") -> None:
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome, text]) + "\n")


def pytest_configure(config: Any) -> None:
    if FORK not in os.environ:
        return
    modules = os.environ[FORK].split(",")
    for name in modules:
        with suppress(ImportError):  # as the server does
            import_module(name)
    import torch.multiprocessing as processes

    context, start = processes.get_context, processes.set_start_method
    context("forkserver").set_forkserver_preload(modules)
    processes.get_context = lambda method=None: context("forkserver")  # type: ignore[assignment]
    processes.set_start_method = lambda method, force=False: start("forkserver", force=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed and report.when != "call":
        _write(report.nodeid, "error", report.longreprtext)
    elif report.when == "call" or report.skipped:
        _write(report.nodeid, report.outcome, report.longreprtext if report.failed else "")


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(nodeid, "finished")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "error", report.longreprtext)


def summary(files: Iterable[Path]) -> dict[str, Any]:
    """How many tests ended, and how; the names of those that failed, and of those that had not ended."""
    lines = [(test, outcome) for file in files for test, outcome, _ in read(file)]
    ended = {test for test, outcome in lines if outcome == "finished"}
    counts = Counter(outcome for _, outcome in lines)
    return {
        "tests": len(ended),
        **{name: counts[outcome] for outcome, name in _COUNTED.items()},
        "failed": list(dict.fromkeys(test for test, outcome in lines if outcome in ("failed", "error"))),
        "running": [test for test, outcome in lines if outcome == "started" and test not in ended],
    }


def read(file: Path) -> Iterator[tuple[str, str, str]]:
    """Tests, their outcomes, and the errors of those that failed, as they were written."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            test, outcome, text = json.loads(line)
        except ValueError:  # the last one, of a run that was killed as it wrote
            continue
        yield test, outcome, text
