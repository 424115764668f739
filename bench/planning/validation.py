"""Predicted against measured: the planner's prices, on a topology fitted in the same run, of redistributions timed in
the same ranks of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardweave
from shardweave import Program, Topology

from ...cli import link_times
from ...cli.link_fit import topology_of
from ...cli.link_times import microseconds
from ..baselines.stock_dtensor import Case, Unsuitable, mesh_for
from ..harness.collect import messages_of
from ..harness.interleaved import rotated, rotating
from ..harness.ranks import Send
from ..workloads import load_workloads

BOUNDS = ("nothing moves", "latency", "bandwidth")
"""What a price is mostly: the call itself and copies inside a rank; what a step costs however little moves; bytes."""
_CPU = torch.device("cpu")
_LARGEST = 8 << 20  # bytes that a rank sends in an exchange that is fitted to: no workload moves more to one
_NO_TIME = 1e15  # GB/s: so fast that bytes cost nothing


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """Fit the links of these ranks, then time each case in each transport; rank 0 sends."""
    found: list[dict[str, Any]] = []
    link_times.rank_main(rank, size, config, found.append)
    made = [topologies(found) if rank == 0 else None]
    dist.broadcast_object_list(made)
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    for transport, topology in (made[0] or {}).items():
        cases = []
        for workload in load_workloads():
            if config["only"] not in workload.name:
                continue
            if workload.mesh_names not in meshes:
                meshes[workload.mesh_names] = init_device_mesh(
                    "cpu", mesh_for(size), mesh_dim_names=workload.mesh_names
                )
            try:
                case = Case(workload, meshes[workload.mesh_names])
            except Unsuitable:
                continue
            cases.append(_measured(case, meshes[workload.mesh_names], transport, topology))
        if rank == 0:
            kept = [case for case in cases if case is not None]
            send({"ranks": size, "transport": transport, "topology": topology.to_dict(), "cases": kept})


def topologies(found: Sequence[dict[str, Any]]) -> dict[str, Topology]:
    """Of one node, by the transport that its ranks meet in: what rank 0 measured of each."""
    topology, _ = topology_of(found, None)
    inside = next(measured["transport"] for measured in found if measured["kind"] == "node")
    by_transport = {inside: replace(topology, name=f"measured, {inside}")}
    by_transport["process_group"] = replace(topology, name="measured, collective", node=topology.network)
    return by_transport


def _measured(case: Case, mesh: DeviceMesh, transport: str, topology: Topology) -> dict[str, Any] | None:
    """Checked first, then timed, on sources that take turns and are in no cache, as what links were fitted to. The
    program is the one that is priced: planned for the topology. None where it has nothing to do."""
    dtype = str(case.dtype).removeprefix("torch.")
    program = shardweave.plan(mesh, case.shape, dtype, case.source_text, case.target_text, topology=topology)
    if program.is_identity:
        return None
    call = partial(shardweave.redistribute, placements=case.placements, transport=transport, topology=topology)
    fault = case.fault(call(case.source).to_local(), pairwise=False)
    assert fault is None, f"{case.name} on {transport}: {fault}"
    sources, _ = rotated(case.source)
    measured = microseconds(rotating(call, sources), _CPU)
    return {
        "name": case.name,
        "bound": bound_of(program),
        "predicted_us": round(program.cost_us or 0.0, 3),
        "measured_us": round(measured, 3),
    }


def bound_of(program: Program) -> str:
    """Which of `BOUNDS` the price of a program is; that of a topology."""
    topology, cost = program.topology, program.cost_us
    assert topology is not None and cost is not None
    if not max(program.bytes_received):
        return "nothing moves"
    links = [replace(link, gigabytes_per_s=_NO_TIME) for link in (topology.node, topology.network)]
    without_bytes = replace(topology, node=links[0], network=links[1], memory_gigabytes_per_s=_NO_TIME)
    fixed = replace(program, topology=without_bytes).cost_us or 0.0
    return "latency" if fixed >= cost / 2 else "bandwidth"


def measure(sizes: Sequence[int], only: str = "", largest: int = _LARGEST) -> list[dict[str, Any]]:
    """A run for each number of ranks and each transport: topology, and the cases with both figures.

    Raises:
        RanksFailed: a rank died, or an output was wrong.
    """
    config = {"device": "cpu", "transport": None, "node_size": None, "largest": largest, "only": only}
    return [run for size in sizes for of_rank in messages_of(rank_main, size, config) for run in of_rank]


def errors(cases: Sequence[dict[str, Any]]) -> list[float]:
    """Of each case, how many times too high or too low the prediction is, less 1; ascending."""
    ratios = [case["predicted_us"] / case["measured_us"] for case in cases]
    return sorted(max(ratio, 1 / ratio) - 1 for ratio in ratios)


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of a Markdown table: the error of each run, split by what a price is mostly, then of all."""
    lines = [
        "| ranks | transport | bound by | cases | median error | worst | worst case |",
        "|---|---|---|---|---|---|---|",
    ]
    every = [case for run in runs for case in run["cases"]]
    for ranks, transport, cases in (
        *((run["ranks"], run["transport"], run["cases"]) for run in runs),
        ("all", "all", every),
    ):
        for bound in BOUNDS:
            lines += _row(ranks, transport, bound, [case for case in cases if case["bound"] == bound])
    return [*lines, *_row("all", "all", "all", every)]


def _row(ranks: int | str, transport: str, bound: str, cases: Sequence[dict[str, Any]]) -> list[str]:
    if not cases:
        return []
    found = errors(cases)
    worst = max(cases, key=lambda case: errors([case]))
    text = f"{worst['name']}: {worst['predicted_us']:.0f} for {worst['measured_us']:.0f} µs"
    figures = f"{len(found)} | {statistics.median(found):.0%} | {found[-1]:.0%}"
    return [f"| {ranks} | {transport} | {bound} | {figures} | {text} |"]
