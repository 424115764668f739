"""`make soak`, in short: every tenth result is verified, and what it watches can fail."""

from __future__ import annotations

import pytest

from shardweave.bench.harness.ranks import RanksFailed
from shardweave.bench.reliability import soak_calls
from shardweave.bench.reliability.soak import Report, soak


@pytest.mark.multi
def test_random_calls_are_right_and_memory_is_flat(capsys: pytest.CaptureFixture) -> None:
    report = soak(60.0, 160, 30, verify_every=10)
    assert [message["done"] for message in report.samples[-1]] == [[160, 30]] * 4
    assert all(redistributions >= 8 and dispatches == 3 for redistributions, dispatches in
               (message["verified"] for message in report.samples[-1]))  # fmt: skip
    report.print((1600, 300))
    text = capsys.readouterr().out
    assert "160 redistributions and 30 dispatches" in text and "at this rate 1600 and 300 take" in text


@pytest.mark.long
@pytest.mark.multi
def test_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_calls, "wanted", lambda request, seed: soak_calls.whole_of(request, seed) + 1)
    with pytest.raises(RanksFailed):
        soak(60.0, 50, 1, verify_every=1, transports=("shared_memory",))


@pytest.mark.plan
def test_growth_in_the_second_half_is_a_fault() -> None:
    flat = {
        "RSS, MiB": 200.0,
        "shared memory, MiB": 1.0,
        "descriptors": 40.0,
        "mappings": 400.0,
        "/dev/shm, names": 0.0,
    }

    def faults(**changed: float) -> list[str]:
        report = Report()
        for number in range(4):
            grown = {name: flat[name] + number * value for name, value in changed.items()}
            report.samples.append([flat, {**flat, **grown}])
        return report.faults()

    assert faults() == faults(descriptors=1.0) == []
    for name, amount in (("RSS, MiB", 20.0), ("descriptors", 5.0), ("/dev/shm, names", 1.0), ("mappings", 50.0)):
        assert len(faults(**{name: amount})) == 1 and faults(**{name: amount})[0].startswith(f"{name} grew")
