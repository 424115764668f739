"""`python -m shardweave replay TRACE …`: run the redistributions of a program on torch and on shardweave.

They run on as many ranks of this machine as the program had, with checked results; or, for programs of more ranks, the
planner computes their costs on a topology.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardweave

from ..bench.baselines.stock_dtensor import ROUNDS
from ..bench.harness.interleaved import slowest
from ..bench.harness.machine import last_level_cache, machine
from ..bench.harness.ranks import RanksFailed, run_ranks
from ..bench.harness.terminal import Console, console_of_tables, progress_on
from ..bench.harness.writable import check_writable
from ..bench.workloads.trace_cases import Case, check_memory, distinct
from ..errors import ArgumentError
from ..planner import TOPOLOGIES, Topology
from ..runtime.tracing.merge import merge_traces
from ..runtime.tracing.trace_file import Trace
from ..runtime.transports.choose_transport import NAMES, TransportName
from .parsing import number_of, topology
from .replay_costs import computed_costs
from .replay_ranks import Setting, rank_main
from .replay_report import Replayed, show_computed, show_replayed

MOST_RANKS = 16


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes:
        device: None: "cpu".
        transport: None: chosen by the library.
        topology: compute costs on it; None: run, if the program does not have too many ranks.
        scaled: divide sizes by 8.
        only: a part of the calling line or of the layouts of the redistributions to replay.
        most: run as many, those that move most bytes; where costs are computed, show as many rows.
    """

    device: str | None = None
    transport: TransportName | None = None
    topology: Topology | None = None
    scaled: bool = False
    only: str = ""
    most: int = 64
    json_path: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="the traces of the ranks of one run")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the device of the ranks (default: cpu)")
    parser.add_argument("--transport", choices=NAMES, help="the transport (default: chosen as by redistribute)")
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"compute the costs of both sides on it instead of running: {', '.join(TOPOLOGIES)}, or a JSON file "
        "(default: run; for more ranks than can be started here: nvlink-infiniband)",
    )
    parser.add_argument("--scaled", action="store_true", help="divide every size of 64 and more by 8")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only redistributions whose source line or layouts contain TEXT"
    )
    parser.add_argument(
        "--most",
        type=number_of("redistributions"),
        default=64,
        metavar="N",
        help="run the N that move most bytes, or show N rows of costs (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def main(arguments: argparse.Namespace) -> int:
    given = arguments
    options = Options(
        given.device, given.transport, topology(given.topology), given.scaled, given.only, given.most, given.json
    )
    return run(given.traces, options)


def run(paths: Sequence[Path], options: Options) -> int:
    """Replay the traces of one run, or compute their costs, and print the table.

    Returns:
        The exit status: 1 if a result of shardweave is wrong or a rank died.

    Raises:
        ArgumentError: traces that cannot be read, are of different runs, contain nothing to replay, or need more memory
            than is free; options that exclude each other or that this machine does not support.
    """
    traces = [Trace.read(path) for path in paths]
    trace = merge_traces(traces)
    if not trace.redistributions:
        raise ArgumentError(f"TRACE: it has no redistribution: {trace.why_empty}; allowed: one or more")
    every = distinct(trace, traces)
    matching = [
        case for case in every if options.only in " ".join((*case.wheres, case.entry.source, case.entry.target))
    ]
    if not matching:
        raise ArgumentError(
            f"--only: {options.only!r} is in none of the {len(every)} redistributions of TRACE; allowed: a part of one"
        )
    path = options.json_path
    check_writable("--json", path)
    console = console_of_tables()
    if options.topology is not None or trace.world_size > MOST_RANKS:
        left_out = _left_out(options, len(every), len(matching), len(matching))
        report, wrong = _compute_costs(trace, matching, left_out, options, console), False
    else:
        cases = matching[: options.most]
        left_out = _left_out(options, len(every), len(matching), len(cases))
        try:
            report, wrong = _run(trace, cases, left_out, options, console)
        except RanksFailed as failure:
            print(f"error: the replay ends: {failure}", file=sys.stderr)
            return 1
    if path is not None:
        program = {
            "torch": torch.__version__,
            "world_size": trace.world_size,
            "ranks": trace.ranks,
            "ended": trace.ended,
        }
        path.write_text(json.dumps({**program, **report}, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


def _left_out(options: Options, every: int, matching: int, shown: int) -> str:
    """The number of distinct redistributions that are left out, with the options that do so; empty if there are
    none."""
    by = [f"--only {options.only!r}"] if matching < every else []
    if shown < matching:
        by.append(f"--most {options.most}")
    return f", {every - shown} left out by {' and '.join(by)}" if by else ""


def _compute_costs(
    trace: Trace, cases: Sequence[Case], left_out: str, options: Options, console: Console
) -> dict[str, Any]:
    """Compute the costs of the cases on a topology, print the table and return the JSON report."""
    for name in ("device", "transport", "scaled"):
        if getattr(options, name):
            why = "--topology is given" if options.topology else f"TRACE has {trace.world_size} ranks"
            raise ArgumentError(
                f"--{name}: {why}, so nothing is run; allowed: with up to {MOST_RANKS} ranks and no --topology"
            )
    topology = options.topology or shardweave.NVLINK_INFINIBAND
    if options.topology is None:
        console.print(
            f"{trace.world_size} ranks are more than the {MOST_RANKS} that can be started here: simulated, not "
            f"measured. --topology NAME|FILE selects the topology."
        )
    costs = [computed_costs(case, topology) for case in cases]
    show_computed(console, trace, costs, topology, options.most, left_out)
    return {
        "simulated": True,
        "topology": topology.to_dict(),
        "redistributions": [one.to_dict() for one in costs],
    }


def _run(
    trace: Trace, cases: list[Case], left_out: str, options: Options, console: Console
) -> tuple[dict[str, Any], bool]:
    """Run the cases on ranks of this machine, print the table, and return the JSON report and whether a result is
    wrong.

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

    def collect(case: str, by_rank: list[dict[str, Any]]) -> None:
        replayed.append(result_of(cases[int(case)], by_rank))
        progress.update(task, advance=1)

    run_ranks(rank_main, size, {"setting": setting}, collect, device_type=device, progress=progress)
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


def check_device(device: str, transport: TransportName | None, ranks: int) -> None:
    """Check that ranks can run on the device.

    Raises:
        ArgumentError: no such device, too few of them, or a transport for CPUs.
    """
    if device == "cpu":
        return
    count = torch.cuda.device_count()  # does not initialise CUDA, so that ranks can be forked
    if not count:
        raise ArgumentError("--device: 'cuda', and torch sees no GPU; allowed: cpu")
    if transport not in (None, "process_group", "symmetric_memory"):
        raise ArgumentError(
            f"--transport: {transport!r} is for CPUs; allowed with --device cuda: process_group, symmetric_memory"
        )
    if count < ranks and transport != "symmetric_memory":
        raise ArgumentError(
            f"--device: 'cuda', {count} GPUs for {ranks} ranks; allowed: a GPU for each, or --transport "
            f"symmetric_memory, where ranks share GPUs and times mean little"
        )


def result_of(case: Case, by_rank: list[dict[str, Any]]) -> Replayed:
    """Combine the results of all ranks of one case."""
    seconds = [result["seconds"] for result in by_rank]
    rounds = {side: tuple(slowest(seconds, side)) for side in seconds[0]}
    faults = tuple(f"rank {r}: {text}" for r, result in enumerate(by_rank) for text in result["faults"])
    notes = tuple(dict.fromkeys(text for result in by_rank for text in result["notes"]))
    return Replayed.of(case, rounds.get("stock", ()), rounds["ours"], notes, faults, by_rank[0]["cold"])
