"""What every Python process of a run with shardweave does at its start; copied to where it is a `sitecustomize.py`.

torch's tests spawn their ranks, and these inherit nothing but the environment. Imports nothing beyond the standard
library until torch's DTensor has been imported completely by somebody else, and installs shardweave then.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

NEEDED = "torch.distributed.tensor"
FOLDER = "SHARDWEAVE_TORCH_TESTS_COUNTS"  # where each process leaves what it counted


def _is_ready() -> bool:
    """DTensor is there, and nothing of torch is half imported: shardweave imports a good part of it."""
    return NEEDED in sys.modules and not any(
        name.partition(".")[0] == "torch" and getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
    )


def _install() -> None:
    report: dict[str, Any] = {"error": None, "calls": {}, "delegations": {}}
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:  # what is forked inherits this, and the counts with it
            Path(os.environ[FOLDER], f"{process}.json").write_text(json.dumps(report), encoding="utf-8")

    atexit.register(leave)
    try:
        import shardweave

        shardweave.install()
        report["calls"], report["delegations"] = shardweave.stats().calls, shardweave.stats().delegations
    except Exception:
        report["error"] = traceback.format_exc()


def _watch_imports() -> None:
    genuine, here = builtins.__import__, threading.local()
    done = False

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        depth = getattr(here, "depth", 0)
        here.depth = depth + 1
        try:
            module = genuine(*args, **kwargs)
        finally:
            here.depth = depth
        if not done and depth == 0 and _is_ready():
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
