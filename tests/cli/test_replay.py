"""`record` with unchanged scripts, and `replay` on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks
from warm_python import run_python

import shardweave
from shardweave.bench.workloads.trace_cases import distinct
from shardweave.cli import replay
from shardweave.cli.replay import Options
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh
from shardweave.runtime.tracing.trace_file import FSDP_COLLECTIVES, Cost, Entry, Trace
from shardweave.runtime.transports.choose_transport import NAMES

GRID, PAIR = Mesh((2, 2), ("dp", "tp")), Mesh((2,), ranks=[1, 3])
ENTRIES = {
    Entry(GRID, None, (8, 130), "float32", "S0 S1", "S1 S0", "a.py:1 f"): Cost(3, 100),
    Entry(GRID, None, (8, 130), "float32", "S0 S1", "S1 S0", "a.py:9 g, backward"): Cost(2, 100),
    Entry(GRID, None, (5,), "int8", "P S0", "S0 S0", "a.py:2 f"): Cost(1, 10),
    Entry(GRID, None, (7, 3), "bfloat16", "Pavg P", "R R", "a.py:3 f"): Cost(1, 9),
    Entry(GRID, None, (6, 4), "bool", "S0 S0 @ 0:1,0", "R S1", "a.py:4 f"): Cost(1, 8),
    Entry(GRID, None, (12, 4), "float16", "S0/3 R", "S1 S0", "a.py:5 f"): Cost(1, 7),
    Entry(PAIR, None, (18,), "float64", "S0", "R", "FSDP gathers x", fsdp=True): Cost(1, 6),
    Entry(GRID, PAIR, (9, 2), "float64", "S0 S0", "S1", "a.py:7 f"): Cost(1, 5),
    Entry(GRID, None, (4, 4), "float32", "R R", "P R", "a.py:8 f", traced=True): Cost(1, 0),
    Entry(GRID, None, (4, 6), "float32", "S0 R", "P S1", "a.py:10 f"): Cost(1, 0),
}


def command(*arguments: object) -> subprocess.CompletedProcess:
    return run_python([sys.executable, "-m", "shardweave", *map(str, arguments)], timeout=300)


@pytest.mark.multi
@pytest.mark.long
def test_replay_of_every_kind_of_entry(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out.json"
    rows = [Mesh((2,), ("tp",), ranks=ranks) for ranks in ([0, 1], [2, 3])]
    alike = {Entry(mesh, None, (9, 4), "float32", "S0", "S1", "a.py:9 f"): Cost(1, 4) for mesh in rows}
    trace.write_text(Trace("2.13.0", 4, (0,), ENTRIES | alike, {"symbolic shapes": 2}).to_json())
    done = command("replay", trace, "--scaled", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    found = {(one["source"], one["target"]): one for one in report["redistributions"]}
    assert len(found) == len(ENTRIES) - 1 + 1, "one was requested on two lines, one on two equal meshes"
    assert {one["meshes"] for one in found.values()} == {1, 2} and found["S0", "S1"]["meshes"] == 2
    both = found["S0 S1", "S1 S0"]
    # The recorded and the scaled shape. Ranks off the diagonal receive everything: 4 rows of 8.
    assert (both["shape"], both["bytes_received"]) == ([8, 130], 100)
    assert (both["replayed_shape"], both["replayed_bytes_received"]) == ([8, 16], 4 * 8 * 4)
    assert "float32[8, 16]" in done.stdout and "[8, 130]" not in done.stdout
    assert "redistributions (sizes an eighth)" in done.stdout
    assert "of a rank, all calls together (sizes an eighth):" in done.stdout
    assert both["calls"] == 5 and both["where"] == ["a.py:1 f", "a.py:9 g, backward"]
    for one in found.values():
        assert not one["faults"] and one["shardweave_s"] > 0
        refused = any("torch refuses" in note for note in one["notes"])
        assert (one["torch_s"] is None) == refused
    assert found["S0 S0", "S1"]["notes"] == ["torch refuses: another mesh"]
    # torch cannot redistribute this strided shard, which is not a shard order.
    assert any("torch is wrong" in note or "torch refuses" in note for note in found["S0/3 R", "S1 S0"]["notes"])
    assert "FSDP2's own collectives are timed" in " ".join(done.stdout.split())
    assert "a.py:1 f" in done.stdout and "2 calls: symbolic shapes" in done.stdout


PLANTED = """
import sys
from pathlib import Path
import torch.distributed as dist
from shardweave.cli import replay, replay_ranks

carried_out = replay_ranks.run_redistribution

def planted(x, source, target, how):
    if source.placements[0].is_partial():  # the term of rank 0 instead of each
        x = x.clone()
        dist.broadcast(x, 0)
    out = carried_out(x, source, target, how)
    return out[[1, 0, *range(2, len(out))]] if target.placements[0].is_shard(1) else out

