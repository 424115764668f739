"""`python -m shardweave calibrate`: measure a `Topology`, on the ranks of torchrun or on local ones.

The report goes to stderr, the JSON of the topology to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from ..bench.harness.gather_json import all_gather_json
from ..bench.harness.ranks import RanksFailed, supervise, timeout_seconds
from ..bench.harness.terminal import Console
from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, UnsupportedError
from ..planner import Topology
from ..runtime.environment import pretended_node_size
from ..runtime.transports.calibration_cache import keep_calibration, machine_kind
from ..runtime.transports.choose_transport import NAMES
from .link_fit import Sample, samples_of, topology_of
from .link_times import ROUNDS, SMALLEST, node_size_of, rank_main
from .parsing import number_of, number_of_bytes

LARGEST = 32 << 20
_MIN_LARGEST = 4096
_LEAST_KEPT = 1 << 20
_LOCAL_RANKS = 4
_WIDTH = 120  # of the report where stderr is not a terminal
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=number_of("ranks"), help="the processes to start, outside torchrun (default: 4)"
    )
    parser.add_argument(
        "--node-size", type=number_of("ranks"), metavar="N", help="treat each N ranks of one machine as a node"
    )
    parser.add_argument(
        "--transport",
        choices=("shared_memory", "process_group"),
        help="the transport inside a node (default: chosen as by redistribute)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the topology to FILE")
    parser.add_argument("--name", metavar="TEXT", help="the name of the topology")
    parser.add_argument(
        "--largest",
        type=number_of_bytes,
        metavar="BYTES",
        default=LARGEST,
        help="the most bytes that a rank sends, such as 8M (default: 32M)",
    )
    parser.add_argument(
        "--no-keep",
        dest="keep",
        action="store_false",
        help="do not keep the figures for ranks on several nodes of this kind of machine",
    )


def main(arguments: argparse.Namespace) -> int:
    given = arguments
    return run(given.ranks, given.node_size, given.transport, given.out, given.name, given.largest, given.keep)


def run(
    ranks: int | None,
    node_size: int | None,
    transport: str | None,
    out: Path | None,
    name: str | None,
    largest: int = LARGEST,
    keep: bool = True,
) -> int:
    """Measure the links, print the quality of the fit and the topology, and write the topology.

    Args:
        ranks: the number of local ranks to start; None: the ranks of torchrun, otherwise 4.
        node_size: the number of consecutive ranks that are treated as a node; None: the ranks of a machine.
        transport: the transport inside a node; None: chosen as by `redistribute` (`SHARDWEAVE_TRANSPORT`).
        out: also write the JSON to this file.
        name: the name of the topology.
        largest: the most bytes that a rank sends.
        keep: keep the figures for this kind of machine in the cache file, from which ranks on several nodes take them.
            Figures of simulated nodes, of a requested transport or of less than 1 MiB are never kept.

    Returns:
        The exit status: 1 if a rank failed.

    Raises:
        ArgumentError: a value that is not allowed, or nodes of different sizes or of ranks that are not consecutive.
    """
    in_torchrun = all(variable in os.environ for variable in _TORCHRUN)
    size = int(os.environ["WORLD_SIZE"]) if in_torchrun else ranks or _LOCAL_RANKS
    if in_torchrun and ranks not in (None, size):
        raise ArgumentError(f"--ranks: {ranks}, inside torchrun with {size}; allowed: outside torchrun only")
    if size < 2:
        raise ArgumentError(f"--ranks: {size}; allowed: 2 or more")
    transport = transport or os.environ.get("SHARDWEAVE_TRANSPORT") or None
    if transport is not None and transport not in NAMES:
        raise ArgumentError(f"--transport: {transport!r} is not known; allowed: {', '.join(NAMES)}")
    if transport == "hierarchical":
        transport = None  # which spans nodes; inside a node the transport is chosen
    if largest < _MIN_LARGEST:
        raise ArgumentError(f"--largest: {largest}; allowed: {_MIN_LARGEST} bytes or more")
    check_writable("--out", out)
    simulated = node_size is not None or pretended_node_size() is not None
    is_kept = keep and not simulated and transport is None and largest >= _LEAST_KEPT
    config = {"device": "cpu", "transport": transport, "node_size": node_size, "largest": largest, "keep": is_kept}
    return (_run_in_torchrun if in_torchrun else _run_local)(size, config, out, name)


def _run_local(size: int, config: dict[str, Any], out: Path | None, name: str | None) -> int:
    node_size_of(["here"] * size, config["node_size"])
    console = _console()
    measurements: list[dict[str, Any]] = []

    def message(rank: int, measured: dict[str, Any]) -> None:
        console.print(f"measured: {measured['kind']}")
        measurements.append(measured)

    console.print(f"{size} ranks on {os.cpu_count()} cores, torch {torch.__version__}, one thread each.")
    try:
        supervise(rank_main, size, config, message)
    except RanksFailed as failure:
        print(f"error: the calibration ends: {failure}", file=sys.stderr)
        return 1
    topology = _report(console, measurements, out, name)
    if config["keep"]:
        _keep(console, kept_figures(topology, measurements), torch.device("cpu"))
    return 0


def _run_in_torchrun(size: int, config: dict[str, Any], out: Path | None, name: str | None) -> int:
    """Measure as one rank of torchrun, on its GPU if it has one (not tested on GPUs yet)."""
    rank = int(os.environ["RANK"])
    backend = "gloo"
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        torch.cuda.set_device(local)
        config["device"], backend = f"cuda:{local}", "cpu:gloo,cuda:nccl"
    measurements: list[dict[str, Any]] = []
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds()))
        rank_main(rank, size, config, measurements.append)
        measured = kept_figures(_report(_console(), measurements, out, name), measurements) if rank == 0 else None
        figures = all_gather_json(measured)[0]
        if config["keep"] and int(os.environ.get("LOCAL_RANK", rank)) == 0:
            _keep(_console(), figures, torch.device(config["device"]))
        dist.barrier()
        dist.destroy_process_group()
    except UnsupportedError:
        raise
    except RuntimeError as error:  # a peer died or did not arrive: an error of torch or of shardweave
        print(f"error: the calibration ends: rank {rank}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # destroying a group that lost a member may hang
    return 0


def _console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH, highlight=False)


def predicted_us(topology: Topology, kind: str, sample: Sample) -> float:
    """The microseconds that the topology predicts for an exchange, or for a copy inside a rank."""
    local_us = topology.call_us + float(topology.copy_us(sample.copied))
    if kind == "local":
        return local_us
    link = topology.node if kind == "node" else topology.network
    return local_us + float(link.us(sample.nbytes, sample.peers))


def kept_figures(topology: Topology, measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a measured topology that are kept: what was measured of nodes, and of the network if there are
    several. A NIC's bandwidth is that of all ranks of a node together."""
    values = topology.to_dict()
    figures = {name: values[name] for name in ("memory_gigabytes_per_s", "call_us")}
    kinds = {measured["kind"]: measured for measured in measurements}
    if "node" in kinds:
        figures["node"] = values["node"]
    if topology.node_size is not None and "network" in kinds:
        ranks = kinds["network"]["node_size"]
        figures["network"] = {**values["network"], "gigabytes_per_s": ranks * values["network"]["gigabytes_per_s"]}
    return figures


