"""`python -m shardweave replay TRACE …`: a program's redistributions once more, by torch and by shardweave.

On as many ranks of this machine as the program had, checked and timed in turns; or, for programs of more ranks, priced
on a topology.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import shardweave

from ..bench.baselines.stock_dtensor import ROUNDS
from ..bench.harness.collect import run_ranks
from ..bench.harness.interleaved import slowest
from ..bench.harness.machine import last_level_cache, machine
from ..bench.harness.ranks import RanksFailed
from ..bench.harness.terminal import console_of_tables, progress_on
from ..bench.harness.writable import check_writable
from ..bench.workloads.trace_cases import Case, check_memory, distinct
from ..errors import ArgumentError
from ..planner import Topology
from ..runtime.tracing.merge import merged
from ..runtime.tracing.trace import Trace
from .replay_prices import priced
from .replay_ranks import Setting, rank_main
from .replay_report import Replayed, show_priced, show_replayed

MOST_RANKS = 16


@dataclass(frozen=True)
class Options:
    """What the command was given.

    Attributes:
        device, transport: None: not given.
        topology: to price on; None: run, where the program does not have too many ranks.
        only: which redistributions.
        most: how many of those are run, the ones that move most bytes; all are priced, and the table has so many.
    """

    device: str | None = None
    transport: str | None = None
    topology: Topology | None = None
    scaled: bool = False
    only: str = ""
    most: int = 64
    json_path: Path | None = None


def run(paths: Sequence[Path], options: Options) -> int:
    """Replay or price traces of one program's ranks, show the table; 1 where shardweave is wrong or a rank died.

    Raises:
        ArgumentError: traces that cannot be read, or are not of one run, with nothing to replay, or with what takes
            more memory than is free; options that do not fit each other or this machine.
    """
    traces = [Trace.read(path) for path in paths]
    trace = merged(traces)
    if not trace.found:
        raise ArgumentError(f"TRACE: it holds no redistribution: {trace.why_empty}; allowed: one or more")
    every = distinct(trace, traces)
    asked = [case for case in every if options.only in " ".join((*case.wheres, case.entry.source, case.entry.target))]
    if not asked:
        raise ArgumentError(
            f"--only: {options.only!r} is in none of the {len(every)} redistributions of TRACE; allowed: in one"
        )
    path = options.json_path
    check_writable("--json", path)
    console = console_of_tables()
    if options.topology is not None or trace.world_size > MOST_RANKS:
        left_out = _left_out(options, len(every), len(asked), len(asked))
        report, wrong = _price(trace, asked, left_out, options, console), False
    else:
        cases = asked[: options.most]
        left_out = _left_out(options, len(every), len(asked), len(cases))
        try:
            report, wrong = _run(trace, cases, left_out, options, console)
        except RanksFailed as failure:
            print(f"error: the replay ends: {failure}", file=sys.stderr)
            return 1
    if path is not None:
        about = {"torch": torch.__version__, "world_size": trace.world_size, "ranks": trace.ranks, "ended": trace.ended}
        path.write_text(json.dumps({**about, **report}, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


def _left_out(options: Options, every: int, asked: int, kept: int) -> str:
    """How many of a trace's distinct redistributions no figure is of, and by which options; none: nothing to say."""
    by = [f"--only {options.only!r}"] if asked < every else []
    if kept < asked:
        by.append(f"--most {options.most}")
    return f", {every - kept} left out by {' and '.join(by)}" if by else ""


def _price(trace: Trace, cases: Sequence[Case], left_out: str, options: Options, console: Console) -> dict[str, Any]:
    for name in ("device", "transport", "scaled"):
        if getattr(options, name):
            why = "--topology is given" if options.topology else f"TRACE is of {trace.world_size} ranks"
            raise ArgumentError(
                f"--{name}: {why}, so that nothing is run; allowed: up to {MOST_RANKS} ranks and no --topology"
            )
    topology = options.topology or shardweave.NVLINK_INFINIBAND
    if options.topology is None:
        console.print(
            f"{trace.world_size} ranks are more than the {MOST_RANKS} that start here: simulated, not measured. "
            f"--topology NAME|FILE says on what."
        )
    found = [priced(case, topology) for case in cases]
    show_priced(console, trace, found, topology, options.most, left_out)
    return {
        "simulated": True,
        "topology": topology.to_dict(),
        "redistributions": [one.to_dict() for one in found],
    }


def _run(
    trace: Trace, cases: list[Case], left_out: str, options: Options, console: Console
) -> tuple[dict[str, Any], bool]:
    """
    Raises:
        RanksFailed: a rank died.
    """
    device, size = options.device or "cpu", trace.world_size
    check_device(device, options.transport, size)
    if options.scaled:
        cases = [case.scaled() for case in cases]
    setting = Setting(cases, device, options.transport, ROUNDS, last_level_cache())
    if device == "cpu":
        check_memory(cases, setting.cache_bytes)
    replayed: list[Replayed] = []
    progress = progress_on(console)
    task = progress.add_task("replaying", total=len(cases))

    def found(case: str, by_rank: list[dict[str, Any]]) -> None:
        replayed.append(together(cases[int(case)], by_rank))
        progress.update(task, advance=1)

    run_ranks(rank_main, size, {"setting": setting}, found, device_type=device, progress=progress)
    show_replayed(console, trace, replayed, options.scaled, device, left_out)
    report = {
        "simulated": False,
        "machine": machine(),
        "device": device,
        "scaled": options.scaled,
        "rounds": setting.rounds,
        "redistributions": [one.to_dict() for one in replayed],
    }
    return report, any(one.faults for one in replayed)


def check_device(device: str, transport: str | None, ranks: int) -> None:
    """
    Raises:
        ArgumentError: there is no such device here, or too few, or the transport is not for them.
    """
    if device == "cpu":
        return
    there = torch.cuda.device_count()  # without using CUDA in this process, from which ranks are forked
    if not there:
        raise ArgumentError("--device: 'cuda', and torch sees no GPU; allowed: cpu")
    if transport not in (None, "process_group", "symmetric_memory"):
        raise ArgumentError(
            f"--transport: {transport!r} is for CPUs; allowed with --device cuda: process_group, symmetric_memory"
        )
    if there < ranks and transport != "symmetric_memory":
        raise ArgumentError(
            f"--device: 'cuda', {there} GPUs for {ranks} ranks; allowed: a GPU for each, or --transport "
            f"symmetric_memory, where ranks share GPUs and times say little"
        )


def together(case: Case, by_rank: list[dict[str, Any]]) -> Replayed:
    """What the ranks found of one case."""
    seconds = [found["seconds"] for found in by_rank]
    rounds = {side: tuple(slowest(seconds, side)) for side in seconds[0]}
    faults = tuple(f"rank {r}: {text}" for r, found in enumerate(by_rank) for text in found["faults"])
    notes = tuple(dict.fromkeys(text for found in by_rank for text in found["notes"]))
    return Replayed.of(case, rounds.get("stock", ()), rounds["ours"], notes, faults, by_rank[0]["cold"])
