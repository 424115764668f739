"""The suite of redistributions: what is done with what its ranks found, and with cases that there is no room for."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.result_file import Results
from shardweave.bench.suites import suite_redistribute
from shardweave.bench.suites.suite_redistribute import measure, memory_of, put, workloads


@pytest.mark.plan
def test_what_is_wrong_is_not_timed_unless_it_is_stock() -> None:
    def rank(**changed: Any) -> dict[str, Any]:
        given = {
            "seconds": {"ours": [1e-5, 2e-5], "stock": [3e-5, 1e-5], "copy": [1e-6, 1e-6]},
            "faults": {},
            "digests": {"ours": "x"},
            "box": "b",
            "bytes": {"ours": 8, "copy": 8},
            "bound": 8,
            "must_move": True,
            "detail": {},
        }
        return given | changed

    def results(*by_rank: dict[str, Any]) -> Results:
        results = Results("", "", "", {})
        put("case", list(by_rank), Sink("redistribute", results.put))
        return results

    right = results(rank(), rank(seconds={"ours": [4e-5, 1e-5], "stock": [1e-5, 1e-5], "copy": [2e-6, 1e-6]}))
    assert not right.faults
    assert right.rows[0].contender == "ours" and right.rows[0].samples == pytest.approx((40, 20))  # the slowest rank's
    assert right.rows[0].share_of_ceiling == pytest.approx(1.5 / 30)
    (fault,) = results(rank(), rank(digests={"ours": "y"})).faults
    assert fault.contender == "ours" and "replicas differ" in fault.why
    assert not results(rank(), rank(digests={"ours": "y"}, box="c")).faults
    wrong = results(rank(), rank(faults={"ours": "3 differ", "stock": "4 differ"}))
    assert [str(fault) for fault in wrong.faults] == ["redistribute: case: ours: rank 1: 3 differ"]
    assert {row.contender: row.note for row in wrong.rows}["stock"] == "its result is wrong: rank 1: 4 differ"


@pytest.mark.plan
def test_a_case_that_does_not_fit_into_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    second, largest = sorted(workloads("full"), key=lambda one: memory_of(one, 5))[-2:]
    monkeypatch.setattr(suite_redistribute, "available_memory", lambda: memory_of(largest, 5))
    monkeypatch.setattr(
        suite_redistribute, "run_ranks",
        lambda main, ranks, config, together: begun.extend(one.name for one in config["workloads"]),
    )  # fmt: skip
    results = Results("", "", "", {})
    measure([largest.name, second.name], "full", Sink("redistribute", results.put))
    assert begun == [second.name] and {one.case for one in results.absent} == {largest.name}
    assert all("MiB of memory are needed" in one.why for one in results.absent)
