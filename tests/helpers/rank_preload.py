"""Ranks of tests, forked from a server that has imported what they need: torch, shardweave, and the modules of the
tests that were collected, which each rank would otherwise import, and compile, again."""

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
    """What ranks of this process are going to need, told before the first of them is started."""
    _modules[:] = modules


def rank_context() -> ForkServerContext:
    """A server forks these processes. It is started once, and runs nothing but imports."""
    context = mp.get_context("forkserver")
    # Modules ask for GPUs when they are imported, after which a fork cannot use them.
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
