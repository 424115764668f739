"""`python -m shardweave bench hosts`, dry: every line of the suite runs on tiny sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardweave.bench.harness import measure as measuring
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.measure import suite


@pytest.mark.multi
@pytest.mark.long
def test_every_case_of_the_suite_is_measured(start_hosts: Callable[..., Hosts]) -> None:
    cases = suite("hosts").cases("dry")
    results = measuring.measure({"hosts": list(cases)}, "dry")
    assert not results.faults and not results.absent
    found = {(row.case, row.contender) for row in results.rows}
    assert found == {(case, contender) for case, contenders in cases.items() for contender in contenders}
    assert all(row.bytes >= row.bound_bytes > 0 for row in results.rows)
