"""Runs the `interp` tests where the Triton interpreter is, and the others where it is not.

Triton chooses when a kernel is decorated, so one process has one of the two. In a process without TRITON_INTERPRET=1
all selected interp tests run in one child process that has it, and each reports here what it did there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REPORT = "SHARDWEAVE_INTERP_REPORT"
HERE = Path(__file__).parent
_outcomes = pytest.StashKey[dict[str, tuple[str, str]]]()
_selected = pytest.StashKey[list[str]]()


def _is_interp(item: pytest.Item) -> bool:
    return item.get_closest_marker("interp") is not None and HERE in item.path.parents


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_selected] = [item.nodeid for item in items if _is_interp(item)]
    if INTERPRETED:
        skip = pytest.mark.skip(reason="TRITON_INTERPRET=1: no kernel is compiled in this process")
        for item in items:
            if HERE in item.path.parents and (item.get_closest_marker("aot") or item.get_closest_marker("gpu")):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETED or not _is_interp(pyfuncitem):
        return None
    outcomes = pyfuncitem.config.stash.get(_outcomes, None)
    if outcomes is None:
        outcomes = pyfuncitem.config.stash[_outcomes] = _run_interpreted(pyfuncitem.config)
    outcome, text = outcomes.get(pyfuncitem.nodeid, ("failed", "the interpreter's process did not report this test"))
    if outcome == "failed":
        pytest.fail(f"under TRITON_INTERPRET=1:\n{text}", pytrace=False)
    if outcome == "skipped":
        pytest.skip(text)
    return True


def _run_interpreted(config: pytest.Config) -> dict[str, tuple[str, str]]:
    """Outcome and text of every selected interp test, by node id."""
    report = Path(os.environ.get("TMPDIR", "/tmp")) / f"shardweave-interp-{os.getpid()}.jsonl"
    environment = {**os.environ, "TRITON_INTERPRET": "1", REPORT: str(report)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *config.stash[_selected]]
    try:
        child = subprocess.run(
            command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=3600
        )
        lines = report.read_text().splitlines() if report.exists() else []
    finally:
        report.unlink(missing_ok=True)
    outcomes = {nodeid: (outcome, text) for nodeid, outcome, text in map(json.loads, lines)}
    for nodeid in config.stash[_selected]:
        outcomes.setdefault(nodeid, ("failed", f"exit status {child.returncode}\n{child.stdout}\n{child.stderr}"))
    return outcomes


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(REPORT)
    if path is None or (report.when != "call" and report.passed):
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    with open(path, "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run: the CPU by the interpreter, or a GPU."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return request.param
