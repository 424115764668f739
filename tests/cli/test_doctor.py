"""The doctor tells the truth: about this machine, and about ones that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardweave import stats
from shardweave.bench.harness.ranks import Ranks, Send
from shardweave.cli import doctor, self_test
from shardweave.errors import UnsupportedError
from shardweave.runtime.transports import select
from shardweave.runtime.transports.select import NAMES, current_transports
from shardweave.runtime.transports.shared_memory import segments

SHM = segments.NAMED_FOLDER
Usage = namedtuple("Usage", "total used free")


def told(path: Path, before: tuple[str, ...] = (), **environment: str) -> tuple[int, dict[str, dict]]:
    """The command's status and findings, in a process of its own that `before` starts. Whatever is off, the command
    says what is, and what to do, and does not fail."""
    command = [*before, sys.executable, "-m", "shardweave", "doctor", "--json", str(path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWEAVE_")}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120)
    assert path.exists() and "Traceback" not in done.stderr, done.stdout + done.stderr
    findings = json.loads(path.read_text())
    off = [finding for finding in findings if finding["off"]]
    assert done.returncode == int(bool(off)), done.stdout + done.stderr
    shown = "".join(done.stdout.split())
    assert all("".join(finding["off"].split()) in shown for finding in off), done.stdout
    return done.returncode, {finding["what"]: finding for finding in findings}


def on(monkeypatch: pytest.MonkeyPatch, transport: str | None = None, node_size: int | None = None) -> None:
    for name, value in (("SHARDWEAVE_TRANSPORT", transport), ("SHARDWEAVE_NODE_SIZE", node_size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))


@pytest.mark.multi
def test_this_machine(tmp_path: Path) -> None:
    _, found = told(tmp_path / "found.json")
    assert found["torch"]["found"] == torch.__version__
    for transport in NAMES:
        assert found[f"two ranks on {transport}"]["found"].startswith("right")
    assert found["4 CPU ranks of this machine"]["found"] == "shared_memory: all ranks are on this machine"
    if not torch.cuda.is_available():
        assert found["GPUs"]["found"].startswith("none") and "4 GPU ranks of this machine" not in found
        for what in ("peer access", "NCCL", "symmetric memory"):
            assert found[what]["found"] == "none: no GPU" and not found[what]["off"]
    assert found["gloo"]["found"] == "in this torch" and not found["gloo"]["off"]


@pytest.mark.multi
def test_settings_that_are_wrong(tmp_path: Path) -> None:
    status, found = told(tmp_path / "found.json", SHARDWEAVE_TIMEOUT="soon", SHARDWEAVE_TRANSPORT="pigeons")
    assert status == 1
    assert "a number of seconds above 0" in found["SHARDWEAVE_TIMEOUT"]["off"]
    assert "'pigeons' is not known; allowed: shared_memory, process_group" in found["SHARDWEAVE_TRANSPORT"]["off"]
    assert found["4 CPU ranks of this machine"]["off"] and "SHARDWEAVE_TIMEOUT" in found["two ranks"]["off"]


@pytest.mark.plan
@pytest.mark.parametrize(
    ("kind", "free", "is_off"),
    [("named", 64 << 20, True), ("named", 8 << 30, False), ("anonymous", 1 << 16, False)],
)
def test_room_for_segments(monkeypatch: pytest.MonkeyPatch, kind: str, free: int, is_off: bool) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", kind)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free, 0, free))
    (room,) = [finding for finding in doctor.memory() if finding.what == SHM]
    assert bool(room.off) == is_off and ("not used" in room.found) == (kind == "anonymous")


@pytest.mark.plan
def test_a_machine_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert self_test.self_test() == [("two ranks", 0.0, "no gloo to start them with")]
    found = {finding.what: finding for finding in doctor.transports()}
    assert "gloo is needed" in found["gloo"].off
    assert found["4 CPU ranks of this machine"].found == "nowhere: no gloo"


@pytest.mark.plan
def test_versions_that_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do is a command, quoted so that a shell takes it as it is."""
    for torchs, triton in (("2.9.1+cu128", "3.7.1"), ("2.13.0+cpu", "3.9.0"), ("2.14.0", "3.8.0"), ("2.11.0", "3.6.0")):
        found = {"torch": SimpleNamespace(__version__=torchs), "triton": SimpleNamespace(__version__=triton)}
        monkeypatch.setattr(doctor, "import_module", found.__getitem__)
        off = {f.what: f.off for f in doctor.software() if f.what in ("torch", "triton")}
        fits = {"torch": torchs[:4] in ("2.11", "2.13"), "triton": triton in ("3.7.1", "3.6.0")}
        said = {"torch": 'pip install "torch>=2.11,<2.14"', "triton": 'pip install "triton>=3.6,<3.8"'}
        assert off == {what: None if fits[what] else f"not supported: {said[what]}" for what in off}


@pytest.mark.plan
def test_the_doctor_supports_what_pyproject_requires() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    (required,) = [line for line in lines if line.startswith("dependencies = ")]
    for name in doctor.SUPPORTED:
        assert f'"{doctor.requirement(name)}"' in required, required


@pytest.mark.multi
def test_a_transport_that_does_not_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", "named")
    monkeypatch.setattr(segments, "NAMED_FOLDER", str(tmp_path / "missing"))
    outcomes = self_test.self_test()
    errors = {name: error for name, _, error in outcomes}
    assert "missing" in errors["two ranks on shared_memory"] and errors["two ranks on process_group"] is None
    findings = {finding.what: finding for finding in doctor._tested(outcomes)}
    assert "What to do: have ranks meet elsewhere: SHARDWEAVE_TRANSPORT=" in findings["two ranks on shared_memory"].off


