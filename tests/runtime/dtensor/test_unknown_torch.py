"""A release of torch that is newer than the supported ones, and lacks private names that shardweave uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi

# In a process of its own, before shardweave is imported.
PROGRAM = """
import logging
import sys

import torch
import torch.distributed.tensor._api as api
from torch.distributed.tensor import _dtensor_spec

torch.__version__ = "2.16.0+cpu"
entry = _dtensor_spec.ShardOrderEntry
del _dtensor_spec.ShardOrderEntry
try:
    import shardweave
except ImportError as error:
    print("import:", error)
_dtensor_spec.ShardOrderEntry = entry
for name in [name for name in sys.modules if name.split(".")[0] == "shardweave"]:
    del sys.modules[name]

del api.Redistribute
import shardweave

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
for _ in range(2):
    shardweave.install()
    shardweave.uninstall()
shardweave.install()
assert shardweave.is_installed() and not hasattr(api, "Redistribute")
assert api.redistribute_local_tensor.__module__.startswith("shardweave")
shardweave.uninstall()
assert api.redistribute_local_tensor.__module__.startswith("torch") and not hasattr(api, "Redistribute")
"""


@pytest.mark.long
def test_missing_names_are_reported() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    imported, *warnings = run.stdout.splitlines()
    assert imported.startswith("import: shardweave cannot be imported with torch 2.16.0+cpu, which lacks a name")
    assert "'ShardOrderEntry'" in imported and "docs/versions.md" in imported
    tested, lost = warnings  # once each, though install() is called three times
    assert tested.startswith(
        "WARNING torch 2.16.0+cpu is not tested with shardweave, which requires torch>=2.11,<2.16;"
    )
    assert lost == (
        "WARNING torch 2.16.0+cpu has no torch.distributed.tensor._api.Redistribute; left to torch: "
        "DTensor.redistribute and DTensor.full_tensor"
    )
