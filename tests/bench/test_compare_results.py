"""Two result files side by side: a regression is seen, noise and a slower machine are not taken for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardweave.__main__ import main
from shardweave.bench.harness.compare import compare, interval, show
from shardweave.bench.harness.result_file import Missing, Results, Row
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan
ABOUT = {"cpu": "AMD EPYC", "cores": 2, "gpus": [], "torch": "2.13.0", "triton": "3.7.1", "python": "3.11"}
CASES = tuple(f"case {i}" for i in range(8))


def results(seed: int, ours: float = 1.0, others: float = 1.0, noise: float = 0.03, cases: tuple = CASES) -> Results:
    """Made-up rounds: ours take 10 µs times a factor, others 100 and 5 times theirs."""
    random = np.random.default_rng(seed)
    rows = [
        Row("redistribute", case, contender, "µs", tuple((us * np.exp(noise * random.standard_normal(9))).tolist()))
        for case in cases
        for contender, us in (("ours", 10 * ours), ("stock", 100 * others), ("copy", 5 * others))
    ]
    return Results("2026-01-02", "bench", "quick", ABOUT, tuple(rows))


def changed(given: Results, factor: float, contender: str = "ours") -> Results:
    """Case 3 slower."""
    rows = (
        replace(row, samples=tuple(s * factor for s in row.samples)) if row.key[1:] == ("case 3", contender) else row
        for row in given.rows
    )
    return replace(given, rows=tuple(rows))


def without(contender: str) -> Results:
    return replace(results(2), rows=tuple(row for row in results(2).rows if row.key[1:] != ("case 3", contender)))


def test_a_regression_is_seen_and_a_gain_fails_nothing() -> None:
    found = compare(results(1), changed(results(2), 1.4))
    (one,) = found.regressions
    assert one.row.case == "case 3" and one.low < one.ratio < one.high and one.low > 1.2
    assert one.ratio == pytest.approx(1.4, rel=0.08) and show(found) == 1
    found = compare(results(1), changed(results(2), 0.5))
    assert [one.row.case for one in found.rows if one.verdict == "faster"] == ["case 3"] and show(found) == 0
    assert not compare(results(1), changed(results(2), 3.0, "stock")).regressions


@pytest.mark.parametrize("seed", range(2, 12))
def test_noise_is_no_regression(seed: int) -> None:
    assert not any(one.verdict for one in compare(results(1), results(seed)).rows)
    assert not compare(results(1, noise=0.5), changed(results(seed, noise=0.5), 1.2)).regressions


def test_a_slower_machine_is_no_regression_and_what_is_slower_still_is() -> None:
    found = compare(results(1), results(2, ours=1.5, others=1.5))
    assert not found.regressions and 1.45 < found.drift < 1.6
    assert len(compare(results(1), results(2, ours=2.2, others=1.5)).regressions) == len(CASES)
    # Others alone getting slower is no gain of ours, and getting faster no loss.
    for others in (0.6, 1.5):
        assert not any(one.verdict for one in compare(results(1), results(2, others=others)).rows)


def test_what_went_wrong_or_is_missing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    a, fault = results(1), Missing("redistribute", "case 3", "ours", "3 elements differ")
    wrong = replace(without("ours"), faults=(fault,))
    for given, subset in ((wrong, False), (wrong, True), (replace(results(2), faults=(fault,)), False)):
        assert show(compare(a, given, subset=subset)) == 1
        assert "WRONG in B: redistribute: case 3: ours: 3 elements differ\n" in capsys.readouterr().out
    # A's own says nothing of B, and what others lack is no fault of ours.
    assert show(compare(wrong, results(2))) == show(compare(a, without("stock"))) == 0
    absent = replace(without("ours"), absent=(Missing("redistribute", "case 3", "ours", "no compiler"),))
    assert compare(a, absent).failures == ["MISSING in B: redistribute: case 3: ours: no compiler"]
    # Of another scale, a part, or another suite nobody asked for it.
    for other, subset in (({"scale": "full"}, False), ({"match": "case 1"}, False), ({}, True)):
        assert not compare(a, replace(without("ours"), **other), subset=subset).failures
    more = Row("host", "S0 → R", "ours", "µs", (1.0,))
    assert not compare(replace(a, rows=(*a.rows, more)), results(2)).failures
    # Nothing in common is no success.
    assert show(compare(results(1, cases=("a",)), results(2, cases=("b",)))) == 1


def test_counts_have_no_noise() -> None:
    def status(before: tuple[float, ...], after: tuple[float, ...]) -> int:
        row = Row("plan", "bytes ÷ bound", "ours", "×", before, paired=True)
        a = replace(results(1), rows=(row,))
        return show(compare(a, replace(a, rows=(replace(row, samples=after),))))

    assert status((1.0, 1.0), (1.0, 1.0)) == status((1.0, 1.5), (1.0, 1.0)) == status((0.0,), (0.0,)) == 0
    assert status((1.0, 1.0), (1.0, 1.01)) == status((0.0,), (1.0,)) == 1


def test_paired_samples_are_compared_request_by_request() -> None:
    times = tuple(float(10**k) for k in range(-3, 4))
    a = Row("plan", "cold", "ours", "ms", times, paired=True)
    b = replace(a, samples=tuple(1.25 * t for t in times))
    assert interval(a, b) == pytest.approx((1.25, 1.25, 1.25))
    _, low, high = interval(replace(a, paired=False), b)
    assert low < 0.1 and high > 10


def test_files_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(results(2), machine={**ABOUT, "cores": 64, "torch": "2.11.0"}, scale="full")
    for name, one in {"a": results(1), "slow": changed(results(2), 2.0), "other": other}.items():
        (tmp_path / f"{name}.json").write_text(one.to_json())
    a, slow, cut = str(tmp_path / "a.json"), str(tmp_path / "slow.json"), tmp_path / "cut.json"
    assert main(["compare", a, a]) == 0 and main(["compare", a, slow]) == 1
    assert main(["compare", a, slow, "--threshold", "1.5"]) == 0
    capsys.readouterr()
    main(["compare", a, str(tmp_path / "other.json")])
    output = capsys.readouterr().out
    for line in (
        "amd-epyc-2-cores in A, amd-epyc-64-cores in B",
        "torch: 2.13.0 in A, 2.11.0 in B",
        "scale: quick in A",
    ):
        assert line in output
    cut.write_text(Path(a).read_text()[:500])
    assert main(["compare", a, str(cut)]) == 2 and capsys.readouterr().err.startswith("error: B: ")
    for threshold in ("nan", "-0.1", "inf"):
        assert main(["compare", a, a, f"--threshold={threshold}"]) == 2
    with pytest.raises(ArgumentError, match="--threshold: .*; allowed: a finite number from 0 on"):
        compare(results(1), results(2), float("nan"))
