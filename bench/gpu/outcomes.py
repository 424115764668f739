"""A pytest plugin that writes rows of JSON while tests run, so that a killed run leaves what it has seen.

`pytest -p outcomes`, with this folder in PYTHONPATH and SHARDWEAVE_TEST_OUTCOMES=FILE; `read(FILE)` reads it. Imports
nothing of shardweave, and works as a copy. Other variables:

- SHARDWEAVE_TEST_SECTION=NAME: goes into each row. Tests that FILE has already are not run again.
- SHARDWEAVE_TEST_FIRST=1: of each test function only the first case. SHARDWEAVE_TEST_SHARD=2/8: of these every eighth,
  from the third on.
- SHARDWEAVE_TEST_FORKSERVER=MODULE,MODULE: processes that tests spawn start from a server that has imported these, as
  this process has. torch's tests spawn new ranks for every test, which takes seconds each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FILE, FORK = "SHARDWEAVE_TEST_OUTCOMES", "SHARDWEAVE_TEST_FORKSERVER"
SECTION, FIRST, SHARD = "SHARDWEAVE_TEST_SECTION", "SHARDWEAVE_TEST_FIRST", "SHARDWEAVE_TEST_SHARD"
LOST = 86
"""The exit code after a test that left CUDA unusable for its process."""


def write(file: str | Path, **row: Any) -> None:
    with open(file, "a", encoding="utf-8") as rows:  # one write, so that rows of several processes do not mix
        rows.write(json.dumps(row) + "\n")


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The rows as they were written: "section", and either "selected" tests, or a "test", its "outcome" (started,
    passed, skipped, failed, error, finished) and the "text" of an error or a skip."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        with suppress(ValueError):  # the last one, of a run that was killed as it wrote
            yield json.loads(line)


def ends(rows: Iterable[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """The outcome of each test, and its text. Of several, as phases and subtests have, the first failure counts, or a
    skip, else the last. "started": it has not ended."""
    found: dict[str, tuple[str, str]] = {}
    for row in rows:
        test, outcome = row.get("test"), row.get("outcome")
        before, _ = found.get(test or "", ("", ""))
        decided = before in ("failed", "error") or (before == "skipped" and outcome == "passed")
        if test and outcome and outcome != "finished" and not decided:
            found[test] = outcome, row.get("text", "")
    return found


def _write(**row: Any) -> None:
    write(os.environ[FILE], section=os.environ.get(SECTION, ""), **row)


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


@pytest.hookimpl(trylast=True)  # after deselection by marker
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if SECTION not in os.environ:
        return
    first = {(item.path, getattr(item, "originalname", item.name)): item for item in reversed(items)}
    selected = [item for item in items if FIRST not in os.environ or item in first.values()]
    part, parts = map(int, os.environ.get(SHARD, "0/1").split("/"))
    selected = selected[part::parts]
    _write(selected=[item.nodeid for item in selected])
    known = {row.get("test") for row in read(Path(os.environ[FILE]))}
    left = [item for item in selected if item.nodeid not in known]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed or report.skipped or report.when == "call":
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        _write(test=report.nodeid, outcome=outcome, text=_text(report), seconds=round(report.duration, 2))
    if report.failed and cuda_is_lost():
        print(f"{report.nodeid} left CUDA unusable for this process", flush=True)
        os._exit(LOST)  # every later test would fail


def cuda_is_lost() -> bool:
    """Whether an error has made CUDA unusable for this process."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is not None and cuda.is_initialized():
            cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(test=nodeid, outcome="finished")


def pytest_collectreport(report: Any) -> None:
    if not report.passed:
        _write(test=report.nodeid, outcome="error" if report.failed else "skipped", text=_text(report))


def _text(report: Any) -> str:
    """The traceback of an error, the reason of a skip."""
    skipped = isinstance(report.longrepr, tuple)
    return str(report.longrepr[2]).removeprefix("Skipped: ") if skipped else report.longreprtext
