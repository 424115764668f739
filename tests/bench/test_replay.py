"""Scripts recorded unchanged, and traces carried out again by both sides."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardweave.bench import replay, replay_values
from shardweave.bench.machine import available_memory
from shardweave.bench.replay_values import Values
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
    Entry(PAIR, None, (9, 2), "float64", "S0", "R", "FSDP gathers x"): Cost(1, 6),
    Entry(GRID, PAIR, (9, 2), "float64", "S0 S0", "S1", "a.py:7 f"): Cost(1, 5),
    Entry(GRID, None, (4, 4), "float32", "R R", "P R", "a.py:8 f", traced=True): Cost(1, 0),
    Entry(GRID, None, (4, 6), "float32", "S0 R", "P S1", "a.py:10 f"): Cost(1, 0),
}


def command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "shardweave", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.multi
@pytest.mark.long
def test_replay_of_every_kind(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "out.json"
    rows = [Mesh((2,), ("tp",), ranks=ranks) for ranks in ([0, 1], [2, 3])]
    alike = {Entry(mesh, None, (9, 4), "float32", "S0", "S1", "a.py:9 f"): Cost(1, 4) for mesh in rows}
    trace.write_text(Trace("2.13.0", 4, (0,), ENTRIES | alike, {"symbolic shapes": 2}).to_json())
    done = command("replay", trace, "--scaled", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    found = {(one["source"], one["target"]): one for one in report["redistributions"]}
    assert len(found) == len(ENTRIES) - 1 + 1, "one was asked for in two places, one by two meshes that are alike"
    assert {one["meshes"] for one in found.values()} == {1, 2} and found["S0", "S1"]["meshes"] == 2
    both = found["S0 S1", "S1 S0"]
    # Recorded as it was, and beside it what was replayed and shown: off the diagonal all is new, 4 rows of 8.
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
    # torch cannot read this strided shard: it says something else than an order.
    assert any("torch is wrong" in note or "torch refuses" in note for note in found["S0/3 R", "S1 S0"]["notes"])
    assert "What FSDP2 issues itself" in done.stdout
    assert "a.py:1 f" in done.stdout and "2 calls: symbolic shapes" in done.stdout


PLANTED = """
import sys
from pathlib import Path
import torch.distributed as dist
from shardweave.bench import replay

carried_out = replay.run_redistribution

def planted(x, source, target, how):
    if source.placements[0].is_partial():  # rank 0's term in the place of each
        x = x.clone()
        dist.broadcast(x, 0)
    out = carried_out(x, source, target, how)
    return out[[1, 0, *range(2, len(out))]] if target.placements[0].is_shard(1) else out

