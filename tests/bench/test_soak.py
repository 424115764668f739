"""`make soak`, in short, and that what it watches can fail."""

from __future__ import annotations

import pytest

from shardweave.bench.harness.ranks import RanksFailed
from shardweave.bench.reliability import fault_stages
from shardweave.bench.reliability.soak import faults, soak


@pytest.mark.multi
def test_all_rounds_are_run() -> None:
    samples = soak(60.0, 22)
    assert [message["rounds"] for message in samples[-1]] == [22] * 4


@pytest.mark.multi
def test_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fault_stages._check
    monkeypatch.setattr(fault_stages, "_check", lambda got, want, stage: right(got, want + (stage == "batch"), stage))
    with pytest.raises(RanksFailed):
        soak(60.0, 2)


@pytest.mark.plan
def test_growth_in_the_second_half_is_a_fault() -> None:
    flat = {
        "RSS, MiB": 200.0,
        "shared memory, MiB": 1.0,
        "descriptors": 40.0,
        "mappings": 400.0,
        "/dev/shm, names": 0.0,
    }

    def found(**changed: float) -> list[str]:
        samples = []
        for number in range(4):
            samples.append([flat, {**flat, **{name: flat[name] + number * by for name, by in changed.items()}}])
        return faults(samples)

    assert found() == found(descriptors=1.0) == []
    for name, amount in (("RSS, MiB", 20.0), ("descriptors", 5.0), ("/dev/shm, names", 1.0), ("mappings", 50.0)):
        assert len(found(**{name: amount})) == 1 and found(**{name: amount})[0].startswith(f"{name} grew")
