"""Runs the `interp` tests where the Triton interpreter is, and the others where it is not.

Triton chooses when a kernel is decorated, so one process has one of the two. In a process without TRITON_INTERPRET=1
all selected interp tests run in one child process that has it, beside the tests that come before them here, and each
reports here what it did there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REPORT = "SHARDWEAVE_INTERP_REPORT"
HERE = Path(__file__).parent
_outcomes = pytest.StashKey[dict[str, tuple[str, str]]]()
_selected = pytest.StashKey[list[str]]()
_child = pytest.StashKey["Child"]()


class Child:
    """The process with the interpreter, on its way."""

    def __init__(self, config: pytest.Config) -> None:
        self.selected = config.stash[_selected]
        self.folder = tempfile.TemporaryDirectory(prefix="shardweave-interp-")
        self.report, self.log = (Path(self.folder.name) / name for name in ("report.jsonl", "log"))
        environment = {**os.environ, "TRITON_INTERPRET": "1", REPORT: str(self.report)}
        command = ["nice", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.selected]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=config.rootpath, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def outcomes(self) -> dict[str, tuple[str, str]]:
        """Outcome and text of every selected interp test, by node id."""
        code = self.process.wait(3600)
        lines = self.report.read_text().splitlines() if self.report.exists() else []
        found = {nodeid: (outcome, text) for nodeid, outcome, text in map(json.loads, lines)}
        for nodeid in self.selected:
            found.setdefault(nodeid, ("failed", f"exit status {code}\n{self.log.read_text()}"))
        return found


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
        outcomes = pyfuncitem.config.stash[_outcomes] = pyfuncitem.config.stash[_child].outcomes()
    outcome, text = outcomes.get(pyfuncitem.nodeid, ("failed", "the interpreter's process did not report this test"))
    if outcome == "failed":
        pytest.fail(f"under TRITON_INTERPRET=1:\n{text}", pytrace=False)
    if outcome == "skipped":
        pytest.skip(text)
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if config.stash.get(_selected, None) and not INTERPRETED and not config.option.collectonly:
        config.stash[_child] = Child(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    child = config.stash.get(_child, None)
    if child is not None:
        child.process.kill()
        child.process.wait()
        child.folder.cleanup()


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
