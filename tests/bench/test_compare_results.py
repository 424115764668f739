"""Two result files side by side: a regression is seen, noise and a slower machine are not taken for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardweave.__main__ import main
from shardweave.bench.compare_results import compare, interval, run, show
from shardweave.bench.result_file import Absent, Fault, Results, Row
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan
ABOUT = {"cpu": "AMD EPYC", "cores": 2, "gpus": [], "torch": "2.13.0", "triton": "3.7.1", "python": "3.11"}
CASES = tuple(f"case {i}" for i in range(8))


def results(seed: int, ours: float = 1.0, others: float = 1.0, noise: float = 0.03, cases: tuple = CASES) -> Results:
    """Made-up rounds: ours take 10 µs times a factor, others 100 and 5 times theirs."""
    random = np.random.default_rng(seed)
    rows = []
    for case in cases:
        for contender, microseconds in (("ours", 10 * ours), ("stock", 100 * others), ("copy", 5 * others)):
            samples = microseconds * np.exp(noise * random.standard_normal(9))
            rows.append(Row("redistribute", case, contender, "µs", tuple(samples.tolist())))
    return Results("2026-01-02", "bench", "quick", ABOUT, tuple(rows))


def changed(given: Results, case: str, factor: float, contender: str = "ours") -> Results:
    return replace(
        given,
        rows=tuple(
            replace(row, samples=tuple(s * factor for s in row.samples)) if row.key[1:] == (case, contender) else row
            for row in given.rows
        ),
    )


def test_a_regression_is_seen() -> None:
    found = compare(results(1), changed(results(2), "case 3", 1.4))
    assert [one.row.case for one in found.regressions] == ["case 3"]
    (one,) = found.regressions
    assert one.low < one.ratio < one.high and one.ratio == pytest.approx(1.4, rel=0.08) and one.low > 1.2
    assert show(found) == 1


@pytest.mark.parametrize("seed", range(2, 12))
def test_noise_is_none(seed: int) -> None:
    found = compare(results(1), results(seed))
    assert not found.regressions and show(found) == 0
    assert not any(one.verdict for one in found.rows)


def test_wide_noise_hides_what_it_could_have_made() -> None:
    assert not compare(results(1, noise=0.5), changed(results(2, noise=0.5), "case 3", 1.2)).regressions


def test_a_slower_machine_is_none_and_what_is_slower_still_is() -> None:
    found = compare(results(1), results(2, ours=1.5, others=1.5))
    assert not found.regressions and 1.45 < found.slower_machine < 1.6
    assert len(compare(results(1), results(2, ours=2.2, others=1.5)).regressions) == len(CASES)
    # Others alone getting slower is no gain of ours, and getting faster no loss.
    for others in (0.6, 1.5):
        assert not any(one.verdict for one in compare(results(1), results(2, others=others)).rows)


def test_a_gain_is_shown_and_fails_nothing() -> None:
    found = compare(results(1), changed(results(2), "case 5", 0.5))
    assert [one.row.case for one in found.rows if one.verdict == "faster"] == ["case 5"] and show(found) == 0


def test_others_regress_nothing() -> None:
    found = compare(results(1), changed(results(2), "case 3", 3.0, "stock"))
    assert not found.regressions


def test_cases_in_one_file_only_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(results(1, cases=("a", "b")), results(2, cases=("b", "c")))
    assert {one.row.case for one in found.rows} == {"b"}
    assert found.only_before == tuple(f"redistribute: a: {side}" for side in ("ours", "stock", "copy"))
    assert show(found) == 1
    said = capsys.readouterr().out
    assert "only in A: redistribute: a: ours" in said and "only in B: redistribute: c: stock" in said
    assert found.failures == ("MISSING in B: redistribute: a: ours",) and found.failures[0] in said
    # Of a part of the baseline the rest is not missing.
    assert not compare(results(1, cases=("a", "b")), results(2, cases=("b",)), subset=True).only_before
    # Nothing in common is no success.
    assert show(compare(results(1, cases=("a",)), results(2, cases=("b",)))) == 1


def test_what_went_wrong_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong result has no row, which alone would pass."""
    a, b = results(1), results(2)
    fault = Fault("redistribute", "case 3", "ours", "3 elements differ")
    wrong = replace(b, rows=tuple(row for row in b.rows if row.key[1:] != ("case 3", "ours")), faults=(fault,))
    for given, subset in ((wrong, False), (wrong, True), (replace(b, faults=(fault,)), False)):
        assert show(compare(a, given, subset=subset)) == 1
        assert "WRONG in B: redistribute: case 3: ours: 3 elements differ\n" in capsys.readouterr().out
    assert len(compare(a, wrong).failures) == 1
    # A's own says nothing of B.
    assert show(compare(wrong, b)) == 0 and "A has wrong results: redistribute: case 3" in capsys.readouterr().out
    ended = replace(b, rows=b.rows[:3], faults=(Fault("redistribute", "", "", "ended with -9"),))
    assert [*compare(a, ended).failures[:2]] == [
        "WRONG in B: redistribute: ended with -9", "MISSING in B: redistribute: case 1: ours"
    ]  # fmt: skip


