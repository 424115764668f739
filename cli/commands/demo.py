"""`python -m shardweave demo`: real models' redistributions, against stock DTensor, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import interruptible, need_rich, number_of

HELP = "real models' redistributions, against stock DTensor, on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number_of("ranks"), default=4, help="processes to start (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")


@interruptible
def run(arguments: argparse.Namespace) -> int:
    need_rich("the demo")
    from .. import demo

    return demo.run(arguments.ranks, arguments.only, arguments.json)
