"""Scripts recorded unchanged, and traces carried out again by both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.bench import replay
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh
from shardweave.runtime.trace import Cost, Entry, Trace

GRID, PAIR = Mesh((2, 2), ("dp", "tp")), Mesh((2,), ranks=[3, 1])
ENTRIES = {
    Entry(GRID, None, (8, 130), "float32", "S0 S1", "S1 S0", "a.py:1 f"): Cost(3, 100),
    Entry(GRID, None, (8, 130), "float32", "S0 S1", "S1 S0", "a.py:9 g, backward"): Cost(2, 100),
    Entry(GRID, None, (5,), "int8", "P S0", "S0 S0", "a.py:2 f"): Cost(1, 10),
    Entry(GRID, None, (7, 3), "bfloat16", "Pavg P", "R R", "a.py:3 f"): Cost(1, 9),
    Entry(GRID, None, (6, 4), "bool", "S0 S0 @ 0:1,0", "R S1", "a.py:4 f"): Cost(1, 8),
    Entry(GRID, None, (12, 4), "float16", "S0/3 R", "S1 S0", "a.py:5 f"): Cost(1, 7),
    Entry(PAIR, None, (9, 2), "float64", "S0", "R", "a.py:6 f"): Cost(1, 6),
    Entry(GRID, PAIR, (9, 2), "float64", "S0 S0", "S1", "a.py:7 f"): Cost(1, 5),
    Entry(GRID, None, (4, 4), "float32", "R R", "P R", "a.py:8 f", traced=True): Cost(1, 0),
}


def command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "shardweave", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.multi
@pytest.mark.long
def test_replay_of_every_kind(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out.json"
    trace.write_text(Trace("2.13.0", 4, (0,), ENTRIES, {"symbolic shapes": 2}).to_json())
    done = command("replay", trace, "--scaled", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    found = {(one["source"], one["target"]): one for one in report["redistributions"]}
    assert len(found) == len(ENTRIES) - 1, "one was asked for in two places"
    both = found["S0 S1", "S1 S0"]
    assert both["calls"] == 5 and both["where"] == ["a.py:1 f", "a.py:9 g, backward"]
    for one in found.values():
        assert not one["faults"] and one["shardweave_s"] > 0
        refused = any("torch refuses" in note for note in one["notes"])
        assert (one["torch_s"] is None) == refused
    assert found["S0 S0", "S1"]["notes"] == ["torch refuses: another mesh"]
    # torch cannot read this strided shard: it says something else than an order.
    assert any("torch is wrong" in note or "torch refuses" in note for note in found["S0/3 R", "S1 S0"]["notes"])
    assert "a.py:1 f" in done.stdout and "2 calls: symbolic shapes" in done.stdout


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[1])
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
x.redistribute(placements=[Shard(1)])
dist.destroy_process_group()
sys.exit(3)
"""


@pytest.mark.multi
def test_a_script_is_recorded_unchanged(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    done = command("record", "-o", trace, script, tmp_path / "store")
    assert done.returncode == 3, "the script's own status: " + done.stderr
    ((entry, cost),) = Trace.read(trace).found.items()
    assert (entry.source, entry.target, entry.where, cost.calls) == ("S0", "S1", "script.py:9 <module>", 1)
    assert command("replay", trace).returncode == 0


@pytest.mark.plan
def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(Trace("2.13.0", 64, (0,), ENTRIES).to_json())
    with pytest.raises(ArgumentError, match="64 ranks; allowed: up to 16"):
        replay.run([trace], None, False, "", 64, None)
    with pytest.raises(ArgumentError, match="none with 'nowhere'"):
        replay.run([trace], None, False, "nowhere", 64, None)
    trace.write_text(Trace("2.13.0", 4, (0,), ENTRIES).to_json())
    with pytest.raises(ArgumentError, match="--json: .* cannot be written"):
        replay.run([trace], None, False, "", 64, tmp_path / "no" / "file.json")


@pytest.mark.plan
def test_a_script_that_is_not_there(capfd: pytest.CaptureFixture) -> None:
    from shardweave.__main__ import main

    assert main(["record", "missing.py"]) == 2
    assert "script: 'missing.py' is no file" in capfd.readouterr().err
    assert not os.path.exists("trace.json")