def test_a_row_of_ours_that_b_lacks_fails() -> None:
    a = results(1)

    def without(contender: str) -> Results:
        return replace(results(2), rows=tuple(row for row in results(2).rows if row.key[1:] != ("case 3", contender)))

    assert compare(a, without("ours")).failures == ("MISSING in B: redistribute: case 3: ours",)
    assert show(compare(a, without("stock"))) == 0, "theirs is no fault of ours"
    absent = replace(without("ours"), absent=(Absent("redistribute", "case 3", "ours", "no compiler"),))
    assert compare(a, absent).failures == ("MISSING in B: redistribute: case 3: ours: no compiler",)
    # Of another scale, a part, or another suite nobody asked for it.
    assert not compare(a, replace(without("ours"), scale="full")).failures
    assert not compare(a, without("ours"), subset=True).failures
    assert not compare(a, replace(without("ours"), match="case 1")).failures
    assert compare(replace(a, match="case"), replace(without("ours"), match="case")).failures
    more = Row("host", "S0 → R", "ours", "µs", (1.0,))
    assert not compare(replace(a, rows=(*a.rows, more)), results(2)).failures


def test_counts_have_no_noise() -> None:
    def counted(*samples: float) -> Results:
        row = Row("plan", "bytes ÷ bound", "ours", "×", samples, paired=True)
        return replace(results(1), rows=(row,))

    assert show(compare(counted(1.0, 1.0, 1.0), counted(1.0, 1.0, 1.0))) == 0
    assert show(compare(counted(1.0, 1.0, 1.0), counted(1.0, 1.0, 1.01))) == 1
    assert compare(counted(1.0, 1.5), counted(1.0, 1.0)).rows[0].verdict == "faster"
    # From nothing as well.
    assert show(compare(counted(0.0, 0.0), counted(0.0, 0.0))) == 0
    assert show(compare(counted(0.0, 0.0), counted(0.0, 1.0))) == 1
    assert compare(counted(0.0, 1.0), counted(0.0, 0.0)).rows[0].verdict == "faster"


@pytest.mark.parametrize("threshold", [float("nan"), -0.1, float("inf")])
def test_thresholds_that_nothing_or_all_would_pass(threshold: float, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--threshold: .*; allowed: a finite number from 0 on"):
        compare(results(1), results(2), threshold)
    results(1).write(tmp_path / "a.json", "--json")
    assert main(["compare", *[str(tmp_path / "a.json")] * 2, f"--threshold={threshold}"]) == 2
    compare(results(1), results(2), 0.0)


def test_paired_samples_are_compared_request_by_request() -> None:
    times = tuple(float(10**k) for k in range(-3, 4))
    a = Row("plan", "cold", "ours", "ms", times, paired=True)
    b = replace(a, samples=tuple(1.25 * t for t in times))
    assert interval(a, b) == pytest.approx((1.25, 1.25, 1.25))
    _, low, high = interval(replace(a, paired=False), b)
    assert low < 0.1 and high > 10


def test_what_else_differs_is_said() -> None:
    other = replace(results(2), machine={**ABOUT, "cores": 64, "torch": "2.11.0"}, scale="full")
    notes = "\n".join(compare(results(1), other).notes)
    assert "amd-epyc-2-cores and amd-epyc-64-cores" in notes and "torch 2.13.0 in A, 2.11.0 in B" in notes
    assert "A is quick, B is full" in notes
    rows = tuple(row for row in results(1).rows if row.is_ours)
    assert "Too few rows of others" in compare(results(1), replace(results(2), rows=rows)).notes[0]


def test_files_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"a": results(1), "same": results(2), "slow": changed(results(2), "case 3", 2.0)}
    for name, one in files.items():
        one.write(tmp_path / f"{name}.json", "--json")
    a = tmp_path / "a.json"
    assert run(a, tmp_path / "same.json", 0.1) == 0 and run(a, tmp_path / "slow.json", 0.1) == 1
    assert run(a, tmp_path / "slow.json", 1.5) == 0
    with pytest.raises(ArgumentError, match=r"A: .*none.json' cannot be read"):
        run(tmp_path / "none.json", a, 0.1)
    (tmp_path / "cut.json").write_text(a.read_text()[:500])
    (tmp_path / "other.json").write_text(a.read_text().replace('"version": 2', '"version": 7', 1))
    for name, said in (("cut", "is cut short"), ("other", "is of version 7"), ("none", "cannot be read")):
        with pytest.raises(ArgumentError, match=f"B: .*{said}"):
            run(a, tmp_path / f"{name}.json", 0.1)
    assert main(["compare", str(a), str(tmp_path / "slow.json")]) == 1
    assert main(["compare", str(a), str(tmp_path / "slow.json"), "--threshold", "1.5"]) == 0
    capsys.readouterr()
    assert main(["compare", str(a), str(tmp_path / "cut.json")]) == 2
    assert capsys.readouterr().err.startswith("error: B: ")
