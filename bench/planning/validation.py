"""The planner's costs compared with times measured on this machine, by the commands `calibrate` and `replay`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import shardweave
from shardweave import Program, Topology

from ...planner import Mesh
from ...runtime.tracing.trace_file import Cost, Entry, Trace
from ..baselines.stock_dtensor import Unsuitable, mesh_for, respell
from ..harness.markdown import table
from ..workloads import load_workloads

BOUNDS = ("nothing moves", "latency", "bandwidth")
"""What most of a cost is: the call and copies inside a rank; the fixed costs of steps and peers; bytes."""
TRANSPORTS = ("shared_memory", "process_group")
_LARGEST = 8 << 20  # bytes that a rank sends in the largest calibrated exchange; no workload sends more to one peer
_NO_TIME = 1e15  # GB/s: so fast that bytes cost nothing


def measure(sizes: Sequence[int], only: str = "", largest: int = _LARGEST) -> list[dict[str, Any]]:
    """One run for each number of ranks and each transport: the fitted topology, and the cases with both figures.

    Raises:
        subprocess.CalledProcessError: a command failed, or a result was wrong.
    """
    runs = []
    with TemporaryDirectory() as folder:
        trace, report = Path(folder, "trace.json"), Path(folder, "report.json")
        for size in sizes:
            trace.write_text(trace_of(size, only).to_json(), encoding="utf-8")
            calibrate = ["calibrate", "--ranks", str(size), "--largest", str(largest), "--transport", TRANSPORTS[0]]
            fitted = Topology.from_dict(json.loads(_command(*calibrate)))
            for transport in TRANSPORTS:
                link = fitted.node if transport == TRANSPORTS[0] else fitted.network
                topology = replace(fitted, name=f"measured, {transport}", node=link)
                print(_command("replay", str(trace), "--transport", transport, "--json", str(report)), file=sys.stderr)
                replayed = json.loads(report.read_text(encoding="utf-8"))["redistributions"]
                cases = [case_of(one, topology) for one in replayed]
                runs.append({"ranks": size, "transport": transport, "topology": topology.to_dict(), "cases": cases})
    return runs


def _command(*arguments: str) -> str:
    """The standard output of a command of shardweave."""
    command = [sys.executable, "-m", "shardweave", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def trace_of(size: int, only: str) -> Trace:
    """The workloads that a mesh of `size` ranks can run, at their scaled shapes, as the trace of a program."""
    redistributions: dict[Entry, Cost] = {}
    for workload in load_workloads():
        mesh = Mesh(mesh_for(size), workload.mesh_names)
        try:
            layouts = [respell(text, workload.mesh, mesh.shape) for text in (workload.source, workload.target)]
        except Unsuitable:
            continue
        program = shardweave.plan(mesh, workload.shape, workload.dtype, *layouts)
        if only in workload.name and not program.is_identity:
            source, target = str(program.source), str(program.target)
            entry = Entry(mesh, None, workload.shape, workload.dtype, source, target, workload.name)
            redistributions[entry] = Cost(1, max(program.bytes_received))
    return Trace(torch.__version__, size, (0,), redistributions)


def case_of(replayed: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """A redistribution of replay's report with its cost: that of the program that was run, on the fitted topology."""
    request = replayed["shape"], replayed["dtype"], replayed["source"], replayed["target"]
    program = replace(shardweave.plan(Mesh(**replayed["mesh"]), *request), topology=topology)
    return {
        "name": ", ".join(replayed["where"]),
        "bound": bound_of(program),
        "predicted_us": round(program.cost_us or 0.0, 3),
        "measured_us": round(replayed["shardweave_s"] * 1e6, 3),
    }


def bound_of(program: Program) -> str:
    """Which of `BOUNDS` makes most of the cost of a program, which has a topology."""
    topology, cost = program.topology, program.cost_us
    assert topology is not None and cost is not None
    if not max(program.bytes_received):
        return "nothing moves"
    links = [replace(link, gigabytes_per_s=_NO_TIME) for link in (topology.node, topology.network)]
    without_bytes = replace(topology, node=links[0], network=links[1], memory_gigabytes_per_s=_NO_TIME)
    fixed = replace(program, topology=without_bytes).cost_us or 0.0
    return "latency" if fixed >= cost / 2 else "bandwidth"


def errors(cases: Sequence[dict[str, Any]]) -> list[float]:
    """The error of each case, ascending: the larger of predicted ÷ measured and its inverse, minus 1."""
    ratios = [case["predicted_us"] / case["measured_us"] for case in cases]
    return sorted(max(ratio, 1 / ratio) - 1 for ratio in ratios)


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table: the errors of each run and of all runs, by what most of the cost is."""
    every = [case for run in runs for case in run["cases"]]
    groups = [*((run["ranks"], run["transport"], run["cases"]) for run in runs), ("all", "all", every)]
    cells = []
    for ranks, transport, cases in groups:
        by_bound = {bound: [case for case in cases if case["bound"] == bound] for bound in BOUNDS}
        if cases is every:
            by_bound["all"] = every
        for bound, some in by_bound.items():
            if some:
                worst, each = max(some, key=lambda case: errors([case])), errors(some)
                text = f"{worst['name']}: {worst['predicted_us']:.0f} for {worst['measured_us']:.0f} µs"
                cells.append(
                    (ranks, transport, bound, len(each), f"{statistics.median(each):.0%}", f"{each[-1]:.0%}", text)
                )
    return table(("ranks", "transport", "bound by", "cases", "median error", "worst", "worst case"), cells)
