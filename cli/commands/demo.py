"""The arguments of `python -m shardweave demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import need_rich, number_of

HELP = "compare shardweave with stock DTensor on redistributions of real models, on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=number_of("ranks"), default=4, help="the processes to start (default: %(default)s)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def run(arguments: argparse.Namespace) -> int:
    need_rich("the demo")
    from .. import demo

    return demo.run(arguments.ranks, arguments.only, arguments.json)
