"""`python -m shardweave calibrate`: a `Topology` measured on the ranks that it is started on, or on local ones.

The report goes to stderr, the topology's JSON alone to stdout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..bench.harness.collect import supervise
from ..bench.harness.link_fit import Sample, samples_of, topology_of
from ..bench.harness.link_times import ROUNDS, SMALLEST, node_size_of, rank_main
from ..bench.harness.ranks import RanksFailed, timeout_seconds
from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, UnsupportedError
from ..planner import Topology
from ..runtime.transports.select import NAMES

LARGEST = 32 << 20
_LEAST_LARGEST = 4096
_LOCAL_RANKS = 4
_PLAIN_WIDTH = 120
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def run(
    ranks: int | None,
    node_size: int | None,
    transport: str | None,
    out: Path | None,
    name: str | None,
    largest: int = LARGEST,
) -> int:
    """Measure, show how well the figures fit, print the topology and write it; 1 if a rank was lost.

    Args:
        ranks: local ranks to start; None: those of `torchrun`, or 4.
        node_size: ranks of a node, pretended where they are all on one machine; None: those that share a machine.
        transport: what ranks of a node meet in; None: as `redistribute` chooses (`SHARDWEAVE_TRANSPORT`).
        out: a file for the JSON, besides stdout.
        name: the topology's.
        largest: bytes that a rank sends at most.

    Raises:
        ArgumentError: a number that does not fit, nodes that are not equally many consecutive ranks.
    """
    given = all(variable in os.environ for variable in _TORCHRUN)
    size = int(os.environ["WORLD_SIZE"]) if given else ranks or _LOCAL_RANKS
    if given and ranks not in (None, size):
        raise ArgumentError(f"--ranks: {ranks}, inside torchrun with {size}; allowed: none there")
    if size < 2:
        raise ArgumentError(f"--ranks: {size}; allowed: 2 or more, a link has two ends")
    transport = transport or os.environ.get("SHARDWEAVE_TRANSPORT") or None
    if transport is not None and transport not in NAMES:
        raise ArgumentError(f"--transport: {transport!r} is not known; allowed: {', '.join(NAMES)}")
    if transport == "hierarchical":
        transport = None  # which is of several nodes; the ranks of one choose by what they share
    if largest < _LEAST_LARGEST:
        raise ArgumentError(f"--largest: {largest}; allowed: {_LEAST_LARGEST} bytes or more")
    check_writable("--out", out)
    config = {"device": "cpu", "transport": transport, "node_size": node_size, "largest": largest}
    return (_run_here if given else _run_local)(size, config, out, name)


def _run_local(size: int, config: dict[str, Any], out: Path | None, name: str | None) -> int:
    node_size_of(["here"] * size, config["node_size"])
    console = _console()
    found: list[dict[str, Any]] = []

    def message(rank: int, measured: dict[str, Any]) -> None:
        console.print(f"measured: {measured['kind']}")
        found.append(measured)

    console.print(f"{size} ranks on {os.cpu_count()} cores, torch {torch.__version__}, one thread each.")
    try:
        supervise(rank_main, size, config, message)
    except RanksFailed as failure:
        print(f"error: the calibration ends: {failure}", file=sys.stderr)
        return 1
    _report(console, found, out, name)
    return 0


def _run_here(size: int, config: dict[str, Any], out: Path | None, name: str | None) -> int:
    """As one of the ranks that torchrun started, on its GPU if there is one (not tried on any yet)."""
    rank = int(os.environ["RANK"])
    backend = "gloo"
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        torch.cuda.set_device(local)
        config["device"], backend = f"cuda:{local}", "cpu:gloo,cuda:nccl"
    found: list[dict[str, Any]] = []
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds()))
        rank_main(rank, size, config, found.append)
        if rank == 0:
            _report(_console(), found, out, name)
        dist.barrier()
        dist.destroy_process_group()
    except UnsupportedError:
        raise
    except RuntimeError as error:  # a peer that died or did not come, in torch's words or in shardweave's
        print(f"error: the calibration ends: rank {rank}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # a group that lost a member may never come down by itself
    return 0


def _console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PLAIN_WIDTH, highlight=False)


def predicted_us(topology: Topology, kind: str, sample: Sample) -> float:
    """What the topology says a call takes: an exchange, or a copy inside a rank."""
    alone = topology.call_us + float(topology.copy_us(sample.copied))
    if kind == "local":
        return alone
    link = topology.node if kind == "node" else topology.network
    return alone + float(link.us(sample.nbytes, sample.peers))


def _report(console: Console, found: Sequence[dict[str, Any]], out: Path | None, name: str | None) -> None:
    topology, notes = topology_of(found, name)
    for measured in found:
        kind, title = measured["kind"], "local: a copy inside each rank, all at once"
        if kind != "local":
            title = f"{kind}: {measured['transport']} transport, every rank with every other of its group at once"
        console.print(_table(title, topology, kind, samples_of(measured)))
    console.print(f"Times are medians of {ROUNDS} rounds of the slowest rank; sizes from {SMALLEST} bytes.")
    console.print("Fitted: a call + latency + peers + bytes / bandwidth + what is copied inside a rank.\n")
    for note in notes:
        console.print(note, markup=False)
    text = topology.to_json()
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def _table(title: str, topology: Topology, kind: str, samples: Sequence[Sample]) -> Table:
    view = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for column in ("peers", "bytes sent", "bytes copied", "measured µs", "fitted µs", "fitted ÷ measured - 1", "GB/s"):
        view.add_column(column, justify="right", no_wrap=True)
    for sample in samples:
        fitted = predicted_us(topology, kind, sample)
        view.add_row(
            str(sample.peers) if kind != "local" else "-",
            f"{sample.nbytes:,}" if kind != "local" else "-",
            f"{sample.copied:,}",
            f"{sample.us:.1f}",
            f"{fitted:.1f}",
            f"{fitted / sample.us - 1:+.0%}",
            f"{(sample.nbytes or 2 * sample.copied) / sample.us / 1e3:.3f}",
        )
    return view
