"""`python -m shardweave replay`: carry a trace out again, by torch and by shardweave, and time both."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...runtime.transports.select import NAMES
from .shared import TOPOLOGIES, interruptible, need_rich, number_of, topology

HELP = "carry a trace out again, by torch and by shardweave, and time both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="of the ranks of one run of a program")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="that ranks have (default: cpu)")
    parser.add_argument("--transport", choices=NAMES, help="that ranks meet in (default: as the library chooses)")
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"price both sides on it, and run nothing: {', '.join(TOPOLOGIES)}, or a JSON file (default: run; "
        "programs of more ranks than start here: nvlink-infiniband)",
    )
    parser.add_argument("--scaled", action="store_true", help="with an eighth of every size of 64 and more")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those with this in place or layouts")
    parser.add_argument(
        "--most",
        type=number_of("redistributions"),
        default=64,
        metavar="N",
        help="run the N that move most bytes; of what is priced show N rows (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")


@interruptible
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