replay.run_redistribution = planted
replay.ROUNDS = 1
sys.exit(replay.run([Path(sys.argv[1])], None, False, "", 64, Path(sys.argv[2])))
"""


@pytest.mark.multi
def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    pair, trace, out = Mesh((2,)), tmp_path / "trace.json", tmp_path / "out.json"
    found = {
        Entry(pair, None, (8, 8), "float32", "S0", "S1", "a.py:1 rows swapped"): Cost(1, 64),
        Entry(pair, None, (8, 4), "bfloat16", "P", "S0", "a.py:2 a term twice"): Cost(1, 32),
        Entry(pair, None, (8, 8), "float32", "S1", "S0", "a.py:3 as it should be"): Cost(1, 16),
        Entry(pair, None, (8, 8), "float32", "S0", "P", "a.py:4 becomes partial"): Cost(1, 8),
    }
    trace.write_text(Trace("2.13.0", 2, (0,), found).to_json())
    done = subprocess.run([sys.executable, "-c", PLANTED, trace, out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    report = {one["where"][0]: one for one in json.loads(out.read_text())["redistributions"]}
    partial = report.pop("a.py:4 becomes partial")
    assert partial["torch_s"] is None and partial["shardweave_s"] > 0 and not partial["faults"]
    assert partial["notes"][0] == "not checked: what becomes partial may be any terms"
    assert partial["notes"][1].startswith("torch refuses: RuntimeError: ")
    faults = {where: one["faults"] for where, one in report.items()}
    assert len(faults.pop("a.py:1 rows swapped")) == len(faults.pop("a.py:2 a term twice")) == 2, "on both ranks"
    assert faults == {"a.py:3 as it should be": []}
    assert "S0 → S1 of [8, 8]: shardweave is wrong: rank 0: " in done.stdout


def _cut(
    whole: torch.Tensor, order: list[tuple[int, int]], sizes: tuple[int, ...], at: tuple[int, ...]
) -> torch.Tensor:
    """The oracle: chunk after chunk, of (mesh dim, tensor dim) in this order."""
    for m, dim in order:
        chunks = whole.chunk(sizes[m], dim)
        whole = chunks[at[m]] if at[m] < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@pytest.mark.plan
@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("S0 S1 R", [(0, 0), (1, 1)]),
        ("S1 S1 S1", [(0, 1), (1, 1), (2, 1)]),
        ("S0/6 S0 S0", [(1, 0), (2, 0), (0, 0)]),  # as FSDP makes it
        ("S0/3 S1 S0", [(2, 0), (0, 0), (1, 1)]),
        ("S0 S0 S0 @ 0:1,2,0", [(1, 0), (2, 0), (0, 0)]),
        ("S0/2 S0 S0", [(1, 0), (0, 0), (2, 0)]),  # read by the planner
    ],
)
@pytest.mark.parametrize("shape", [(12, 24), (7, 5, 3), (1, 50), (0, 4)])
def test_what_ranks_hold_of_the_values(text: str, order: list[tuple[int, int]], shape: tuple[int, ...]) -> None:
    sizes = (2, 2, 3)
    values = Values.of(shape, torch.float32, text, sizes)
    whole = values.target("R", (1,), (0,))
    assert whole.shape == shape and (not whole.numel() or len(whole.unique()) == 4)
    for at in itertools.product(*map(range, sizes)):
        assert torch.equal(values.source(text, at), _cut(whole, order, sizes, at)), at


REDUCTIONS = {"": "sum", "avg": "mean", "max": "amax", "min": "amin", "prod": "prod"}
DTYPES = ("float64", "bfloat16", "int8", "bool", "float8_e4m3fn")


@pytest.mark.plan
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in REDUCTIONS for name in DTYPES if op != "avg" or "float" in name]
)
def test_terms_differ_and_become_the_value(op: str, name: str) -> None:
    shape, sizes, dtype = (30, 40), (2, 2), getattr(torch, name)
    values = Values.of(shape, dtype, f"P{op} P{op}", sizes)
    terms = [values.source(f"P{op} P{op}", at) for at in itertools.product(range(2), range(2))]
    assert all(not torch.equal(a.float(), b.float()) for a, b in itertools.combinations(terms, 2))
    assert all(len(term.float().unique(dim=0)) == 30 for term in terms), "no two rows are alike"
    assert values.exact
    stacked = torch.stack([term.double() for term in terms])
    exact = getattr(stacked, REDUCTIONS[op])(0)
    assert torch.equal(values.target("R", (1,), (0,)).double(), exact.bool().double() if name == "bool" else exact)


@pytest.mark.plan
def test_what_is_not_exact_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(name: str, source: str, ranks: int) -> bool:
        return Values.of((4,), getattr(torch, name), source, (ranks,)).exact

    assert exact("float8_e5m2", "P", 8) and not exact("float8_e5m2", "P", 9)
    assert exact("float16", "Pprod", 15) and not exact("float16", "Pprod", 16)
    assert exact("bfloat16", "Pavg", 15) and exact("int8", "P", 16) and exact("float8_e5m2", "Pmax", 16)
    # In chunks, however the dims fall.
    values = Values.of((3, 5, 7), torch.int32, "R", (1,))
    whole = values.target("R", (1,), (0,))
    for chunk in (1, 2, 7, 8, 35, 36, 105):
        monkeypatch.setattr(replay_values, "_CHUNK", chunk)
        assert torch.equal(values.target("R", (1,), (0,)), whole)


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
def test_a_script_is_recorded_unchanged(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    done = command("record", "-o", trace, script, 3)
    assert done.returncode == 3, "the script's own status: " + done.stderr
    written = tmp_path / "trace.rank2.json"
    ((entry, cost),) = Trace.read(written).found.items()
    assert (entry.source, entry.target, entry.where, cost.calls) == ("S0", "S1", "script.py:10 <module>", 1)
    # The group is gone by then that knows which ranks a part of a mesh has.
    assert entry.mesh == Mesh((2,), ("tp",), ranks=[2, 3])
    assert command("replay", written).returncode == 0


@pytest.mark.plan
def test_meshes_that_are_alike_are_one_case() -> None:
    first, second = Mesh((2,), ("tp",), ranks=[0, 1]), Mesh((2,), ("tp",), ranks=[2, 3])
    both = Mesh((2,), ("tp",), ranks=[1, 2])

    def entry(mesh: Mesh, where: str, shape: tuple[int, ...] = (8, 4), target_mesh: Mesh | None = None) -> Entry:
        return Entry(mesh, target_mesh, shape, "float32", "S0", "R", where)

    found = {
        entry(first, "a.py:1 f"): Cost(3, 64),
        entry(first, "a.py:2 f"): Cost(1, 64),
        entry(second, "a.py:1 f"): Cost(5, 64),  # another branch of the program
        entry(first, "a.py:1 f", (2, 2)): Cost(1, 8),
        entry(both, "a.py:1 f", (2, 2)): Cost(1, 8),
        entry(first, "a.py:1 f", (3, 2), second): Cost(1, 8),
        entry(second, "a.py:1 f", (3, 2), first): Cost(1, 8),
    }
    one, *apart = replay.distinct(Trace("2.13.0", 4, (0,), found))
    assert {e.mesh for e in one.entries} == {first, second}
    assert one.cost == Cost(5, 64) and one.wheres == ("a.py:1 f", "a.py:2 f")
    assert one.of_rank(3).mesh == second and one.of_rank(0).mesh == first
    # Ranks in common do one after the other; between two meshes each is one of its own.
    assert [len(case.entries) for case in apart] == [1, 1, 1, 1]


@pytest.mark.plan
def test_the_most_expensive_are_named_with_both_costs() -> None:
    seconds = [(2e-3, 1e-3), (3e-3, 1e-4), (None, 0.5), (1e-3, 1e-3), (4e-3, 1e-3), (5e-3, 6e-3), *[(1e-6, 1e-6)] * 3]
    cases = replay.distinct(Trace("2.13.0", 4, (0,), ENTRIES))
    replayed = [replay.Replayed(case, *times, (), ()) for case, times in zip(cases, seconds, strict=True)]
    heading, *lines = replay._most_expensive(replayed)
    assert heading == "\nThe 3 most expensive redistributions of a rank, all calls together:"
    # 5 calls of the first take longer than 1 of those that take longer each; what torch refuses counts by ours.
    assert [line.split("ms")[0].strip() for line in lines[1::2]] == [
        "1 call of 9 B: torch refuses, shardweave 500.00",
        "5 calls of 100 B: torch 10.00",
        "1 call of 6 B: torch 5.00",
    ]
    assert lines[2] == " 2. S0 S1 → S1 S0 of float32[8, 130], a.py:1 f and 1 more"
    assert lines[5].endswith("torch 5.00 ms, shardweave 6.00 ms")
    assert replay._most_expensive(replayed[:1])[0].startswith("\nThe most expensive redistribution of a rank")


@pytest.mark.plan
def test_what_is_scaled_is_shown_so(capsys: pytest.CaptureFixture) -> None:
    entry = Entry(GRID, None, (800, 48), "float32", "S0 S1", "S1 S0", "a.py:1 f")
    trace = Trace("2.13.0", 4, (0,), {entry: Cost(3, 38400)})
    (case,) = replay.distinct(trace)
    assert (case.shape, case.bytes_received) == ((800, 48), 38400)
    # Of the ranks off the diagonal all is new: a half of 100 rows, and of the 48 columns that stay.
    scaled = replay.Replayed(case.scaled(), 2e-3, 1e-3, ("a note",), ())
    found = scaled.to_dict()
    assert (found["shape"], found["bytes_received"]) == ((800, 48), 38400)
    assert (found["replayed_shape"], found["replayed_bytes_received"]) == ([100, 48], 50 * 24 * 4)
    replay._show(Console(width=170), trace, [scaled], True)
    said = capsys.readouterr().out
    assert "1 redistribution (sizes an eighth)" in said and "all calls together (sizes an eighth):" in said
    assert "3 calls of 4.688 KiB" in said and said.count("[100, 48]") == 3 and "800" not in said
    replay._show(Console(width=170), trace, [replay.Replayed(case, 2e-3, 1e-3, (), ())], False)
    said = capsys.readouterr().out
    assert "eighth" not in said and "3 calls of 37.5 KiB" in said and said.count("[800, 48]") == 2


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
def test_what_is_too_large_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    from shardweave.__main__ import main

    trace = tmp_path / "trace.json"
    large = Entry(GRID, None, (128256, 4096), "bfloat16", "S0 S1", "R S1", "a.py:1 embedding")
    small = Entry(GRID, None, (8, 6), "float32", "S0 S1", "R R", "a.py:2 f")
    trace.write_text(Trace("2.13.0", 4, (0,), {large: Cost(1, 1 << 29), small: Cost(1, 144)}).to_json())
    # 4 ranks: 2 quarters each of a source of 1002 MiB, 10 halves of a target.
    needed = 128256 * 4096 * 2 * (2 + 20)
    monkeypatch.setattr(replay, "Ranks", lambda *_: pytest.fail("ranks are started"))
    monkeypatch.setattr(replay, "available_memory", lambda: needed - 1)
    assert main(["replay", str(trace)]) == 2
    said = capfd.readouterr().err
    assert "S0 S1 → R S1 of bfloat16[128256, 4096], a.py:1 embedding, takes some 21.53 GiB" in said
    assert all(option in said for option in ("--scaled", "--only", "--most"))
    cases = replay.distinct(Trace.read(trace))
    monkeypatch.setattr(replay, "available_memory", lambda: needed)
    replay.check_memory(cases)
    monkeypatch.setattr(replay, "available_memory", lambda: needed // 60)
    with pytest.raises(ArgumentError, match="allowed: up to 367.4 MiB"):
        replay.check_memory(cases)
    replay.check_memory([case.scaled() for case in cases])
    replay.check_memory(cases[1:])


@pytest.mark.plan
def test_the_memory_there_is(tmp_path: Path) -> None:
    meminfo, limits = tmp_path / "meminfo", tmp_path / "cgroup"
    assert 0 < available_memory(tmp_path / "none", limits) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:   700 kB\n")
    assert available_memory(meminfo, limits) == 700 << 10
    limits.mkdir()
    (limits / "memory.max").write_text("max\n")
    assert available_memory(meminfo, limits) == 700 << 10
    (limits / "memory.max").write_text(f"{300 << 10}\n")
    assert available_memory(meminfo, limits) == 300 << 10


@pytest.mark.plan
def test_a_script_that_is_not_there(capfd: pytest.CaptureFixture) -> None:
    from shardweave.__main__ import main

    assert main(["record", "missing.py"]) == 2
    assert "script: 'missing.py' is no file" in capfd.readouterr().err
    assert not os.path.exists("trace.json")
