"""The suite of redistributions: what is done with what its ranks found, and with cases that there is no room for."""

from __future__ import annotations

import io
from typing import Any

import pytest

from shardweave.bench.harness.measure import Found, Sink
from shardweave.bench.suites import suite_redistribute
from shardweave.bench.suites.rank_rows import put, result
from shardweave.bench.suites.suite_redistribute import measure, memory_of, workloads


@pytest.mark.plan
def test_what_is_wrong_is_not_timed_unless_it_is_stock() -> None:
    def rank(**changed: Any) -> dict[str, Any]:
        seconds = {"ours": [1e-5, 2e-5], "stock": [3e-5, 1e-5], "copy": [1e-6, 1e-6]}
        return {**result(seconds, digests={"ours": "x"}, bytes={"ours": 8, "copy": 8}, bound=8), **changed}

    def found(*by_rank: dict[str, Any]) -> Found:
        out = io.StringIO()
        put(Sink("redistribute", out), by_rank, "case", ["stock"])
        return Found.of(out.getvalue().splitlines())

    right = found(rank(), rank(seconds={"ours": [4e-5, 1e-5], "stock": [1e-5, 1e-5], "copy": [2e-6, 1e-6]}))
    assert not right.faults
    assert right.rows["case", "ours"].samples == pytest.approx((40, 20))  # of each round the slowest rank's
    assert right.rows["case", "ours"].share_of_ceiling == pytest.approx(1.5 / 30)
    assert "replicas differ" in found(rank(), rank(digests={"ours": "y"})).faults["case", "ours"]
    assert not found(rank(), rank(digests={"ours": "y"}, box="c")).faults
    wrong = found(rank(), rank(faults={"ours": "3 differ", "stock": "4 differ"}))
    assert wrong.faults == {("case", "ours"): "rank 1: 3 differ"}
    assert wrong.rows["case", "stock"].note == "its result is wrong: rank 1: 4 differ"


@pytest.mark.plan
def test_a_case_that_does_not_fit_into_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    second, largest = sorted(workloads("full"), key=lambda one: memory_of(one, 5))[-2:]
    monkeypatch.setattr(suite_redistribute, "available_memory", lambda: memory_of(largest, 5))
    monkeypatch.setattr(
        suite_redistribute, "run_ranks",
        lambda main, ranks, config, together: begun.extend(one.name for one in config["workloads"]),
    )  # fmt: skip
    out = io.StringIO()
    measure([largest.name, second.name], "full", Sink("redistribute", out))
    absent = Found.of(out.getvalue().splitlines()).absent
    assert begun == [second.name] and {case for case, _ in absent} == {largest.name}
    assert all("MiB of memory are needed" in why for why in absent.values())
