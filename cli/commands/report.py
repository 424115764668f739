"""`python -m shardweave report`: result files of bench as one HTML page, with pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "result files of bench as one HTML page, with pictures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="files that bench --json has written")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="(default: %(default)s)")
    parser.add_argument(
        "--projection",
        type=Path,
        metavar="FILE",
        help="what python -m shardweave.bench.planning.projection has written",
    )


def run(arguments: argparse.Namespace) -> int:
    from ...bench.harness import html_report

    return html_report.run(arguments.results, arguments.out, arguments.projection)
