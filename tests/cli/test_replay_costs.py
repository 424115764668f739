"""Computed costs of traces of more ranks than this machine can start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardweave
from shardweave import Layout, Link, Topology
from shardweave.bench.baselines.stock_plans import stock_received, stock_us
from shardweave.bench.workloads.trace_cases import distinct
from shardweave.cli import replay
from shardweave.cli.replay import Options
from shardweave.cli.replay_costs import computed_costs
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh
from shardweave.runtime.tracing.trace_file import Cost, Entry, Trace

pytestmark = pytest.mark.plan
TRACES = Path(__file__).parent / "traces"
"""Of whole models at full shapes, on 64 to 256 ranks: FSDP with tensor and sequence parallelism, and layers as a
sharding solver places them."""


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "run_ranks", lambda *_, **__: pytest.fail("ranks are started"))


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "solver"])
def test_costs_of_every_recorded_trace(tmp_path: Path, name: str, capsys: pytest.CaptureFixture) -> None:
    path, out = TRACES / f"{name}.json", tmp_path / "out.json"
    assert replay.run([path], Options(json_path=out)) == 0
    report, trace = json.loads(out.read_text()), Trace.read(path)
    found = report["redistributions"]
    assert report["simulated"] and Topology.from_dict(report["topology"]) == shardweave.NVLINK_INFINIBAND
    assert sum(one["calls"] for one in found) == sum(cost.calls for cost in trace.redistributions.values())
    for one in found:
        # The planner's search may miss the best plan by 5%.
        mesh = Mesh(**one["mesh"])
        layouts = (Layout.parse(one[side], mesh.shape) for side in ("source", "target"))
        request = mesh, tuple(one["shape"]), one["dtype"], *layouts
        us = stock_us(*request, shardweave.NVLINK_INFINIBAND)
        assert us is not None and one["torch_s"] == us / 1e6
        assert one["torch_bytes_received"] == stock_received(*request)
        assert one["shardweave_s"] <= one["torch_s"] * 1.05
    printed = capsys.readouterr().out
    assert (
        f"{trace.world_size} ranks are more than the 16 that can be started here: simulated, not measured." in printed
    )
    assert "simulated on NVLink nodes of 8 on InfiniBand: nothing was run or measured" in printed
    saved = [(one["torch_s"] - one["shardweave_s"]) * one["calls"] for one in found]
    assert (max(saved) > 1e-3) == (name == "solver"), "one collective costs both the same"
    stock = sum(one["torch_s"] * one["calls"] for one in found)
    assert f"torch {stock * 1e3:.1f} ms, shardweave {(stock - sum(saved)) * 1e3:.1f} ms" in printed
    dearest = sorted(found, key=lambda one: -one["torch_s"] * one["calls"])[:3]
    lines = printed[printed.index("The 3 most expensive redistributions of a rank, all calls together, simulated:") :]
    for place, one in enumerate(dearest, 1):
        assert f" {place}. {one['source']} → {one['target']} of {one['dtype']}{one['shape']}, " in lines
        assert f"torch {one['torch_s'] * one['calls'] * 1e3:.2f} ms (" in lines


def test_sums_include_rows_that_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace, mesh = tmp_path / "trace.json", Mesh((4, 8))
    found = {
        Entry(mesh, None, (64 * n, 64), "float32", "S0 S1", "S1 S0", f"a.py:{n} f"): Cost(1, 64 * n)
        for n in range(1, 81)
    }
    trace.write_text(Trace("2.13.0", 32, (0,), found).to_json())

    def run(**options: Any) -> tuple[str, str]:
        assert replay.run([trace], Options(**options)) == 0
        table, _, end = capsys.readouterr().out.partition("All calls of a rank")
        return table, end

    table, whole = run(most=100)
    assert "80 redistributions, simulated" in table and table.count("a.py:") == 80 and "left out" not in table + whole
    table, end = run()
    assert "64 of 80 redistributions, simulated" in table and table.count("a.py:") == 64 and end == whole
    table, end = run(only="a.py:7", most=2)
    assert "2 of 11 redistributions, 69 left out by --only 'a.py:7', simulated" in table and table.count("a.py:") == 3
    assert end.replace("\n", " ").count(", of 11 priced, 69 left out by --only 'a.py:7':") == 2


def test_redistributions_without_a_torch_plan(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Strided shards that are not a shard order, on more ranks than this machine can start."""
    trace, mesh = tmp_path / "trace.json", Mesh((4, 8))
    entry = Entry(mesh, None, (96, 64), "float32", "S0/3 R", "R R", "a.py:1 f")
    trace.write_text(Trace("2.13.0", 32, (0,), {entry: Cost(2, 1)}).to_json())
    assert replay.run([trace], Options()) == 0
    printed = capsys.readouterr().out
    # The rank with the fewest rows receives the others: 72 of 96.
    assert "    2 calls of 18 KiB: torch has no cost, shardweave 0.05 ms" in printed


def test_cost_of_several_meshes_is_the_maximum() -> None:
    """One pair of ranks is inside a node, one spans two nodes."""
    topology = Topology("nodes of 3", 3, Link(1.0, 100.0, True), Link(10.0, 1.0, False), 1000.0)
    pairs = [Mesh((2,), ("tp",), ranks=ranks) for ranks in ([0, 1], [2, 3], [4, 5])]
    found = {Entry(mesh, None, (1 << 20,), "int8", "S0", "R", "a.py:1 f"): Cost(1, 1 << 19) for mesh in pairs}
    (case,) = distinct(Trace("2.13.0", 32, (0,), found))
    one = computed_costs(case, topology)
    across = shardweave.redistribute_cost(pairs[1], (1 << 20,), "int8", "S0", "R", topology)
    assert one.ours == one.stock == across / 1e6 > 5e-4 and one.our_bytes == one.stock_bytes == 1 << 19


def test_options_that_exclude_topology(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    entry = Entry(Mesh((4,)), None, (8,), "float32", "S0", "R", "a.py:1 f")
    trace.write_text(Trace("2.13.0", 64, (0,), {entry: Cost(1, 1)}).to_json())
    for options, name in ((Options(transport="process_group"), "transport"), (Options(device="cuda"), "device")):
        with pytest.raises(ArgumentError, match=f"--{name}: TRACE has 64 ranks, so nothing is run; allowed: with up"):
            replay.run([trace], options)
    with pytest.raises(ArgumentError, match="--scaled: --topology is given"):
        replay.run([trace], Options(scaled=True, topology=shardweave.NVLINK_NODE))
