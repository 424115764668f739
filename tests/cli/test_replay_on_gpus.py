"""`replay` with ranks on GPUs. Nothing here imports the command, which needs an extra, before a test has begun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from warm_python import run_python

from shardweave.planner import Mesh
from shardweave.runtime.tracing.trace_file import Cost, Entry, Trace


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_replay_on_gpus(tmp_path: Path, transport: str) -> None:
    """Processes that share a GPU use symmetric memory; with NCCL each has its own."""
    pytest.importorskip("rich", reason="rich is not installed; it comes with shardweave[cli]")
    gpus = torch.cuda.device_count()
    if gpus < (1 if transport == "symmetric_memory" else 2):
        pytest.skip(f"{gpus} GPUs")
    pair, trace, out = Mesh((2,)), tmp_path / "trace.json", tmp_path / "out.json"
    found = {
        Entry(pair, None, (64, 48), "bfloat16", "S0", "S1", "a.py:1 f"): Cost(1, 64),
        Entry(pair, None, (640,), "float32", "P", "S0", "FSDP reduces x", fsdp=True): Cost(1, 1),
    }
    trace.write_text(Trace("2.13.0", 2, (0,), found).to_json())
    command = [sys.executable, "-m", "shardweave", "replay", trace, "--device", "cuda"]
    done = run_python([*command, "--transport", transport, "--json", out], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for one in json.loads(out.read_text())["redistributions"]:
        assert not one["faults"] and one["shardweave_s"] > 0
        assert transport == "symmetric_memory" or one["torch_s"] > 0
