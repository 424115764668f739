"""The suites, dry: every line of them runs on tiny sizes, through pytest-benchmark and the command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_python import run_python

from shardweave.__main__ import main
from shardweave.bench.harness import measure as measuring
from shardweave.bench.harness.interleaved import Rotation, in_order, rotating, slowest
from shardweave.bench.harness.machine import machine
from shardweave.bench.harness.measure import Sink, suite
from shardweave.bench.harness.ranks import RanksFailed
from shardweave.bench.harness.results import Results
from shardweave.bench.suites import SUITES
from shardweave.bench.suites.rank_rows import put, result

ROOT = Path(__file__).parents[2]
# Who need not be here.
OPTIONAL = {"torchtitan"}


def collected(name: str, measure: Callable[[Sink], object]) -> Results:
    """The results that are put into the sink of a suite."""
    results = Results()
    measure(Sink(name, results))
    return results


def keys(results: Results) -> set[tuple[str, str]]:
    return {(one.case, one.contender) for some in (results.rows, results.absent) for one in some}


@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize("name", SUITES)
def test_every_case_of_a_suite_is_measured(name: str) -> None:
    cases = suite(name).cases("dry")
    results = measuring.measure({name: list(cases)}, "dry")
    assert not results.faults
    assert keys(results) == {(case, contender) for case, contenders in cases.items() for contender in contenders}
    assert {one.contender for one in results.absent} <= OPTIONAL
    for row in results.rows:
        assert row.median >= 0 and row.suite == name
        if row.bytes and row.bound_bytes and row.is_ours:
            assert row.bytes >= row.bound_bytes


@pytest.mark.multi
@pytest.mark.long
def test_pytest_benchmark_plays_measured_rounds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "bench/", "-q", "-p", "no:cacheprovider", "--scale", "dry"]
    command += ["-k", "test_redistribute", "--benchmark-json", str(tmp_path / "b.json")]
    # A worker of pytest-xdist measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = run_python(command, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = suite("redistribute").cases("dry")
    played = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    assert {(one["extra_info"]["case"], one["extra_info"]["contender"]) for one in played} == {
        (case, contender) for case, contenders in cases.items() for contender in contenders
    }
    for one in played:
        assert "\\" not in one["name"], "letters that pytest writes as codes"
        assert 0 < one["stats"]["median"] < 10 and one["stats"]["rounds"] == 1


@pytest.mark.plan
def test_bench_prints_writes_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each contender of each case takes a microsecond."""
    contenders, out = suite("dispatch").cases("quick"), tmp_path / "dispatch.md"
    first, *_ = contenders
    wrong: dict[str, str | None] = {}

    def measure(cases: list[str], scale: str, sink: Sink) -> None:
        for case in cases:
            for contender in contenders[case]:
                if contender == "torchtitan":
                    sink.absent(case, contender, "not installed")
                elif contender != "ours" or case not in wrong:
                    sink.row(case, contender, [1e-6] * 3)
                elif wrong[case]:
                    sink.fault(case, contender, str(wrong[case]))

    monkeypatch.setattr(suite("dispatch"), "measure", measure)
    bench = ["bench", "dispatch", "--quick", "--out", str(out)]
    assert main(bench) == 0
    page = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == page + "\n"
    about = machine()
    for text in (f"| {first} | ours | 1 µs |", f"{about['cores']} cores", f"commit {about['commit'][:12]}",
                 "dispatch: torchtitan ("):  # fmt: skip
        assert text in page
    assert main([*bench, "--match", "T 16,"]) == 0
    assert {line.split(" | ")[0] for line in out.read_text().splitlines() if " | ours | " in line} == {f"| {first}"}
    for fault, why in (("3 elements differ", "3 elements differ"), (None, "nothing was measured")):
        wrong[first] = fault
        assert main(bench) == 1
        page = out.read_text(encoding="utf-8")
        assert f"- dispatch: {first}: ours: {why}" in page and f"| {first} | ours |" not in page


@pytest.mark.plan
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("bench everything", "suite: 'everything'; allowed: redistribute, dispatch"),
        ("bench dispatch --match nonsense", "--match: 'nonsense' is in no case's name"),
        ("bench dispatch --out /no/where.md", "--out: '/no/where.md' cannot be written"),
    ],
)
def test_bad_arguments_are_one_error_and_status_2(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and text in shown


@pytest.mark.plan
def test_buffers_rotate_past_the_cache() -> None:
    for rank_bytes in (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        rotation = Rotation.of(rank_bytes, 4, cache_bytes=32 << 20)
        assert rotation.sets >= 2 and rotation.cold == ((rotation.sets - 1) * 4 * rank_bytes > 32 << 20)
        assert rotation.cold
    tiny = Rotation.of(16, 4, cache_bytes=32 << 20)
    assert tiny.sets == 1024 and not tiny.cold
    seen: list[int] = []
    call = rotating(seen.append, [1, 2, 3])
    for _ in range(7):
        call()
    assert seen == [1, 2, 3, 1, 2, 3, 1]
    assert ["".join(in_order("abc", number)) for number in range(4)] == ["abc", "acb", "cab", "cba"]
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}], "a") == [2.0, 5.0]


@pytest.mark.plan
def test_results_of_ranks_that_fail_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(cases: list[str], scale: str, sink: Sink) -> None:
        sink.row("a", "ours", [1.0])
        raise RanksFailed("rank 1 was killed")

    monkeypatch.setattr(suite("dispatch"), "measure", measure)
    results = measuring.measure({"dispatch": ["a", "b"]}, "dry")
    assert [row.case for row in results.rows] == ["a"]
    (fault,) = results.faults
    assert str(fault) == "dispatch: rank 1 was killed; their output is above"


@pytest.mark.plan
def test_wrong_results_are_not_timed_except_those_of_stock() -> None:
    def rank(**changed: Any) -> dict[str, Any]:
        seconds = {"ours": [1e-5, 2e-5], "stock": [3e-5, 1e-5], "copy": [1e-6, 1e-6]}
        return {**result(seconds, digests={"ours": "x"}, bytes={"ours": 8, "copy": 8}, bound=8), **changed}

    def results(*by_rank: dict[str, Any]) -> Results:
        return collected("redistribute", lambda sink: put(sink, by_rank, "case", ["stock"]))

    right = results(rank(), rank(seconds={"ours": [4e-5, 1e-5], "stock": [1e-5, 1e-5], "copy": [2e-6, 1e-6]}))
    assert not right.faults
    assert right.rows[0].contender == "ours" and right.rows[0].samples == pytest.approx(
        (4e-5, 2e-5)
    )  # the slowest rank's
    assert right.rows[0].share_of_ceiling == pytest.approx(1.5 / 30)
    (fault,) = results(rank(), rank(digests={"ours": "y"})).faults
    assert fault.contender == "ours" and "replicas differ" in fault.why
    assert not results(rank(), rank(digests={"ours": "y"}, box="c")).faults
    wrong = results(rank(), rank(faults={"ours": "3 differ", "stock": "4 differ"}))
    assert [str(fault) for fault in wrong.faults] == ["redistribute: case: ours: rank 1: 3 differ"]
    assert {row.contender: row.note for row in wrong.rows}["stock"] == "its result is wrong: rank 1: 4 differ"
