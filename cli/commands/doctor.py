"""`python -m shardweave doctor`: what this machine has, which transports ranks would use, what is off."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import interruptible, need_rich

HELP = "what this machine has, which transports ranks would use, what is off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings there")


@interruptible
def run(arguments: argparse.Namespace) -> int:
    need_rich("the doctor")
    from .. import doctor

    return doctor.run(arguments.json)
