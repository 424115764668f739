"""Imported only by the server that forks ranks; see rank_preload."""

from __future__ import annotations

import gc
import importlib
import os

gc.disable()
for _name in (
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",  # whose imports are those of the first DTensor of a process
    "torch.distributed.checkpoint",
    "shardweave",
    "numba",  # which the first loop over tokens imports
    "numpy.ma",  # which np.unique imports when it is first called
    *filter(None, os.environ.pop("SHARDWEAVE_TEST_RANK_MODULES").split(",")),
):
    try:
        importlib.import_module(_name)
    except BaseException:  # including that of pytest.skip(); the rank that needs the module raises again.
        continue
# Ranks get the environment of the tests, without the variables for this server.
if _before := os.environ.pop("SHARDWEAVE_TEST_PYTHONPATH"):
    os.environ["PYTHONPATH"] = _before
else:
    del os.environ["PYTHONPATH"]
# Garbage collections in ranks skip these objects.
gc.enable()
gc.collect()
gc.freeze()
