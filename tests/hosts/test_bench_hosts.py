"""`python -m shardweave bench hosts`, dry: every line of the suite runs on tiny sizes; and what hosts need to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

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
