"""The measurement of what zeroed rows cost, with a few tokens: it runs, and says what it measured."""

from __future__ import annotations

import re
import sys

import pytest

from shardweave.bench.suites import token_zeroing


@pytest.mark.long
@pytest.mark.multi
def test_a_row_for_each_transport_and_capacity(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["token_zeroing", "--ranks", "2", "--tokens", "8", "--hidden", "16"])
    token_zeroing.main()
    said = capfd.readouterr().out
    number = r"[\d.]+ \([\d.]+ ms\)"
    rows = re.findall(rf"^\| (\w+) \| (.+) \| {number} \| {number} \|$", said, re.M)
    sizes = ["1.25", "1.5", "2.0", "worst case (2.0)"]
    assert rows == [(transport, size) for transport in ("shared_memory", "process_group") for size in sizes]
