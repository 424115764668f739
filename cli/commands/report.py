"""The arguments of `python -m shardweave report`."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "make one HTML page with charts from result files of bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="files written by bench --json")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from ...bench.harness import html_report

    return html_report.run(arguments.results, arguments.out)
