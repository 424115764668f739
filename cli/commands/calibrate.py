"""`python -m shardweave calibrate`: measure what links the ranks: those of torchrun, or local ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import interruptible, need_rich, number_of

HELP = "measure what links the ranks: those of torchrun, or local ones; JSON for plan --topology"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number_of("ranks"), help="processes to start, outside torchrun (default: 4)")
    parser.add_argument(
        "--node-size", type=number_of("ranks"), metavar="N", help="pretend nodes of N ranks on one machine"
    )
    parser.add_argument(
        "--transport",
        choices=("shared_memory", "process_group"),
        help="what ranks of a node meet in (default: as the library chooses)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the topology there")
    parser.add_argument("--name", metavar="TEXT", help="the topology's name")
    parser.add_argument(
        "--largest",
        type=number_of("bytes"),
        metavar="BYTES",
        default=32 << 20,
        help="a rank sends at most (default: %(default)s)",
    )


@interruptible
def run(arguments: argparse.Namespace) -> int:
    need_rich("calibrate")
    from .. import calibrate

    return calibrate.run(
        arguments.ranks, arguments.node_size, arguments.transport, arguments.out, arguments.name, arguments.largest
    )
