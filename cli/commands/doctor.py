"""The arguments of `python -m shardweave doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import need_rich

HELP = "check software, settings and transports of this machine; report problems and fixes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to FILE")


def run(arguments: argparse.Namespace) -> int:
    need_rich("the doctor")
    from .. import doctor

    return doctor.run(arguments.json)