def sleeps(rank: int, size: int, config: dict, send: object) -> None:
    time.sleep(60)


@pytest.mark.multi
def test_transports_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_rank", sleeps)
    monkeypatch.setattr(self_test, "_TIMEOUT", 1.0)
    monkeypatch.setattr(self_test, "_ALL", 1.5)
    errors = [error for _, _, error in self_test.self_test()]
    assert errors[0] == "not done within 1 s" and errors[-1] == "not tried: the others took 2 s"
    assert all(finding.off and "mend what else is off" in finding.off for finding in doctor._tested(
        [("two ranks on hierarchical", 1.0, error) for error in errors]
    ))  # fmt: skip


SMALL_SHM = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTED = f'mount -t tmpfs -o size=16k tmpfs {SHM} && exec "$@"'


@pytest.mark.multi
def test_the_command_with_hardly_any_shared_memory(tmp_path: Path) -> None:
    """A tmpfs of 16 KiB: a container's default is small as well."""
    before = (*SMALL_SHM, MOUNTED, "sh")
    try:
        tried = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if tried.returncode:
        pytest.skip(f"nothing may be mounted here: {tried.stderr.strip()}")
    status, found = told(tmp_path / "found.json", before=before, SHARDWEAVE_SEGMENTS="named")
    assert status == 1
    assert found[SHM]["found"].endswith("free of 16 KiB") and "--shm-size" in found[SHM]["off"]
    said = found["two ranks on shared_memory"]["off"]
    assert "No space left" in said and "raise " not in said
    assert "What to do: have ranks meet elsewhere: SHARDWEAVE_TRANSPORT=process_group" in said
    assert found["two ranks on process_group"]["off"] is None


@pytest.mark.plan
def test_a_transport_asked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = "4 CPU ranks of this machine", "8 CPU ranks on 2 machines, 4 on each"

    def found(transport: str | None, node_size: int | None = None) -> dict[str, doctor.Finding]:
        on(monkeypatch, transport, node_size)
        return {finding.what: finding for finding in doctor.transports()}

    assert found(None)[there].found == "hierarchical, gloo between machines: 8 ranks are on 2 machines"
    assert found("shared_memory")[here].found == "shared_memory: asked for"
    refused = found("shared_memory")[there]
    assert "rank 4 is on another machine; allowed: hierarchical" in refused.found and refused.off is None
    assert found("symmetric_memory")[here].found == "symmetric_memory: asked for"
    assert found("symmetric_memory")[there].found == "hierarchical symmetric_memory, gloo between machines: asked for"
    assert (
        found(None, 1)[here].found
        == "process_group on gloo: each rank is on another machine, by SHARDWEAVE_NODE_SIZE=1"
    )
    refused = found("shared_memory", 1)[here]
    assert refused.found.startswith("refused: ") and "unset it" in (refused.off or "")
    with_four = found(None, 4)["8 CPU ranks of this machine"].found
    assert with_four == "hierarchical, gloo between machines: 8 ranks are on 2 machines, by SHARDWEAVE_NODE_SIZE=4"


@pytest.mark.plan
def test_ranks_of_gpus_are_told_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(select, "why_no_symmetric_memory", lambda device: None)
    for asked, one, two in (
        (None, "process_group on nccl: tensors are on cuda", "process_group on nccl: tensors are on cuda"),
        (
            "symmetric_memory",
            "symmetric_memory: asked for",
            "hierarchical symmetric_memory, nccl between machines: asked for",
        ),
        ("shared_memory", "refused: transport: shared_memory", "refused: transport: shared_memory"),
    ):
        on(monkeypatch, asked)
        found = {finding.what: finding.found for finding in doctor.transports()}
        assert found["4 GPU ranks of this machine"].startswith(one)
        assert found["8 GPU ranks on 2 machines, 4 on each"].startswith(two)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    on(monkeypatch)
    found = {finding.what: finding.found for finding in doctor.transports()}
    assert found["4 GPU ranks of this machine"] == "nowhere: no nccl"


def choose_each(rank: int, size: int, config: dict, send: Send) -> None:
    """What ranks themselves find, of every name."""
    ranks = tuple(range(size))
    for asked in (None, *NAMES):
        try:
            current_transports().choose(ranks, torch.device("cpu"), asked)
            send({"asked": asked, "found": stats().transports[ranks]})
        except UnsupportedError as error:
            send({"asked": asked, "found": f"refused: {error}"})


@pytest.mark.multi
@pytest.mark.parametrize("node_size", [None, 1, 2, 3, 4])
def test_the_doctor_says_what_ranks_find(monkeypatch: pytest.MonkeyPatch, node_size: int | None) -> None:
    on(monkeypatch, None, node_size)
    found: list[dict] = []
    with Ranks(choose_each, 4, {}, 30.0) as ranks:
        ranks.supervise(lambda rank, message: found.append(message) if rank == 0 else None, lambda rank, line: None)
    assert [one["asked"] for one in found] == [None, *NAMES]
    for one in found:
        told, _ = doctor.meeting(range(4), 4, one["asked"], node_size, torch.device("cpu"), "gloo", True)
        plain = told.replace(" on gloo: ", ": ").replace(", gloo between machines: ", ": ")
        assert plain == one["found"], (one["asked"], node_size)
