"""`python -m shardweave demo`: redistributions of real models by stock DTensor on gloo and by shardweave, on the same
ranks of this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardweave

from ..bench.baselines.stock_dtensor import ROUNDS, Case, Unsuitable, digest, faults_of, mesh_for, moves
from ..bench.harness.interleaved import KEPT, slowest, time_sides
from ..bench.harness.machine import provenance
from ..bench.harness.markdown import provenance_lines
from ..bench.harness.ranks import RanksFailed, Send, run_ranks, timeout_seconds
from ..bench.harness.terminal import Console, console_of_tables, print_rows, progress_on
from ..bench.harness.writable import check_writable
from ..bench.workloads import SCALED_DOWN_BY, SMALLEST_SCALED, load_workloads
from ..errors import ArgumentError, shown
from ..runtime.environment import pretended_node_size
from ..runtime.transports.choose_transport import TransportName
from .parsing import number_of

MOST_RANKS = 64
_SUFFIXES = ("_into_tensor", "_tensor", "_single", "_coalesced")
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=number_of("ranks"), default=4, help="the processes to start (default: %(default)s)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def main(arguments: argparse.Namespace) -> int:
    return run(arguments.ranks, arguments.only, arguments.json)


def run(ranks: int, only: str, json_path: Path | None) -> int:
    """Run the cases, print the tables and write the JSON.

    Args:
        only: a part of the names of the cases to run.

    Returns:
        The exit status: 1 if a rank died or any output is wrong.

    Raises:
        ArgumentError: too many ranks, no case matches `only`, or no matching case moves anything between so many ranks.
    """
    if ranks > MOST_RANKS:
        raise ArgumentError(f"--ranks: {ranks}; allowed: up to {MOST_RANKS} processes on this machine")
    console = console_of_tables()
    # With SHARDWEAVE_NODE_SIZE no memory is shared by all ranks.
    transports = ("hierarchical" if pretended_node_size() else "shared_memory", "process_group")
    cases = _check_cases(ranks, only)
    check_writable("--json", json_path)
    timeout_seconds()
    console.print(_heading(ranks))
    progress = progress_on(console)
    task = progress.add_task("starting", total=len(transports) * cases)
    results: dict[str, list[Result]] = {transport: [] for transport in transports}
    skipped: dict[str, str] = {}

    def collect(case: str, by_rank: list[dict[str, Any]]) -> None:
        first = by_rank[0]
        if "unsuitable" in first:
            skipped[first["name"]] = first["unsuitable"]
        else:
            results[first["transport"]].append(result_of(by_rank))
        progress.update(task, advance=1, description=case)

    try:
        run_ranks(rank_main, ranks, {"transports": transports, "only": only}, collect, progress=progress)
    except RanksFailed as failure:
        print(f"error: the demo ends: {failure}", file=sys.stderr)
        return 1
    return _show(console, ranks, results, skipped, json_path)


def _check_cases(ranks: int, only: str) -> int:
    """The number of cases that match `only`.

    Raises:
        ArgumentError: no case, or no case that moves anything between so many ranks.
    """
    every, mesh = load_workloads(), mesh_for(ranks)
    matching = [workload for workload in every if only in workload.name]
    if not matching:
        names = ", ".join(workload.name for workload in every)
        raise ArgumentError(
            f"--only: {shown(only)} is not a part of any case's name; allowed: a part of one of {names}"
        )
    if not any(moves(workload, mesh) for workload in matching):
        moving = [workload.name for workload in every if moves(workload, mesh)]
        allowed = f"a part of one of {', '.join(moving)}" if moving else "2 ranks and more"
        option = f"--only: {shown(only)}" if moving else f"--ranks: {ranks}"
        here = f"a {mesh[0]}×{mesh[1]} mesh, which is what --ranks {ranks} makes"
        raise ArgumentError(f"{option}: nothing moves on {here}; allowed: {allowed}")
    return len(matching)


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """Run every workload on every transport."""
    # torch logs advice about its own plans on every rank.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    for transport in config["transports"]:
        for workload in load_workloads():
            if config["only"] not in workload.name:
                continue
            names = workload.mesh_names
            if names not in meshes:
                meshes[names] = init_device_mesh("cpu", mesh_for(size), mesh_dim_names=names)
            labels = {"case": f"{transport}: {workload.name}", "transport": transport, "name": workload.name}
            try:
                send({**labels, **_compare(Case(workload, meshes[names]), meshes[names], transport)})
            except Unsuitable as reason:
                send({**labels, "unsuitable": str(reason)})


def _compare(case: Case, mesh: DeviceMesh, transport: TransportName) -> dict[str, Any]:
    dtype = str(case.dtype).removeprefix("torch.")
    program = shardweave.plan(mesh, case.shape, dtype, case.source_text, case.target_text)
    source, target = (torch.full((max(program.bytes_received),), n, dtype=torch.uint8) for n in (1, 0))
    sides: dict[str, Callable[[], Any]] = {
        "stock": lambda: case.source.redistribute(placements=case.placements),
        "ours": lambda: shardweave.redistribute(case.source, case.placements, transport=transport),
        "copy": lambda: target.copy_(source),  # a plain copy of as many bytes
    }
    with CommDebugMode() as collectives:
        theirs = sides["stock"]().to_local()
    mine = sides["ours"]().to_local()
    faults = {"ours": case.fault(mine, pairwise=False), "stock": case.fault(theirs, pairwise=True)}
    result = {
        "source": case.source_text,
        "target": case.target_text,
        "mesh": list(mesh.shape),
        "mesh_names": list(mesh.mesh_dim_names or ()),
        "shape": list(case.shape),
        "dtype": dtype,
        "torch_plan": {
            str(op).rpartition(".")[2]: count for op, count in collectives.get_comm_counts().items() if count
        },
        "shardweave_plan": [f"{step.kind}, {step.reduce}" if step.reduce else step.kind for step in program.steps],
        "bytes_received": list(program.bytes_received),
        "bytes_bound": None if program.bytes_bound is None else list(program.bytes_bound),
        "faults": {side: fault for side, fault in faults.items() if fault},
        "box": str([(part.start, part.stop) for part in case.box]),
        "digests": {"ours": digest(mine)},
    }
    del theirs, mine
    return {**result, "seconds": time_sides(sides, ROUNDS)}


def result_of(by_rank: list[dict[str, Any]]) -> Result:
    """The results of all ranks of one case, as in the JSON. Times are milliseconds per call: the median over rounds of
    the slowest rank. Cases in which nothing moves are not counted."""
    first, faults = by_rank[0], faults_of(by_rank)
    seconds = [result["seconds"] for result in by_rank]
    theirs, ours, copy = (statistics.median(slowest(seconds, side)) * 1e3 for side in ("stock", "ours", "copy"))
    received, bound = first["bytes_received"], first["bytes_bound"]
    wrong = faults.get("ours", [])
    if bound is not None and received != bound:
        wrong.append(f"receives {received} bytes where {bound} are enough")
    copied = ("name", "mesh", "mesh_names", "source", "target", "shape", "dtype", "torch_plan", "shardweave_plan")
    return {
        **{name: first[name] for name in copied},
        "torch_ms": theirs,
        "shardweave_ms": ours,
        "copy_ms": copy,
        "ratio": theirs / ours,
        "counted": any(received if bound is None else bound),
        "equal": not wrong,
        "torch_equal": "stock" not in faults,
        "faults": wrong + [f"torch, {fault}" for fault in faults.get("stock", ())],
        "bytes_received": received,
        "bytes_bound": bound,
    }


def summary(results: list[Result]) -> dict[str, Any]:
    """The median and least ratio of the counted cases."""
    counted = [one for one in results if one["counted"]]
    least = min(counted, key=lambda one: one["ratio"], default=None)
    return {
        "median_ratio": statistics.median(one["ratio"] for one in counted) if counted else None,
        "min_ratio": least and least["ratio"],
        "min_case": least and least["name"],
        "counted": len(counted),
    }


def summary_line(results: list[Result]) -> str:
    counts = summary(results)
    if not counts["counted"]:
        return "nothing has to move between these ranks, so no case is counted"
    cases = "case" if counts["counted"] == 1 else "cases"
    return (
        f"{counts['counted']} counted {cases}: median ratio {counts['median_ratio']:.1f}, least "
        f"{counts['min_ratio']:.1f} ({counts['min_case']})"
    )


def _heading(ranks: int) -> str:
    rows, columns = mesh_for(ranks)
    return (
        f"{ranks} ranks on {os.cpu_count()} cores, mesh {rows}×{columns}, torch {torch.__version__}, one thread each.\n"
        f"Models' shapes with dims of {SMALLEST_SCALED} and more divided by {SCALED_DOWN_BY}. "
        f"Each call returns a new tensor that is kept for {KEPT} calls; both sides take turns; "
        f"a time is the median of {ROUNDS} rounds of the slowest rank.\n"
    )


def _cells(one: Result) -> list[str]:
    """The cells of a row. Bytes are those of the rank that receives most."""
    bound = one["bytes_bound"]
    return [
        one["name"],
        " ".join(f"{name}{size}" for name, size in zip(one["mesh_names"], one["mesh"], strict=True)),
        f"{one['source']} → {one['target']}",
        _collectives(one["torch_plan"]) + " [yellow]wrong[/yellow]" * (not one["torch_equal"]),
        ("; ".join(one["shardweave_plan"]) or "nothing") + " [red]WRONG[/red]" * (not one["equal"]),
        f"{max(one['bytes_received']) / 1e6:.2f}",
        "-" if bound is None else f"{max(bound) / 1e6:.2f}",
        f"{one['torch_ms']:.2f}",
        f"{one['shardweave_ms']:.3f}",
        f"{one['copy_ms']:.3f}",
        f"{one['ratio']:.1f}" if one["counted"] else f"({one['ratio']:.1f})",
    ]


def _collectives(counts: dict[str, int]) -> str:
    short: Counter[str] = Counter()
    for name, count in counts.items():
        for suffix in _SUFFIXES:
            name = name.replace(suffix, "")
        short[name] += count
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in short.items()) or "local"


def _show(
    console: Console, ranks: int, results: dict[str, list[Result]], skipped: dict[str, str], json_path: Path | None
) -> int:
    (transport, shared), (_, collective) = results.items()
    medium = "shared memory"
    if transport == "hierarchical":
        medium += f" inside nodes of {pretended_node_size()} ranks, gloo between them"
    machine = provenance()
    console.print("\n".join(provenance_lines(machine)) + "\n", markup=False, soft_wrap=True)
    texts = ("case", "mesh", "layouts", "torch's plan", "shardweave's plan")
    figures = ("received\nMB", "bound\nMB", "torch\nms", "shardweave\nms", "bare copy\nms", "ratio")
    note = "In brackets: nothing has to move, not counted. No bound is known where a layout is partial.\n"
    for title, cases in (
        (f"torch on gloo against shardweave's {medium}", shared),
        ("torch on gloo against shardweave on gloo: the same transport on both sides", collective),
    ):
        print_rows(console, title, texts, figures, list(map(_cells, cases)))
        console.print(f"\n[bold]{summary_line(cases)}[/bold]\n{note}")
        note = ""
    for name, of_transport in results.items():
        for one in of_transport:
            for fault in one["faults"]:
                who = "torch is wrong" if fault.startswith("torch, ") else "shardweave is wrong"
                console.print(f"{who} ({name}) {one['name']}, {fault.removeprefix('torch, ')}", markup=False)
    for name, reason in skipped.items():
        console.print(f"skipped: {name}: {reason}")
    failed = not all(one["equal"] for one in (*shared, *collective))
    if not failed:
        console.print("Every output of shardweave is correct: exact; sums within rounding and equal on all replicas.")
    if json_path is not None:
        report = {
            **machine, "ranks": ranks, "mesh": mesh_for(ranks), "rounds": ROUNDS, "kept_calls": KEPT,
            "timeout_s": timeout_seconds(), **summary(shared), "transport": transport, "cases": shared,
            "process_group": summary(collective), "process_group_cases": collective, "skipped": skipped,
        }  # fmt: skip
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed)
