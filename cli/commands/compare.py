"""`python -m shardweave compare`: two result files of bench: what got slower or faster beyond noise."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import need_rich

HELP = "two result files of bench: what got slower or faster beyond noise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument(
        "--threshold", type=float, default=0.1, metavar="PART", help="slower by less is none (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    need_rich("compare")
    from ...bench.harness import compare

    return compare.run(arguments.before, arguments.after, arguments.threshold)
