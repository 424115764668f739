"""shardweave installed in the processes of torch's tests, and what it counted in each; works as a copy.

The process of pytest imports it, and so does the server that the tests' ranks are forked from: before torch's helpers
for tests, which bind by name what shardweave replaces.
"""

from __future__ import annotations

import atexit
import json
import os
import traceback
from multiprocessing import util
from pathlib import Path
from typing import Any

FOLDER = "SHARDWEAVE_TORCH_TESTS_COUNTS"  # where each process leaves what it counted


def _install() -> None:
    report: dict[str, Any] = {"error": None, "calls": {}, "delegations": {}}

    def leave() -> None:
        file = Path(os.environ[FOLDER], f"{os.getpid()}.json")
        part = file.with_suffix(".part")  # this process may be killed
        part.write_text(json.dumps(report), encoding="utf-8")
        part.replace(file)

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


if __name__ == "shardweave_installed":  # the copy
    _install()
