"""A pytest plugin that writes down each outcome when it is known, so that a run that hangs or dies leaves the others.

It also has ranks start from a server that has imported torch: torch's tests spawn new ones for every test, which takes
seconds each. Copied next to nothing else, and loaded by name.
"""

from __future__ import annotations

import json
import os
from typing import Any

FILE = "SHARDWEAVE_TORCH_TESTS_OUTCOMES"


_PRELOADED = ["torch", "torch.testing._internal.distributed._tensor.common_dtensor"]


def pytest_configure(config: Any) -> None:
    import torch.multiprocessing as processes  # after the start of Python: shardweave is installed when torch is there

    context, start = processes.get_context, processes.set_start_method
    context("forkserver").set_forkserver_preload(_PRELOADED)
    processes.get_context = lambda method=None: context("forkserver")  # type: ignore[assignment]
    processes.set_start_method = lambda method, force=False: start("forkserver", force=True)


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