replay_ranks.run_redistribution = planted
replay.ROUNDS = 1
replay.last_level_cache = lambda: 1
sys.exit(replay.run([Path(sys.argv[1])], replay.Options(json_path=Path(sys.argv[2]))))
"""


@pytest.mark.multi
def test_replay_reports_wrong_results(tmp_path: Path) -> None:
    pair, trace, out = Mesh((2,)), tmp_path / "trace.json", tmp_path / "out.json"
    found = {
        Entry(pair, None, (8, 8), "float32", "S0", "S1", "a.py:1 rows swapped"): Cost(1, 64),
        Entry(pair, None, (8, 4), "bfloat16", "P", "S0", "a.py:2 a term twice"): Cost(1, 32),
        Entry(pair, None, (8, 8), "float32", "S1", "S0", "a.py:3 as it should be"): Cost(1, 16),
        Entry(pair, None, (8, 8), "float32", "S0", "P", "a.py:4 becomes partial"): Cost(1, 8),
    }
    trace.write_text(Trace("2.13.0", 2, (0,), found).to_json())
    done = run_python([sys.executable, "-c", PLANTED, trace, out], timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    report = {one["where"][0]: one for one in json.loads(out.read_text())["redistributions"]}
    partial = report.pop("a.py:4 becomes partial")
    assert partial["torch_s"] is None and partial["shardweave_s"] > 0 and not partial["faults"]
    assert partial["notes"][0] == "not checked: the target is partial, and many terms are valid"
    assert partial["notes"][1].startswith("torch refuses: RuntimeError: ")
    faults = {where: one["faults"] for where, one in report.items()}
    assert len(faults.pop("a.py:1 rows swapped")) == len(faults.pop("a.py:2 a term twice")) == 2, "on both ranks"
    assert faults == {"a.py:3 as it should be": []}
    assert "S0 → S1 of [8, 8]: shardweave is wrong: rank 0: " in done.stdout


TRANSPORTS = """
import os
import sys
from pathlib import Path
from shardweave.cli import replay, replay_ranks
from shardweave.runtime.transports.choose_transport import NAMES

def refused(*_):
    raise RuntimeError("DTensor is called")

replay_ranks.stock_redistribute_local_tensor = refused
replay.ROUNDS = 1
replay.last_level_cache = lambda: 1
trace, out = map(Path, sys.argv[1:])
for transport in NAMES:
    if transport == "hierarchical":
        os.environ["SHARDWEAVE_NODE_SIZE"] = "2"
    path, scaled = out / f"{transport}.json", transport == "hierarchical"
    assert replay.run([trace], replay.Options(transport=transport, scaled=scaled, json_path=path)) == 0
"""


@pytest.mark.multi
def test_fsdp_collectives_on_every_transport(tmp_path: Path) -> None:
    """Both sides are right on each transport. For FSDP2's collectives, torch's side calls torch.distributed
    directly."""
    rows = [Mesh((2,), ("dp",), ranks=ranks) for ranks in ([0, 2], [1, 3])]
    requests = [(mesh, *layouts) for layouts in FSDP_COLLECTIVES for mesh in ([GRID] if " " in layouts[0] else rows)]
    found = {Entry(mesh, None, (640,), "float32", *of, "FSDP", fsdp=True): Cost(1, 1) for mesh, *of in requests}
    dtensor = Entry(GRID, None, (640,), "float32", "S0 R", "R S0", "a.py:1 f")
    trace = tmp_path / "trace.json"
    trace.write_text(Trace("2.13.0", 4, (0,), {**found, dtensor: Cost(1, 1)}).to_json())
    done = run_python([sys.executable, "-c", TRANSPORTS, trace, tmp_path], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for transport in NAMES:
        report = json.loads((tmp_path / f"{transport}.json").read_text())["redistributions"]
        by_layouts = {(one["source"], one["target"]): one for one in report}
        assert by_layouts.pop(("S0 R", "R S0"))["notes"] == ["torch refuses: RuntimeError: DTensor is called"]
        assert by_layouts.keys() == FSDP_COLLECTIVES.keys()
        for layouts, one in by_layouts.items():
            assert one["torch_s"] > 0 and one["torch_is"] == f"torch.distributed's {FSDP_COLLECTIVES[layouts]}"
            assert one["shardweave_s"] > 0 and one["cold"] and not one["notes"] and not one["faults"]
    assert "as FSDP2 issues them: all_gather, reduce_scatter and all_reduce" in done.stdout


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
x.redistribute(placements=[Shard(1)])
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.multi
def test_record_runs_a_script_unchanged(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    done = command("record", "-o", trace, script, 3)
    assert done.returncode == 3, "the script's own status: " + done.stderr
    written = tmp_path / "trace.rank2.json"
    assert Trace.read(written).ended == "SystemExit: 3"
    ((entry, cost),) = Trace.read(written).redistributions.items()
    assert (entry.source, entry.target, entry.where, cost.calls) == ("S0", "S1", "script.py:10 <module>", 1)
    # The process group, which knows the ranks of a submesh, is destroyed by then.
    assert entry.mesh == Mesh((2,), ("tp",), ranks=[2, 3])
    done = command("replay", written)
    assert done.returncode == 0 and "Recorded by rank 2 of 4" in done.stdout
    assert "so the trace is incomplete: rank 2: SystemExit: 3" in done.stdout


FAKE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
x = distribute_tensor(torch.randn(8, 6), init_device_mesh("cpu", (8,)), [Shard(0)], src_data_rank=None)
x.redistribute(placements=[Shard(1)])
x.redistribute(placements=[Shard(1)])
x.redistribute(placements=[Replicate()])
dist.destroy_process_group()
"""

