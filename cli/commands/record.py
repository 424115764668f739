"""The arguments of `python -m shardweave record`."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "run a script and record the redistributions of its DTensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("trace.json"), help="the trace (default: %(default)s)"
    )
    parser.add_argument("--install", action="store_true", help="run the script on shardweave")
    parser.add_argument("script", type=Path, help="a Python file, followed by its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    from .. import record

    return record.run(arguments.script, arguments.arguments, arguments.out, arguments.install)
