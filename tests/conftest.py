"""What every process of tests needs."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from interpreter import patch_triton_once
from warm_python import name_session

# Before torch is imported, here or in a process that a test starts. Processes of tests share the cores: the threads of
# one spin while those of another run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No question to a DNS server: a TCPStore looks up the name of each peer's address, ::ffff:127.0.0.1, which hosts files
# do not have, and waits 5 seconds for a server that does not answer.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Inductor makes scalar code. Else it first compiles a dozen programs to find out which vectors this machine has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Few of its programs are compiled in one environment: headers compiled once cost more than they save.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# No figures of this machine that its user has measured: plans of tests are by those of the table.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="shardweave-tests-")
    os.environ["XDG_CACHE_HOME"] = _cache.name
patch_triton_once()
name_session()  # before xdist starts its workers, which share servers
gc.disable()  # until modules are imported and tests are collected
_RANKS = ("moe", "transports", "executor", "dtensor", "tracing", "cli", "docs", "bench", "runtime")
_ORDER = {folder: place for place, folder in enumerate((*_RANKS, "kernels", "planner"))}
_LONG_MOE_AND_TRANSPORTS = "compile windows payloads zero_rows symmetric hierarchical agreement"
_LONG_OTHERS = "simulate fsdp redistribute redistribute_meshes drop_in plan search blocks"
_LONG_KERNELS = "token_kernels_aot aot token_kernels"
_LONG = {f"test_{name}" for name in f"{_LONG_MOE_AND_TRANSPORTS} {_LONG_OTHERS} {_LONG_KERNELS}".split()}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files are shared out in this order: long ones first, and those with ranks before those without, so that no worker
    # is left alone with one in the end.
    items.sort(key=lambda item: (item.path.stem not in _LONG, _ORDER.get(item.path.parent.name, len(_ORDER))))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.freeze()  # garbage collections during tests skip what has been imported
    from rank_preload import name_modules

    folders = {Path(__file__).parent / folder for folder in ("kernels", "runtime")}
    mine = {item.module.__name__ for item in session.items if folders & {*item.path.parents}}  # type: ignore[attr-defined]
    name_modules(sorted(mine))
