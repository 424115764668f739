"""Counters of redistributions: what is counted is described when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from shardweave.runtime import statistics
from shardweave.runtime.statistics import Statistics, Summary

pytestmark = pytest.mark.plan


def summary_of(text: str, summaries_read: list[str]) -> Callable[[], Summary]:
    def summary() -> Summary:
        summaries_read.append(text)
        return text, len(text), None

    return summary


def test_requests_of_the_same_text_share_an_entry() -> None:
    stats, summaries_read = Statistics(), list[str]()
    kinds = [
        stats.kind(n, transport, summary_of("alike", summaries_read))
        for n, transport in enumerate(["a", "a", "b", "a"])
    ]
    for n, kind in enumerate(kinds, 1):
        kind.calls, kind.milliseconds = n, n / 2
    entries = stats.redistributions
    assert {key: (kind.calls, kind.milliseconds) for key, kind in entries.items()} == {
        ("alike", "a"): (7, 3.5),
        ("alike", "b"): (3, 1.5),
    }
    assert [kind.calls for kind in kinds] == [1, 2, 3, 4]
    assert list(entries) == [("alike", "a"), ("alike", "b")]  # the most time first


def test_redistributions_beyond_the_limit_share_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_MAX_KINDS", 3)
    stats, summaries_read = Statistics(), list[str]()
    for n in (*range(6), 1, 4):
        stats.kind(n, "here", summary_of(f"request {n}", summaries_read)).calls += 1
    counts = {text: kind.calls for (text, _), kind in stats.redistributions.items()}
    assert counts == {"request 0": 1, "request 1": 2, "request 2": 1, "others": 4}
    assert sorted(summaries_read) == ["request 0", "request 1", "request 2"]


def test_tables() -> None:
    stats = Statistics()
    assert str(stats) == "no calls" == stats._repr_html_()
    for name, calls in (("S0 → R   float32[4096] on 2", 3), ("token dispatch, 8 experts, hidden 64", 12)):
        kind = stats.kind(
            name, "shared_memory", lambda name=name: (name, 0, None) if "token" in name else (name, 8192, 0)
        )  # type: ignore[misc]
        kind.calls, kind.milliseconds = calls, 10.0 / calls
    stats.calls["shared_memory"] = 15
    stats.delegations.update({"a <reason>": 1, "a mesh that install(only=) leaves out": 20, "none": 0})
    stats.transports[0, 1] = "shared_memory: all ranks are on this machine"
    assert str(stats).splitlines() == [
        "calls     ms  bytes per call  least  transport      request",
        "    3  3.333           8 KiB    0 B  shared_memory  S0 → R   float32[4096] on 2",
        "   12  0.833               -      -  shared_memory  token dispatch, 8 experts, hidden 64",
        "",
        "calls  transport",
        "   15  shared_memory",
        "",
        "count  left to torch",
        "   20  a mesh that install(only=) leaves out",
        "    1  a <reason>",
        "",
        "ranks  transport and why",
        "0, 1   shared_memory: all ranks are on this machine",
    ]
    tables = ElementTree.fromstring(f"<div>{stats._repr_html_()}</div>").findall("table")
    cells = [[[cell.text for cell in row] for row in table.iter("tr")] for table in tables]
    assert [len(rows) for rows in cells] == [3, 2, 3, 2]
    assert cells[2] == [
        ["count", "left to torch"], ["20", "a mesh that install(only=) leaves out"], ["1", "a <reason>"],
    ]  # fmt: skip
    stats.reset()
    assert str(stats) == "ranks  transport and why\n0, 1   shared_memory: all ranks are on this machine"
