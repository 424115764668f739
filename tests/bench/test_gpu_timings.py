"""The timings of `make gpu` without a GPU: every call runs on tiny shapes, and has no figure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from warm_python import run_python

from shardweave.bench.gpu import timings

pytestmark = pytest.mark.plan


@pytest.mark.interp
@pytest.mark.long
def test_dry_run_makes_every_call(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardweave.bench.gpu.timings", "--dry", "--out", str(tmp_path)]
    ran = run_python(command, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    _, *rows = map(json.loads, (tmp_path / "timings.jsonl").read_text().splitlines())
    assert [row["case"] for row in rows] == [name for name, _ in timings.cases(torch.device("cpu"), True)]
    assert all(row["bytes"] > 0 and "copy" not in row for row in rows)


def test_calls_that_are_wrong_or_fail_are_not_timed() -> None:
    def fails() -> timings.Made:
        raise RuntimeError("out of memory")

    for make, why in ((lambda: (lambda: None, lambda: False, 1), "the result is wrong"), (fails, "out of memory")):
        row = timings.measured(make, torch.device("cpu"), False)
        assert row["failed"] and why in row["why"]


def test_without_gpu_the_status_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert timings.main(["--out", str(tmp_path)]) == 2
    assert "error: no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
