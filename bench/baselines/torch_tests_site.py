"""What every Python process of a run with shardweave does at its start; copied to where it is a `sitecustomize.py`.

torch's tests spawn their ranks, and these inherit nothing but the environment. Imports nothing beyond the standard
library until torch's DTensor has been imported, and installs shardweave then: before the tests, and torch's own helpers
for them, bind by name what it replaces. A process that has no DTensors has no shardweave.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import sys
import traceback
from multiprocessing import util
from pathlib import Path
from typing import Any

DTENSOR = "torch.distributed.tensor"
FOLDER = "SHARDWEAVE_TORCH_TESTS_COUNTS"  # where each process leaves what it counted


def _importing(name: str) -> bool:
    """Whether a module is being imported."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _install() -> None:
    report: dict[str, Any] = {"error": None, "calls": {}, "delegations": {}}

    def leave() -> None:
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(report), encoding="utf-8")

    def begin_as_child(_: Any) -> None:
        for counts in (report["calls"], report["delegations"]):
            counts.clear()
        util.Finalize(None, leave, exitpriority=0)  # children of a server end without atexit

    atexit.register(leave)
    util.register_after_fork(begin_as_child, begin_as_child)
    try:
        import shardweave

        shardweave.install()
        report["calls"], report["delegations"] = shardweave.stats().calls, shardweave.stats().delegations
    except Exception:
        report["error"] = traceback.format_exc()


def _watch_imports() -> None:
    genuine, pending, done = builtins.__import__, DTENSOR, False

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending, done
        module = genuine(*args, **kwargs)
        # The module that was found last is mostly still being imported, which spares a look at all.
        if not done and DTENSOR in sys.modules and not _importing(pending):
            # shardweave needs torch's modules whole; but not torch's helpers for tests, which bind by name.
            torch = [
                n for n in list(sys.modules) if n.partition(".")[0] == "torch" and not n.startswith("torch.testing")
            ]
            pending = next(filter(_importing, torch), "")
            if not pending:
                done = True
                if builtins.__import__ is watched:
                    builtins.__import__ = genuine
                _install()
        return module

    builtins.__import__ = watched


if __name__ == "sitecustomize":
    _watch_imports()
