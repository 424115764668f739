"""`make faults`, in short: a fault of each kind, on each transport, in set-up, redistribution, batch and dispatch."""

from __future__ import annotations

import pytest

from shardweave.bench.reliability import faults
from shardweave.bench.reliability.faults import Case, Outcome, all_cases, print_table, run_cases

SHORT = {
    "redistribution, inside meeting 2, kill, shared_memory, named",
    "dispatch, after meeting 1, raise, hierarchical",
    "batch, before meeting 1, exit, process_group",
    "token backward, inside meeting 2, stop, shared_memory",
    "set-up, before meeting 1, kill, process_group",
}


@pytest.mark.multi
def test_faults_end_the_calls_of_other_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(faults, "TIMEOUT", 1.5)
    monkeypatch.setattr(faults, "SLACK", 20.0)  # the machine may be busy
    cases = [case for case in all_cases() if str(case) in SHORT]
    assert len(cases) == len(SHORT)
    outcomes: dict[Case, Outcome] = {}
    run_cases(cases, 120.0, outcomes.__setitem__)
    assert {str(case): outcome.faults() for case, outcome in outcomes.items()} == dict.fromkeys(SHORT, [])
    print_table(outcomes, 1.0)
    text = capsys.readouterr().out
    assert "5 as promised, 0 not" in text and "timeout" in text


@pytest.mark.plan
def test_outcomes_that_break_a_promise_are_named() -> None:
    right = dict.fromkeys((0, 2, 3), ("PeerError", "rank 1 is gone"))
    good = Outcome(True, right, 0.1, [], "works")
    assert good.faults() == []
    for change, part in (
        ({"reached": False}, "not reached"),
        ({"errors": right | {2: ("", "")}}, "rank 2 raised nothing"),
        ({"errors": right | {2: ("WrongValues", "7")}}, "rank 2 raised WrongValues"),
        ({"errors": right | {2: ("PeerError", "rank 11 is gone")}}, "rank 2 does not name"),
        ({"errors": {0: right[0]}}, r"only ranks [0]"),
        ({"seconds": 100.0}, "raised after 100.0 s"),
        ({"left": ["process 5"]}, "left: process 5"),
        ({"again": "rank 3 did not answer"}, "new group: rank 3"),
    ):
        assert part in "; ".join(Outcome(**(vars(good) | change)).faults())  # type: ignore[arg-type]
