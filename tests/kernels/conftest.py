"""Runs `interp` tests with the Triton interpreter and the other tests without it.

Triton selects the interpreter when a kernel is decorated, so a process has one of the two. Without TRITON_INTERPRET=1
the selected interp tests of a file run in one child process with it, started by the first of them; each test reports
its outcome in the child.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from warm_python import run_python

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = os.environ.get("SHARDWEAVE_TEST_PTX") == "1"
REPORT = "SHARDWEAVE_INTERP_REPORT"
HERE = Path(__file__).parent
_outcomes = pytest.StashKey[dict[Path, dict[str, tuple[str, str]]]]()
_driver = pytest.StashKey[object]()
_selected = pytest.StashKey[dict[Path, list[str]]]()


def outcomes_in_the_interpreter(selected: list[str], config: pytest.Config) -> dict[str, tuple[str, str]]:
    """Return the outcome and text of each of these tests, by node id."""
    with tempfile.TemporaryDirectory(prefix="shardweave-interp-") as folder:
        report = Path(folder) / "report.jsonl"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        done = run_python(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected],
            cwd=config.rootpath, timeout=3600,
            env={**kept, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", REPORT: str(report)},
        )  # fmt: skip
        lines = report.read_text().splitlines() if report.exists() else []
    results = {nodeid: (outcome, text) for nodeid, outcome, text in map(json.loads, lines)}
    for nodeid in selected:
        results.setdefault(nodeid, ("failed", f"exit status {done.returncode}\n{done.stdout}{done.stderr}"))
    return results


def _is_interp(item: pytest.Item) -> bool:
    return item.get_closest_marker("interp") is not None and HERE in item.path.parents


def pytest_configure(config: pytest.Config) -> None:
    if COMPILED:
        from ptx.driver import PtxDriver

        config.stash[_driver] = PtxDriver(Path(tempfile.mkdtemp(prefix="shardweave-ptx-")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected: dict[Path, list[str]] = defaultdict(list)
    for item in items:
        if _is_interp(item):
            selected[item.path].append(item.nodeid)
    config.stash[_selected], config.stash[_outcomes] = selected, {}
    if INTERPRETED:
        skip = pytest.mark.skip(reason="TRITON_INTERPRET=1: no kernel is compiled in this process")
        for item in items:
            if HERE in item.path.parents and (item.get_closest_marker("aot") or item.get_closest_marker("gpu")):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETED or COMPILED or not _is_interp(pyfuncitem):
        return None
    config, path = pyfuncitem.config, pyfuncitem.path
    outcomes = config.stash[_outcomes]
    if path not in outcomes:
        outcomes[path] = outcomes_in_the_interpreter(config.stash[_selected][path], config)
    outcome, text = outcomes[path][pyfuncitem.nodeid]
    if outcome == "failed":
        pytest.fail(f"under TRITON_INTERPRET=1:\n{text}", pytrace=False)
    if outcome == "skipped":
        pytest.skip(text)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(REPORT)
    if path is None or (report.when != "call" and report.passed):
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    with open(path, "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of kernels: the CPU with the interpreter, or a GPU."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return request.param
