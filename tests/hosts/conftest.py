"""Hosts for tests: skipped, with the reason, where this machine does not allow them; failed if they fail otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from rank_preload import rank_context

from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.namespaces import HostsUnavailable


@functools.cache
def _reason() -> str | None:
    """Why this machine does not allow hosts; None if it does."""
    try:
        with _started([[0]]):
            return None
    except HostsUnavailable as unavailable:
        return str(unavailable)


@pytest.fixture
def start_hosts() -> Callable[..., Hosts]:
    """`Hosts`, with processes that have the test modules loaded."""
    if reason := _reason():
        pytest.skip(f"no hosts here: {reason}")
    return _started


def _started(ranks: Any, gigabits: float = 1.0) -> Hosts:
    return Hosts(ranks, gigabits, rank_context())
