"""A pytest plugin that writes down each outcome when it is known, so that a run that hangs or dies leaves the others.

Copied next to nothing else, and loaded by name.
"""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "SHARDWEAVE_TORCH_TESTS_OUTCOMES"


def _write(test: str, outcome: str, text: str = "") -> None:
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome, text]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longreprtext if report.failed else "")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