PROGRAM = """
import json, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from . import rows

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for n in (rows, 2):
    distribute_tensor(torch.randn(n, 2), mesh, [Shard(0), Shard(1)], src_data_rank=None).full_tensor()
model = torch.nn.Sequential(torch.nn.Linear(3, 5))
fully_shard(model, mesh=mesh["dp"])
model(torch.randn(4, 3)).sum().backward()
layer = torch.nn.Linear(3, 8, bias=False)
weight = DTensor.from_local(torch.randn(4, 3), mesh["tp"], [_StridedShard(0, split_factor=2)], run_check=False)
layer.weight = torch.nn.Parameter(weight)
model.append(layer)
fully_shard(layer, mesh=mesh["dp"])
refused = ""
try:
    layer(torch.randn(2, 3))
except Exception as error:
    refused = str(error)
with open(f"said_by_{mesh.get_rank()}", "w") as file:
    json.dump([refused, sys.argv[1:]], file)
"""


def record_as_module(rank: int, folder: str, *options: str) -> tuple[Any, ...]:
    from shardweave.__main__ import main

    os.chdir(folder)
    assert main(["record", *options, "-m", "package.program", "-m", "--install"]) == 0
    refused, arguments = json.loads(Path(f"said_by_{rank}").read_text())
    assert arguments == ["-m", "--install"]
    statistics = shardweave.stats()
    requests = {request.split("  ")[0].strip() for request, _ in statistics.redistributions}
    return refused, shardweave.is_installed(), dict(statistics.delegations), requests


@pytest.mark.multi
def test_record_runs_a_module_with_options_of_install(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("rows = 64")
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    options = "--install", "--adapt-fsdp", "--reduction", "fast"
    for refused, installed, delegations, requests in run_ranks(record_as_module, 4, str(tmp_path), *options):
        assert refused.startswith("module: parameter 'weight': it was (")
        assert installed and not delegations
        assert requests == {"S0 S1 → R R", "S0 → R", "Pavg → S0"}  # the last two are FSDP2's
    # Without options torch carries everything out.
    for refused, installed, delegations, requests in run_ranks(record_as_module, 4, str(tmp_path)):
        assert not ("_StridedShard" in refused or installed or delegations or requests)
    places = {entry.where.split(" ")[0] for entry in Trace.read(tmp_path / "trace.rank0.json").redistributions}
    assert places == {"program.py:12", "FSDP"}


@pytest.mark.plan
def test_record_and_replay_count_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardweave.__main__ import main

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    script, trace, out = tmp_path / "script.py", tmp_path / "trace.json", tmp_path / "out.json"
    script.write_text(FAKE)
    assert main(["record", "-o", str(trace), str(script)]) == 0
    assert len(Trace.read(tmp_path / "trace.rank0.json").redistributions) == 3
    assert ": 2 distinct redistributions of rank 0 of 8\n" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "trace.rank0.json"), "--topology", "nvlink", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())["redistributions"]) == 2


@pytest.mark.plan
def test_replay_refuses_invalid_traces(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(Trace("2.13.0", 4, (0,), ENTRIES).to_json())
    rows = len(distinct(Trace.read(trace)))
    with pytest.raises(ArgumentError, match=f"'nowhere' is in none of the {rows} redistributions of TRACE"):
        replay.run([trace], Options(only="nowhere"))
    for left_out, ended, says in (
        ({}, None, "the program redistributed no DTensor, or only in processes that it started; allowed"),
        ({"symbolic shapes": 3}, None, "3 calls are left out: symbolic shapes; allowed"),
        ({}, "ValueError: no", "the program ended before the first one: rank 0: ValueError: no; allowed"),
    ):
        empty = Trace("2.13.0", 4, (0,), {}, left_out, ended=ended).write(tmp_path / "empty.json")
        with pytest.raises(ArgumentError, match=f"TRACE: it has no redistribution: {says}"):
            replay.run([empty], Options())
    for path in (tmp_path / "no" / "file.json", tmp_path):
        with pytest.raises(ArgumentError, match=f"--json: '{path}' cannot be written"):
            replay.run([trace], Options(json_path=path))
    with pytest.raises(ArgumentError, match="rank 0 more than once"):
        replay.run([trace, trace], Options())
