"""Counters of redistributions: what is counted is described when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardweave.runtime import statistics
from shardweave.runtime.statistics import Statistics, Summary

pytestmark = pytest.mark.plan


def described(text: str, told: list[str]) -> Callable[[], Summary]:
    def summary() -> Summary:
        told.append(text)
        return text, len(text), None

    return summary


def test_what_is_counted_is_described_once_and_when_it_is_read() -> None:
    stats, told = Statistics(), list[str]()
    called, idle = (stats.kind(n, "here", described(f"request {n}", told)) for n in range(2))
    assert stats.kind(0, "here", described("another", told)) is called is not idle
    called.calls += 1
    assert told == []
    for _ in range(2):
        (((text, transport), kind),) = stats.redistributions.items()
        assert (text, transport, kind.calls, kind.bytes_received) == ("request 0", "here", 1, 9) and kind is called
    assert told == ["request 0"]
    stats.reset()
    assert not stats.redistributions
    called.calls += 2
    assert stats.redistributions == {("request 0", "here"): called} and told == ["request 0"]


def test_requests_that_read_alike_are_counted_together() -> None:
    stats, told = Statistics(), list[str]()
    kinds = [stats.kind(n, transport, described("alike", told)) for n, transport in enumerate(["a", "a", "b", "a"])]
    for n, kind in enumerate(kinds, 1):
        kind.calls, kind.milliseconds = n, n / 2
    found = stats.redistributions
    assert {key: (kind.calls, kind.milliseconds) for key, kind in found.items()} == {
        ("alike", "a"): (7, 3.5),
        ("alike", "b"): (3, 1.5),
    }
    assert [kind.calls for kind in kinds] == [1, 2, 3, 4]
    assert list(found) == [("alike", "a"), ("alike", "b")]  # what took longest first


def test_of_very_many_redistributions_the_last_share_their_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_MOST_KINDS", 3)
    stats, told = Statistics(), list[str]()
    for n in (*range(6), 1, 4):
        stats.kind(n, "here", described(f"request {n}", told)).calls += 1
    counts = {text: kind.calls for (text, _), kind in stats.redistributions.items()}
    assert counts == {"request 0": 1, "request 1": 2, "request 2": 1, "others": 4}
    assert sorted(told) == ["request 0", "request 1", "request 2"]
