"""The doctor tells the truth: about this machine, and about ones that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardweave.bench import doctor, self_test
from shardweave.errors import ArgumentError
from shardweave.runtime import segments

SHM = segments.NAMED_FOLDER
Usage = namedtuple("Usage", "total used free")


def told(path: Path, **environment: str) -> tuple[int, dict[str, dict]]:
    command = [sys.executable, "-m", "shardweave", "doctor", "--json", str(path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWEAVE_")}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120)
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, {finding["what"]: finding for finding in json.loads(path.read_text())}


@pytest.mark.multi
def test_this_machine(tmp_path: Path) -> None:
    status, found = told(tmp_path / "found.json")
    off = {what: finding["off"] for what, finding in found.items() if finding["off"]}
    assert status == (1 if off else 0)
    assert found["torch"]["found"] == torch.__version__
    for world in ("shared_memory", "collective"):
        assert found[f"two ranks on {world}"]["found"].startswith("right")
    assert found["CPU ranks of this machine"]["found"].startswith("shared_memory")
    if not torch.cuda.is_available():
        assert found["GPUs"]["found"].startswith("none") and "GPU ranks" not in found


@pytest.mark.multi
def test_settings_that_are_wrong(tmp_path: Path) -> None:
    status, found = told(tmp_path / "found.json", SHARDWEAVE_TIMEOUT="soon", SHARDWEAVE_WORLD="pigeons")
    assert status == 1
    assert "a number of seconds above 0" in found["SHARDWEAVE_TIMEOUT"]["off"]
    assert found["SHARDWEAVE_WORLD"]["off"].startswith("allowed: shared_memory, collective")


@pytest.mark.plan
@pytest.mark.parametrize(("kind", "free", "is_off"), [("named", 64 << 20, True), ("named", 8 << 30, False)])
def test_room_for_named_segments(monkeypatch: pytest.MonkeyPatch, kind: str, free: int, is_off: bool) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", kind)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free, 0, free))
    (room,) = [finding for finding in doctor.memory() if finding.what == SHM]
    assert bool(room.off) == is_off
    assert not is_off or "--shm-size" in room.off


@pytest.mark.plan
def test_anonymous_segments_need_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", "anonymous")
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 16, 0, 1 << 16))
    (room,) = [finding for finding in doctor.memory() if finding.what == SHM]
    assert room.off is None and "not used" in room.found


@pytest.mark.plan
def test_a_machine_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert self_test.self_test() == [("two ranks", 0.0, "no gloo to start them with")]
    found = {finding.what: finding for finding in doctor.worlds()}
    assert "gloo is needed" in found["gloo"].off
    assert found["CPU ranks of this machine"].found == "nowhere: no gloo"


@pytest.mark.plan
def test_versions_that_were_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", {"torch": "2.9.1+cu128", "triton": "3.7.1"}.__getitem__)
    torchs, triton = (f for f in doctor.software() if f.what in ("torch", "triton"))
    assert torchs.off == "not tested; versions 2.11 to 2.13 are" and triton.off is None


@pytest.mark.plan
def test_a_machine_whose_stores_are_not_seen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    memory = {finding.what: finding for finding in doctor.memory()}
    assert "x86-64" in memory["shared memory"].found and memory["shared memory"].off
    found = {finding.what: finding.found for finding in doctor.worlds()}
    assert found["CPU ranks of this machine"].startswith("collective on gloo: the barrier needs")


@pytest.mark.multi
def test_a_world_that_does_not_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", "named")
    monkeypatch.setattr(segments, "NAMED_FOLDER", str(tmp_path / "missing"))
    outcomes = {name: error for name, _, error in self_test.self_test()}
    assert "missing" in outcomes["two ranks on shared_memory"]
    assert outcomes["two ranks on collective"] is None


@pytest.mark.plan
def test_json_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("software", "python", "3")])
    with pytest.raises(ArgumentError, match="--json: .* cannot be written"):
        doctor.run(tmp_path / "no" / "file.json")
    assert doctor.run(tmp_path / "file.json") == 0
