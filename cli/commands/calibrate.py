"""The arguments of `python -m shardweave calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import need_rich, number_of, number_of_bytes

HELP = "measure the links between ranks of torchrun, or local ones; prints JSON for plan --topology"


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
        default=32 << 20,
        help="the most bytes that a rank sends, such as 8M (default: 32M)",
    )
    parser.add_argument(
        "--no-keep",
        dest="keep",
        action="store_false",
        help="do not keep the figures for ranks on several nodes of this kind of machine",
    )


def run(arguments: argparse.Namespace) -> int:
    need_rich("calibrate")
    from .. import calibrate

    return calibrate.run(
        arguments.ranks,
        arguments.node_size,
        arguments.transport,
        arguments.out,
        arguments.name,
        arguments.largest,
        arguments.keep,
    )
