"""Redistributions of real models, by stock DTensor on gloo and by shardweave, in the same ranks of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ArgumentError, shown
from ..runtime.environment import pretended_node_size
from .against_stock import ROUNDS, mesh_for, moves, rank_main
from .demo_report import Result, show_results, summary, summary_line
from .machine import provenance
from .markdown import provenance_lines
from .ranks import Ranks, RanksFailed, timeout_seconds
from .terminal import console_of_tables
from .turns import KEPT
from .workloads import SCALED_DOWN_BY, SMALLEST_SCALED, load_workloads
from .writable import check_writable


def run(ranks: int, only: str, json_path: Path | None) -> int:
    """Show the tables, write the JSON; 1 if a rank died or any output differs from what it has to be.

    Raises:
        ArgumentError: no case is asked for, or none in which anything moves between so many ranks.
    """
    console = console_of_tables()
    # On nodes that SHARDWEAVE_NODE_SIZE pretends no memory reaches all ranks.
    worlds = ("mixed" if pretended_node_size() else "shared_memory", "collective")
    gathered = _Gathered(ranks, worlds)
    config = {"worlds": list(worlds), "rounds": ROUNDS, "only": only}
    cases = _check_cases(ranks, only)
    check_writable("--json", json_path)
    console.print(_heading(ranks))
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = progress.add_task("starting", total=len(worlds) * cases)

    def message(rank: int, found: dict[str, Any]) -> None:
        if gathered.add(rank, found):
            progress.update(task, advance=1, description=f"{found['world']}: {found['name']}")

    def output(rank: int, line: str) -> None:
        if line.strip() and not line.startswith("[Gloo]"):
            progress.console.print(f"rank {rank}: {line}", markup=False)

    try:
        # The bar has a thread, so the ranks are forked before it starts.
        with Ranks(rank_main, ranks, config) as children, progress:
            children.supervise(message, output)
    except RanksFailed as failure:
        print(f"error: the demo ends: {failure}", file=sys.stderr)
        return 1
    return _show(console, ranks, gathered, json_path)


def _check_cases(ranks: int, only: str) -> int:
    """How many cases are asked for.

    Raises:
        ArgumentError: none, or none in which anything moves between so many ranks.
    """
    every, mesh = load_workloads(), mesh_for(ranks)
    asked = [workload for workload in every if only in workload.name]
    if not asked:
        names = ", ".join(workload.name for workload in every)
        raise ArgumentError(f"--only: {shown(only)} is in no case's name; allowed: part of one of {names}")
    if not any(moves(workload, mesh) for workload in asked):
        moving = [workload.name for workload in every if moves(workload, mesh)]
        allowed = f"part of one of {', '.join(moving)}" if moving else "2 ranks and more"
        option = f"--only: {shown(only)}" if moving else f"--ranks: {ranks}"
        here = f"a {mesh[0]}×{mesh[1]} mesh, which is what --ranks {ranks} makes"
        raise ArgumentError(f"{option}: nothing moves on {here}; allowed: {allowed}")
    return len(asked)


class _Gathered:
    """Messages by case, until every rank has sent its own."""

    def __init__(self, ranks: int, worlds: Sequence[str]) -> None:
        self._ranks = ranks
        self._waiting: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        self.results: dict[str, list[Result]] = {world: [] for world in worlds}
        self.skipped: dict[str, str] = {}

    def add(self, rank: int, found: dict[str, Any]) -> bool:
        """True if that was the last rank of a case."""
        by_rank = self._waiting.setdefault((found["world"], found["name"]), {})
        by_rank[rank] = found
        if len(by_rank) < self._ranks:
            return False
        if found["kind"] == "skipped":
            self.skipped[found["name"]] = found["reason"]
        else:
            result = Result.of(found["name"], [by_rank[r] for r in range(self._ranks)])
            self.results[found["world"]].append(result)
        return True


def _heading(ranks: int) -> str:
    rows, columns = mesh_for(ranks)
    return (
        f"{ranks} ranks on {os.cpu_count()} cores, mesh {rows}×{columns}, torch {torch.__version__}, one thread each.\n"
        f"Models' shapes with dims of {SMALLEST_SCALED} and more divided by {SCALED_DOWN_BY}. "
        f"Each call returns a new tensor that is kept for {KEPT} calls; both sides take turns; "
        f"a time is the median of {ROUNDS} rounds of the slowest rank.\n"
    )


def _show(console: Console, ranks: int, gathered: _Gathered, json_path: Path | None) -> int:
    (world, shared), (_, collective) = gathered.results.items()
    how = "shared memory"
    if world == "mixed":
        how += f" inside nodes of {pretended_node_size()} ranks, gloo between them"
    about = provenance()
    console.print("\n".join(provenance_lines(about)) + "\n", markup=False, soft_wrap=True)
    show_results(console, f"torch on gloo against shardweave's {how}", shared)
    console.print(f"\n[bold]{summary_line(shared)}[/bold]")
    console.print("In brackets: nothing has to move, not counted. No bound is known where a layout is partial.\n")
    show_results(console, "torch on gloo against shardweave on gloo: the same transport on both sides", collective)
    console.print(f"\n[bold]{summary_line(collective)}[/bold]")

    failed = False
    for name, results in gathered.results.items():
        for result in results:
            for fault in result.faults:
                failed = True
                console.print(f"[red]shardweave is wrong[/red] ({name}) {result.name}, {fault}")
            for fault in result.stock_faults:
                console.print(f"[yellow]torch is wrong[/yellow] {result.name}, {fault}")
    for name, reason in gathered.skipped.items():
        console.print(f"skipped: {name}: {reason}")
    if not failed:
        console.print("Every output of shardweave is right: exact, sums within rounding and the same on all replicas.")
    if json_path is not None:
        report = {
            **about,
            "ranks": ranks,
            "mesh": mesh_for(ranks),
            "rounds": ROUNDS,
            "kept_calls": KEPT,
            "timeout_s": timeout_seconds(),
            **summary(shared),
            "world": world,
            "cases": [result.to_dict() for result in shared],
            "collective": summary(collective),
            "collective_cases": [result.to_dict() for result in collective],
            "skipped": gathered.skipped,
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed)
