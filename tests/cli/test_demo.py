"""The command line: plans, the demo on real ranks, and what happens when one of them is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dead_segments import segments_of_the_dead
from warm_python import run_python

import shardweave
from shardweave.__main__ import main

TERMINAL = {"TERM": "xterm", "NO_COLOR": "1"}
IN_A_TERMINAL = """
import sys

sys.stdout.isatty = lambda: True
from shardweave.__main__ import main

sys.exit(main(sys.argv[1:]))
"""
SHARDWEAVE = [sys.executable, "-m", "shardweave"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([*SHARDWEAVE, *arguments], timeout=300)


@pytest.mark.plan
def test_invalid_layout_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mesh", "2,2", "--shape", "8,6", "S0 S1", "S1 Q"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and "^" in error


@pytest.mark.plan
def test_plan_on_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ("plan", "--mesh", "4,8", "--shape", "8192,8192", "--dtype", "bfloat16", "S0 S0", "R R")
    assert main([*request, "--topology", "nvlink-infiniband"]) == 0
    printed = capsys.readouterr().out
    assert "over the network" in printed and "not (S0 S0) → (R R)" in printed
    file = tmp_path / "two_ranks_a_node.json"
    file.write_text(json.dumps({**shardweave.NVLINK_INFINIBAND.to_dict(), "name": "mine", "node_size": 2}))
    assert main([*request, "--topology", str(file)]) == 0 and "on mine" in capsys.readouterr().out
    for options, text in ((("--topology", "none.json"), "cannot be read"), (("--max-bytes", "5"), "max_bytes: 5")):
        assert main([*request, *options]) == 2 and text in capsys.readouterr().err


@pytest.mark.plan
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--only", "nonsense"), "--only: 'nonsense' is not a part of any case's name"),
        (("--only", "llama/wk gather", "--ranks", "2"), "nothing moves on a 1×2 mesh, which is what --ranks 2 makes"),
        (("--ranks", "1"), "--ranks: 1: nothing moves on a 1×1 mesh, .* allowed: 2 ranks and more"),
        (("--json", "/no/where.json"), "cannot be written"),
    ],
)
def test_invalid_option_exits_with_2(options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    out, error = capsys.readouterr()
    assert re.search(text, error) and out == "" and error.count("\n") == 1 and len(error) < 1500


@pytest.mark.multi
def test_demo_removes_named_segments() -> None:
    environment = {**os.environ, "SHARDWEAVE_SEGMENTS": "named", **TERMINAL, "COLUMNS": "80"}
    done = run_python(
        [sys.executable, "-c", IN_A_TERMINAL, "demo", "--only", "order/swap"], env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not segments_of_the_dead()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in done.stdout.splitlines()]
    # One block for each transport, and no table.
    assert sum(line.startswith("case               order/swap") for line in lines) == 2
    assert lines.count("layouts            S0 S1 → S1 S0") == 2 and "│" not in done.stdout


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.long)])
def test_demo_results_are_correct(ranks: int, tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    done = _run("demo", "--ranks", str(ranks), "--only", "llama/wq", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("│ S0 S0 → R S0 │") == 2  # a table
    found = json.loads(report.read_text())
    assert found["command"].startswith("python -m shardweave demo --ranks") and found["machine"]["cpu"] in done.stdout
    assert f"`{found['command']}`, {found['date']}.\n" in done.stdout
    for case in found["cases"] + found["process_group_cases"]:
        assert case["equal"]
        partial = "P" in case["source"] + case["target"]
        assert case["bytes_bound"] == (None if partial else case["bytes_received"])
        assert case["torch_ms"] > 0 and case["shardweave_ms"] > 0
    assert len(found["cases"]) == len(found["process_group_cases"]) == 2


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.multi
@pytest.mark.parametrize("victim", [pytest.param(victim, marks=pytest.mark.long) for victim in (2, "parent", 0)])
def test_demo_reports_dead_ranks(victim: int | str) -> None:
    demo = subprocess.Popen(
        [*SHARDWEAVE, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SHARDWEAVE_TIMEOUT": "30"},
    )
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while len(ranks) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
            ranks = _children(demo.pid)
        time.sleep(2)  # during the first cases on most machines; any moment is valid
        os.kill(demo.pid if victim == "parent" else ranks[int(victim)], signal.SIGKILL)
        output, _ = demo.communicate(timeout=30)
        while any(map(_is_running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_is_running, ranks))
        assert not segments_of_the_dead()
        if victim != "parent":
            assert demo.returncode == 1
            assert f"rank {victim} (pid {ranks[int(victim)]}) was killed by SIGKILL" in output
    finally:
        for pid in [demo.pid, *ranks]:
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        demo.wait()
