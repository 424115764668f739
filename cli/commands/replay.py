"""The arguments of `python -m shardweave replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...planner import TOPOLOGIES
from ...runtime.transports.choose_transport import NAMES
from .parsing import need_rich, number_of, topology

HELP = "run the redistributions of a trace on torch and on shardweave, and time both"


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


def run(arguments: argparse.Namespace) -> int:
    need_rich("replay")
    from .. import replay

    options = replay.Options(
        arguments.device,
        arguments.transport,
        topology(arguments.topology),
        arguments.scaled,
        arguments.only,
        arguments.most,
        arguments.json,
    )
    return replay.run(arguments.traces, options)
