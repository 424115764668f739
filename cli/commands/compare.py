"""The arguments of `python -m shardweave compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import need_rich

HELP = "compare two result files of bench: cases that became slower or faster beyond noise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A.json", help="the results to compare with")
    parser.add_argument("after", type=Path, metavar="B.json", help="the results that may be slower or faster")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        metavar="PART",
        help="ignore changes of less than this part (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    need_rich("compare")
    from ...bench.harness import compare

    return compare.run(arguments.before, arguments.after, arguments.threshold)
