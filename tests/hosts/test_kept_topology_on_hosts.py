"""A topology that was found stays, on hosts of their own network addresses and boot ids."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from test_kept_topology import ALL, NODES, check_joined, dies, joins_late

from shardweave.bench.harness.hosts import Hosts
from shardweave.errors import TransportError

pytestmark = [pytest.mark.multi, pytest.mark.long]

THREE = [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("late", [None, 3])
def test_topology_stays_when_a_host_joins_late(late: int | None, start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts(THREE) as hosts:
        check_joined(hosts.run(joins_late, late, "/tmp"))


def named(rank: int, first_calls: int) -> None:
    """Raise the error that names the dead rank: ranks that return a value wait for all others."""
    before, after, errors = dies(rank, 4, first_calls)
    assert before == after and errors[1].startswith(errors[0])  # which a later call explains
    raise TransportError(f"{errors[0]}\n{before.fingerprint}, {before.nodes}")


@pytest.mark.parametrize("first_calls", [0, 1])
def test_dead_rank_of_another_host_is_named(first_calls: int, start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts(THREE) as hosts:
        hosts.start(named, first_calls, environment={"SHARDWEAVE_TIMEOUT": "6"})
        ends = hosts.ends()
    assert ends[4].exit_code == -signal.SIGKILL and all(end.error == "TransportError" for end in ends[:4]), ends
    texts = [end.message.splitlines() for end in ends[:4]]
    assert all("rank 4 is gone" in error for error, *_ in texts), texts
    (planned,) = {planned for _, planned, *_ in texts}
    assert planned.endswith(f", {NODES[ALL] if first_calls else None}"), planned
