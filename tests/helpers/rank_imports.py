"""Imported by the server that forks ranks, and by nothing else: see rank_preload."""

from __future__ import annotations

import gc
import importlib
import os

for _name in (
    "torch.distributed.tensor",
    "shardweave",
    *filter(None, os.environ.pop("SHARDWEAVE_TEST_RANK_MODULES").split(",")),
):
    try:
        importlib.import_module(_name)
    except BaseException:  # pytest.skip() is one, too. The rank that needs it says what is wrong.
        continue
# What lies between here and the environment that the tests have is nothing a rank should see.
if _before := os.environ.pop("SHARDWEAVE_TEST_PYTHONPATH"):
    os.environ["PYTHONPATH"] = _before
else:
    del os.environ["PYTHONPATH"]
# No collection of a rank's goes through all this.
gc.collect()
gc.freeze()
