"""Prices at scale: how meshes grow, bytes against brute counts, torch's plans against those on real meshes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave
from shardweave import ArgumentError, Layout, Mesh
from shardweave.bench.baselines.stock_plans import Stock
from shardweave.bench.harness import machine
from shardweave.bench.planning import projection
from shardweave.bench.planning.projection import GROWTHS, TOPOLOGIES, Growth, project, received, stock_received, totals
from shardweave.bench.workloads.record_workloads import WORKLOADS
from shardweave.planner.layouts.index_sets import held_box
from shardweave.runtime.convert_specs import spec_of_layout
from shardweave.runtime.tracing.trace_file import Entry

pytestmark = pytest.mark.plan

GROWTH = Growth("", 4)


@pytest.mark.parametrize(("ranks", "shape"), [(8, (1, 1, 8)), (16, (1, 2, 8)), (96, (3, 4, 8)), (1, None), (9, None)])
def test_full_mesh_sizes(ranks: int, shape: tuple[int, ...] | None) -> None:
    full_mesh = GROWTH.full_mesh(ranks)
    assert (full_mesh.shape if full_mesh else None) == shape


def entry(names: tuple[str, ...], shape: tuple[int, ...], source: str, target: str, where: str = "a.py:1 f") -> Entry:
    return Entry(Mesh((2,) * len(names), names), None, shape, "float32", source, target, where)


def grown(growth: Growth, ranks: int, *request: Any) -> Entry:
    full_mesh = growth.full_mesh(ranks)
    assert full_mesh is not None
    return growth.grown(entry(*request), full_mesh)


def test_grown_entry() -> None:
    flat = grown(GROWTH, 96, ("dp",), (10,), "S0", "R", "FSDP gathers x")
    assert flat.mesh.shape == (4,) and flat.shape == (12,), "padded to the size of the group"
    assert grown(GROWTH, 96, ("dp",), (10,), "S0", "R").shape == (10,)
    solver = GROWTHS["solver"]
    weight = grown(solver, 2048, ("dp", "tp"), (64, 8), "P S0", "S0 S0 @ 0:1,0")
    assert weight.mesh.shape == (2, 128, 8) and (weight.source, weight.target) == ("P P S0", "R S0 S0 @ 0:2,1")
    for no_gradient in (((1, 64, 8), "P S2", "S1 S2"), ((64, 8), "S0 P", "S0 R")):
        assert grown(solver, 2048, ("dp", "tp"), *no_gradient).mesh.shape == (128, 8)
    for refused in ((("pp",), (4,), "S0", "R"), (("dp", "tp"), (12,), "S0/3 R", "R R")):
        with pytest.raises(ArgumentError, match="allowed"):
            grown(solver, 2048, *refused)


@pytest.mark.parametrize("name", GROWTHS)
def test_grown_recorded_workloads(name: str) -> None:
    trace, workload = projection.load(name), WORKLOADS[name]
    assert trace.world_size == Mesh(tuple(workload.mesh.values())).size
    for full_mesh in map(GROWTHS[name].full_mesh, projection.RANKS[4:]):
        assert full_mesh is not None and full_mesh.size in projection.RANKS
        for recorded in trace.redistributions:
            GROWTHS[name].grown(recorded, full_mesh)


def held(shape: tuple[int, ...], layout: Layout, mesh: Mesh, position: int) -> set[tuple[int, ...]]:
    box = held_box(shape, layout, mesh.shape, mesh.coordinate(position))
    return set(product(*(range(*span) for span in box)))


@pytest.mark.parametrize(
    "layouts", [("S0 S1", "S1 S0"), ("S0 S0", "R S0"), ("R S0", "S0 S0"), ("S0 S0", "S0 S0 @ 0:1,0")]
)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.name)
def test_received_equals_brute_force(layouts: tuple[str, str], topology: shardweave.Topology) -> None:
    """The elements that a rank lacks before each step, of the sampled rank with most."""
    mesh, shape = Mesh((4, 2), ("dp", "tp")), (22, 6)
    program = shardweave.plan(mesh, shape, "float32", *layouts, topology=topology)
    lacking = [
        sum(len(held(shape, s.target, program.mesh, r) - held(shape, s.source, program.mesh, r)) for s in program.steps)
        for r in projection.sampled(mesh)
    ]
    assert program.steps and max(lacking) > 0
    assert received(Entry(mesh, None, shape, "float32", *layouts, ""), topology) == 4 * max(lacking)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "elements"),
    [
        ((4, 2), "S0 S1", "R S1", 3 * 4 * 3),
        ((4, 2), "S0 S1", "R R", 4 * 3 + 3 * 4 * 6),  # the inner mesh dim first
        ((4, 2), "P R", "S0 R", 3 * 4 * 6),
        ((1, 2), "S0 R", "R R", 0),
    ],
)
def test_stock_received(mesh: tuple[int, ...], source: str, target: str, elements: int) -> None:
    """(n - 1) padded parts in each collective."""
    layouts = Layout.parse(source), Layout.parse(target)
    assert stock_received(Mesh(mesh), (16, 6), "bfloat16", *layouts) == 2 * elements
    assert stock_received(Mesh(mesh), (16, 6), "float32", *layouts) == 4 * elements


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_stock_layouts_without_process_group(shape: tuple[int, ...]) -> None:
    """They are those of a mesh with a process group, in any order of shards."""
    more = " R" * (len(shape) - 2)
    texts = [
        text.replace("|", more) for text in ("S0 S0|", "R S0|", "S0 R|", "P S0|", "S0 S1|", "S1 S0|", "S0 S0| @ 0:1,0",
                                             "P R|")
    ]  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", shape)
        meta = TensorMeta(torch.Size((64, 32)), (32, 1), torch.float32)
        for a, b, graph in product(texts, texts, (False, True)):
            if a == b or "P" in b:
                continue
            source, target = Layout.parse(a), Layout.parse(b)
            specs = (spec_of_layout(layout, mesh, meta) for layout in (source, target))
            real = _gen_transform_infos_non_cached(*specs, use_graph_based_transform=graph)
            layouts = Stock(shape, graph).layouts((64, 32), source, target)
            assert layouts[0] == source and layouts[-1] == target
            changed = [
                [m for m in range(len(shape)) if x.placements[m] != y.placements[m]] for x, y in pairwise(layouts)
            ]
            assert changed == [[step.mesh_dim] for step in real]
    finally:
        dist.destroy_process_group()


def test_rows_and_report() -> None:
    rows = list(project(["solver", "llama3_8b"], [8, 32]))
    assert {(row.workload, row.ranks) for row in rows} == set(product(["solver", "llama3_8b"], [8, 32]))
    assert {row.topology for row in rows} == {t.name for t in TOPOLOGIES}
    # torch is priced by the same plans, step by step.
    assert all(row.stock_us is not None and row.stock_us > max(0, 0.9 * row.ours_us) for row in rows)
    for key, (ours, theirs) in totals(rows).items():
        some = [row for row in rows if (row.workload, row.topology, row.ranks) == key]
        assert ours == pytest.approx(sum(row.calls * row.ours_us for row in some) / 1e3) and theirs >= 0.99 * ours
    about = {"command": "c", "machine": machine.machine()}
    text = projection.report(about, rows)
    links = [line.split(" | ") for line in text.splitlines() if "assumed, not measured |" in line]
    assert [(cells[0].strip("| "), cells[1].partition(",")[0], *cells[2:4]) for cells in links] == [
        ("NVLink nodes of 8 on InfiniBand", "inside a node", "5", "450"),
        ("NVLink nodes of 8 on InfiniBand", "between nodes", "20", "50"),
        ("flat InfiniBand", "between nodes", "20", "50"),
        ("one NVLink domain", "inside a node", "5", "450"),
    ]
    assert "| llama3_8b | flat InfiniBand |" in text


def test_files_of_a_projection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert projection.main(["--out", str(tmp_path), "--only", "solver", "--largest", "8"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"projection.json", "projection.md"}
    assert {row["ranks"] for row in json.loads((tmp_path / "projection.json").read_text())["rows"]} == {8}
    assert projection.main(["--out", str(tmp_path / "no")]) == 2
    assert "allowed: a file in a folder that is there" in capsys.readouterr().err


def test_stock_us_counts_one_call() -> None:
    request = Mesh((4, 2)), (1024, 64), "float32", Layout.parse("S0 S1"), Layout.parse("S1 S0")
    layouts = projection.stock_layouts(request[0], request[1], *request[3:])
    assert layouts is not None and len(layouts) > 2
    free, dear = (projection.stock_us(*request, replace(shardweave.NVLINK_NODE, call_us=us)) for us in (0.0, 500.0))
    assert free is not None and dear == pytest.approx(free + 500)
