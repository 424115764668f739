"""`python -m shardweave bench hosts`, dry: every line of the suite runs on tiny sizes; and what hosts need to start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardweave.bench.harness import measure as measuring
from shardweave.bench.harness import namespaces
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.measure import suite
from shardweave.bench.harness.namespaces import HostsUnavailable


@pytest.mark.multi
@pytest.mark.long
def test_every_case_of_the_suite_is_measured(start_hosts: Callable[..., Hosts]) -> None:
    cases = suite("hosts").cases("dry")
    results = measuring.measure({"hosts": list(cases)}, "dry")
    assert not results.faults and not results.absent
    found = {(row.case, row.contender) for row in results.rows}
    assert found == {(case, contender) for case, contenders in cases.items() for contender in contenders}
    assert all(row.bytes >= row.bound_bytes > 0 for row in results.rows)


def _congestion_controls(rank: int) -> tuple[str, str]:
    """What `congestion_control` returns, and what a connection to the other host has."""
    port = torch.zeros(1, dtype=torch.int64)
    with socket.socket() as listener:
        if rank == 0:
            listener.bind(("host0", 0))
            listener.listen()
            port += listener.getsockname()[1]
        dist.broadcast(port, 0)
        connection = listener.accept()[0] if rank == 0 else socket.create_connection(("host0", int(port)))
        with connection:
            name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return namespaces.congestion_control(), name.rstrip(b"\0").decode()


@pytest.mark.multi
def test_connections_between_hosts_use_the_stated_congestion_control(start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts([[0], [1]], 10.0) as hosts:
        for stated, found in hosts.run(_congestion_controls, timeout=60):
            assert stated == found


@pytest.mark.plan
@pytest.mark.parametrize(
    ("printed", "error"),
    [("RTNETLINK answers: Operation not permitted", HostsUnavailable),
     ("Error: Specified qdisc kind is unknown.", HostsUnavailable),
     ("Cannot find device \"host7\"", RuntimeError), ("RTNETLINK answers: File exists", RuntimeError)],
)  # fmt: skip
def test_only_what_is_not_allowed_makes_hosts_unavailable(
    printed: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip").write_text(f"#!/bin/sh\ncat > /dev/null\necho '{printed}' >&2\nexit 2\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setattr(namespaces, "_PATH", os.pathsep.join((str(tmp_path), namespaces._PATH)))
    with pytest.raises(RuntimeError, match="ip link set host7 up: ") as raised:
        namespaces.set_link("host7", True)
    assert raised.type is error
