"""`compare`: regressions are reported; noise and a slower machine are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.__main__ import main
from shardweave.bench.harness.compare import compare, interval, show
from shardweave.bench.harness.result_file import Missing, Results, Row
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan
ABOUT = {"cpu": "AMD EPYC", "cores": 2, "gpus": [], "torch": "2.13.0", "triton": "3.7.1", "python": "3.11"}
CASES = tuple(f"case {i}" for i in range(8))


def results(seed: int, ours: float = 1.0, others: float = 1.0, noise: float = 0.03, **changes: Any) -> Results:
    """Random rounds: ours take 10 µs times a factor, others 100 and 5 times theirs."""
    random = np.random.default_rng(seed)
    rows = [
        Row("redistribute", case, contender, "µs", tuple((us * np.exp(noise * random.standard_normal(9))).tolist()))
        for case in changes.pop("cases", CASES)
        for contender, us in (("ours", 10 * ours), ("stock", 100 * others), ("copy", 5 * others))
    ]
    return replace(Results("2026-01-02", "bench", "quick", ABOUT, rows), **changes)


def scaled(before: Results, factor: float, contender: str = "ours") -> Results:
    """Case 3 takes longer; without it, if the factor is 0."""
    rows = [
        replace(row, samples=tuple(s * factor for s in row.samples)) if row.key[1:] == ("case 3", contender) else row
        for row in before.rows
    ]
    return replace(before, rows=[row for row in rows if row.median])


def test_compare_reports_regressions_and_gains_of_ours() -> None:
    comparison = compare(results(1), scaled(results(2), 1.4))
    (one,) = comparison.regressions
    assert one.row.case == "case 3" and one.low < one.ratio < one.high and one.low > 1.2
    assert one.ratio == pytest.approx(1.4, rel=0.08) and show(comparison) == 1
    comparison = compare(results(1), scaled(results(2), 0.5))
    assert [one.row.case for one in comparison.rows if one.verdict == "faster"] == ["case 3"] and show(comparison) == 0
    assert not compare(results(1), scaled(results(2), 3.0, "stock")).regressions


@pytest.mark.parametrize("seed", range(2, 12))
def test_noise_is_no_regression(seed: int) -> None:
    assert not any(one.verdict for one in compare(results(1), results(seed)).rows)
    assert not compare(results(1, noise=0.5), scaled(results(seed, noise=0.5), 1.2)).regressions


def test_drift_of_the_machine_is_no_regression() -> None:
    comparison = compare(results(1), results(2, ours=1.5, others=1.5))
    assert not comparison.regressions and 1.45 < comparison.drift < 1.6
    assert len(compare(results(1), results(2, ours=2.2, others=1.5)).regressions) == len(CASES)
    # Others alone getting slower is no gain of ours, and getting faster no loss.
    for others in (0.6, 1.5):
        assert not any(one.verdict for one in compare(results(1), results(2, others=others)).rows)


def test_wrong_and_missing_results_fail(capsys: pytest.CaptureFixture[str]) -> None:
    a, key = results(1), ("redistribute", "case 3", "ours")
    without_ours, faults = scaled(results(2), 0), [Missing(*key, "3 elements differ")]
    wrong = replace(without_ours, faults=faults)
    for b, subset in ((wrong, False), (wrong, True), (results(2, faults=faults), False)):
        assert show(compare(a, b, subset=subset)) == 1
        assert "WRONG in B: redistribute: case 3: ours: 3 elements differ\n" in capsys.readouterr().out
    # Faults of A say nothing about B, and what others lack is no fault of ours.
    assert show(compare(wrong, results(2))) == show(compare(a, scaled(results(2), 0, "stock"))) == 0
    absent = replace(without_ours, absent=[Missing(*key, "no compiler")])
    assert compare(a, absent).failures == ["MISSING in B: redistribute: case 3: ours: no compiler"]
    # B was not measured whole: another scale, selected cases, another suite.
    for changes, subset in (({"scale": "full"}, False), ({"match": "case 1"}, False), ({}, True)):
        assert not compare(a, replace(without_ours, **changes), subset=subset).failures
    assert not compare(replace(a, rows=[*a.rows, Row("host", "S0 → R", "ours", "µs", (1.0,))]), results(2)).failures
    assert show(compare(results(1, cases=["a"]), results(2, cases=["b"]))) == 1, "nothing was compared"


def test_paired_samples_are_compared_request_by_request() -> None:
    times = tuple(float(10**k) for k in range(-3, 4))
    a = Row("plan", "cold", "ours", "ms", times, paired=True)
    b = replace(a, samples=tuple(1.25 * t for t in times))
    assert interval(a, b) == pytest.approx((1.25, 1.25, 1.25))
    _, low, high = interval(replace(a, paired=False), b)
    assert low < 0.1 and high > 10


def test_compare_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = results(2, machine={**ABOUT, "cores": 64, "torch": "2.11.0"}, scale="full")
    a, slow, others, cut = (str(tmp_path / f"{name}.json") for name in ("a", "slow", "other", "cut"))
    for path, text in (
        (a, results(1).to_json()), (slow, scaled(results(2), 2.0).to_json()),
        (others, other.to_json()), (cut, other.to_json()[:500]),
    ):  # fmt: skip
        Path(path).write_text(text)
    assert main(["compare", a, a]) == 0 and main(["compare", a, slow]) == 1
    assert main(["compare", a, slow, "--threshold", "1.5"]) == 0
    capsys.readouterr()
    main(["compare", a, others])
    output = capsys.readouterr().out
    assert "amd-epyc-2-cores in A, amd-epyc-64-cores in B" in output and "torch: 2.13.0 in A, 2.11.0 in B" in output
    assert main(["compare", a, cut]) == 2 and capsys.readouterr().err.startswith("error: B: ")
    for threshold in ("nan", "-0.1", "inf"):
        assert main(["compare", a, a, f"--threshold={threshold}"]) == 2
    with pytest.raises(ArgumentError, match="--threshold: .*; allowed: a finite number from 0 on"):
        compare(results(1), results(2), float("nan"))
