"""The doctor's findings on this machine, and on simulated machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from warm_python import run_python

from shardweave import stats
from shardweave.bench.harness.ranks import Send, messages_of
from shardweave.cli import doctor, self_test
from shardweave.errors import UnsupportedError
from shardweave.runtime import supported_versions
from shardweave.runtime.transports.choose_transport import NAMES
from shardweave.runtime.transports.select import current_transports
from shardweave.runtime.transports.shared_memory import segments

SHM = segments.NAMED_FOLDER


def run_doctor(path: Path, before: tuple[str, ...] = (), **environment: str) -> tuple[int, dict[str, dict]]:
    """Run the command in a process, behind the command `before`, and check that it prints every problem. Returns its
    exit status and its findings by name."""
    command = [sys.executable, "-m", "shardweave", "doctor", "--json", str(path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWEAVE_")} | environment
    if before:
        done = subprocess.run([*before, *command], env=env, capture_output=True, text=True, timeout=120)
    else:
        done = run_python(command, env=env, timeout=120)
    assert path.exists() and "Traceback" not in done.stderr, done.stdout + done.stderr
    findings = json.loads(path.read_text())
    problems = [finding for finding in findings if finding["problem"]]
    assert done.returncode == int(bool(problems)), done.stdout + done.stderr
    shown = "".join(done.stdout.split())
    assert all("".join(finding["problem"].split()) in shown for finding in problems), done.stdout
    return done.returncode, {finding["name"]: finding for finding in findings}


def set_environment(
    monkeypatch: pytest.MonkeyPatch, transport: str | None = None, node_size: int | None = None
) -> None:
    for name, value in (("SHARDWEAVE_TRANSPORT", transport), ("SHARDWEAVE_NODE_SIZE", node_size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))


@pytest.mark.multi
def test_findings_on_this_machine(tmp_path: Path) -> None:
    _, found = run_doctor(tmp_path / "found.json")
    assert found["torch"]["value"] == torch.__version__
    for transport in NAMES:
        assert found[f"two ranks on {transport}"]["value"].startswith("passed")
    assert found["4 CPU ranks of this machine"]["value"] == "shared_memory: all ranks are on this machine"
    if not torch.cuda.is_available():
        assert found["GPUs"]["value"].startswith("none") and "4 GPU ranks of this machine" not in found
        for name in ("peer access", "NCCL", "symmetric memory"):
            assert found[name]["value"] == "none: no GPU" and not found[name]["problem"]
    assert found["gloo"]["value"] == "in this torch" and not found["gloo"]["problem"]


@pytest.mark.multi
def test_invalid_settings(tmp_path: Path) -> None:
    status, found = run_doctor(tmp_path / "found.json", SHARDWEAVE_TIMEOUT="soon", SHARDWEAVE_TRANSPORT="pigeons")
    assert status == 1
    assert "a number of seconds above 0" in found["SHARDWEAVE_TIMEOUT"]["problem"]
    assert "'pigeons' is not known; allowed: shared_memory, process_group" in found["SHARDWEAVE_TRANSPORT"]["problem"]
    assert found["4 CPU ranks of this machine"]["problem"] and "SHARDWEAVE_TIMEOUT" in found["two ranks"]["problem"]


@pytest.mark.plan
def test_supported_versions_are_those_of_pyproject() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    (required,) = [line for line in lines if line.startswith("dependencies = ")]
    for name in supported_versions.SUPPORTED:
        assert f'"{supported_versions.requirement(name)}"' in required, required


@pytest.mark.multi
def test_broken_transport_is_reported_with_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_SEGMENTS", "named")
    monkeypatch.setattr(segments, "NAMED_FOLDER", str(tmp_path / "missing"))
    outcomes = self_test.self_test()
    errors = {name: error for name, _, error in outcomes}
    assert "missing" in errors["two ranks on shared_memory"] and errors["two ranks on process_group"] is None
    findings = {finding.name: finding for finding in doctor._self_test_findings(outcomes)}
    assert "Fix: use another transport: SHARDWEAVE_TRANSPORT=" in findings["two ranks on shared_memory"].problem


def sleeps(rank: int, size: int, config: dict, send: object) -> None:
    time.sleep(60)


@pytest.mark.multi
def test_transports_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_rank", sleeps)
    monkeypatch.setattr(self_test, "_TIMEOUT", 1.0)
    monkeypatch.setattr(self_test, "_TOTAL_TIMEOUT", 1.5)
    errors = [error for _, _, error in self_test.self_test()]
    assert errors[0] == "not done within 1 s" and errors[-1] == "not run: the other transports took 2 s"
    findings = doctor._self_test_findings([("two ranks on hierarchical", 1.0, error) for error in errors])
    assert all("fix the other problems first" in (finding.problem or "") for finding in findings)


SMALL_SHM = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTED = f'mount -t tmpfs -o size=16k tmpfs {SHM} && exec "$@"'


@pytest.mark.multi
@pytest.mark.long
def test_command_with_little_shared_memory(tmp_path: Path) -> None:
    """A tmpfs of 16 KiB: a container's default is small as well."""
    before = (*SMALL_SHM, MOUNTED, "sh")
    try:
        tried = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if tried.returncode:
        pytest.skip(f"nothing may be mounted here: {tried.stderr.strip()}")
    status, found = run_doctor(tmp_path / "found.json", before=before, SHARDWEAVE_SEGMENTS="named")
    assert status == 1
    assert found[SHM]["value"].endswith("free of 16 KiB") and "--shm-size" in found[SHM]["problem"]
    problem = found["two ranks on shared_memory"]["problem"]
    assert "No space left" in problem and "raise " not in problem
    assert "Fix: use another transport: SHARDWEAVE_TRANSPORT=process_group" in problem
    assert found["two ranks on process_group"]["problem"] is None


def choose_each(rank: int, size: int, config: dict, send: Send) -> None:
    """Send the transport that ranks choose for each requested one."""
    ranks = tuple(range(size))
    for requested in (None, *NAMES):
        try:
            current_transports().choose(ranks, torch.device("cpu"), requested)
            send({"requested": requested, "chosen": stats().transports[ranks]})
        except UnsupportedError as error:
            send({"requested": requested, "chosen": f"refused: {error}"})


@pytest.mark.multi
@pytest.mark.parametrize("node_size", [None, 1, 2, 3, 4])
def test_transports_are_those_that_ranks_choose(monkeypatch: pytest.MonkeyPatch, node_size: int | None) -> None:
    set_environment(monkeypatch, None, node_size)
    choices, *_ = messages_of(choose_each, 4, {})
    assert [choice["requested"] for choice in choices] == [None, *NAMES]
    for choice in choices:
        value, _ = doctor.chosen(range(4), 4, choice["requested"], node_size, torch.device("cpu"), "gloo", True)
        without_backend = value.replace(" on gloo: ", ": ").replace(", gloo between machines: ", ": ")
        assert without_backend == choice["chosen"], (choice["requested"], node_size)
