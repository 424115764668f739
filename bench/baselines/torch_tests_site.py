"""What every Python process of a run with shardweave does at its start; copied to where it is a `sitecustomize.py`.

torch's tests spawn their ranks, and these inherit nothing but the environment. Imports nothing beyond the standard
library until somebody else has imported torch's DTensor, and installs shardweave then: before the tests, and torch's
own helpers for them, bind by name what it replaces. A process that has no DTensors has no shardweave.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import runpy
import sys
import traceback
from multiprocessing import util
from pathlib import Path
from typing import Any

DTENSOR = "torch.distributed.tensor"
FOLDER = "SHARDWEAVE_TORCH_TESTS_COUNTS"  # where each process leaves what it counted


def _half_imported() -> str | None:
    """A module of torch's that is being imported: shardweave imports a good part of them, and needs them whole; but not
    torch's helpers for tests, which bind by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and not name.startswith("torch.testing") and _is_half(module):
            return name
    return None


def _is_half(module: Any) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


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
        # The one that was found last is mostly still at it, and spares the look at all.
        if not done and DTENSOR in sys.modules and not _is_half(sys.modules.get(pending)):
            found = _half_imported()
            if found:
                pending = found
            else:
                done = True
                if builtins.__import__ is watched:
                    builtins.__import__ = genuine
                _install()
        return module

    builtins.__import__ = watched


def _run_the_one_hidden() -> None:
    """The `sitecustomize` that Python would have found without this one."""
    mine = Path(__file__).resolve()
    for folder in sys.path:
        other = Path(folder or ".", "sitecustomize.py").resolve()
        if other != mine and other.is_file():
            runpy.run_path(str(other))
            return


if __name__ == "sitecustomize":
    _run_the_one_hidden()
    _watch_imports()
