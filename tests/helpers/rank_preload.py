"""Starts test ranks by forking a server that has imported torch, shardweave and the collected test modules, which each
rank would otherwise import again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import torch
import torch.multiprocessing as mp

NAMES = "SHARDWEAVE_TEST_RANK_MODULES"
_modules: list[str] = []


def name_modules(modules: Iterable[str]) -> None:
    """Set the modules that the ranks of this process need. Call it before the first rank is started."""
    _modules[:] = modules


def rank_context() -> ForkServerContext:
    """A multiprocessing context whose processes are forked by a server, which is started once and only runs imports."""
    context = mp.get_context("forkserver")
    # Test modules query GPUs when they are imported, after which a forked process cannot use them.
    modules = [] if torch.cuda.is_available() else _modules
    with _environment({NAMES: ",".join(modules), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        context.set_forkserver_preload(["rank_imports"])
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed, SHARDWEAVE_TEST_PYTHONPATH=before["PYTHONPATH"] or "")
    try:
        yield
    finally:
        del os.environ["SHARDWEAVE_TEST_PYTHONPATH"]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