def _keep(console: Console, figures: dict[str, Any], device: torch.device) -> None:
    try:
        path = keep_calibration(machine_kind(device), figures)
    except OSError as error:
        console.print(f"Not kept: {error}", markup=False)
        return
    console.print(f"Kept for this kind of machine in {path}: {', '.join(sorted(figures))}.", markup=False)


def _report(console: Console, measurements: Sequence[dict[str, Any]], out: Path | None, name: str | None) -> Topology:
    topology, notes = topology_of(measurements, name)
    for measured in measurements:
        kind, title = measured["kind"], "local: a copy inside each rank, all ranks at once"
        if kind != "local":
            title = f"{kind}: {measured['transport']} transport, every pair of ranks of a group at once"
        console.print(_table(title, topology, kind, samples_of(measured)))
    console.print(f"Times are medians of {ROUNDS} rounds of the slowest rank; sizes from {SMALLEST} bytes.")
    console.print("Fitted: call + latency + peers + bytes / bandwidth + copies inside a rank.\n")
    for note in notes:
        console.print(note, markup=False)
    text = topology.to_json()
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return topology


def _table(title: str, topology: Topology, kind: str, samples: Sequence[Sample]) -> Table:
    view = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for column in ("peers", "bytes\nsent", "bytes\ncopied", "measured\nµs", "fitted\nµs", "difference", "GB/s"):
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
