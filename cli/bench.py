"""`python -m shardweave bench SUITE …`: measures suites and prints a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..bench.harness.machine import provenance
from ..bench.harness.markdown import as_markdown
from ..bench.harness.measure import measure, suite
from ..bench.harness.writable import check_writable
from ..bench.suites import ON_REQUEST, SUITES
from ..errors import ArgumentError

PROGRAMS = (
    "host_cost",
    "codegen.aot",
    "gpu.timings",
    "plans",
    "baselines.autoparallel_model",
    "baselines.torch_tests",
    "suites.training",
    "reliability.faults",
    "reliability.soak",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Further measurements are separate programs, python -m shardweave.bench.NAME: "
        f"{', '.join(PROGRAMS)}. gpu.timings is for a GPU; make gpu runs it."
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="redistribute, dispatch (default: both), compiled, hosts",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds; takes minutes")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write what is printed to this file")


def main(arguments: argparse.Namespace) -> int:
    """Measure suites and print the tables, with the command, the machine and the commit.

    Returns:
        The exit status: 1 if a result was wrong or could not be measured.

    Raises:
        ArgumentError: an unknown suite, no case with that name, a file that cannot be written.
    """
    names, match, out = arguments.suites, arguments.match, arguments.out
    scale = "quick" if arguments.quick else "full"
    for name in names:
        if name not in (*SUITES, *ON_REQUEST):
            allowed = f"{', '.join((*SUITES, *ON_REQUEST))}, or none for all but {', '.join(ON_REQUEST)}"
            raise ArgumentError(f"suite: {name!r}; allowed: {allowed}")
    chosen = list(dict.fromkeys(names)) or list(SUITES)
    check_writable("--out", out)
    cases = {name: [case for case in suite(name).cases(scale) if match in case] for name in chosen}
    if not any(cases.values()):
        raise ArgumentError(f"--match: {match!r} is in no case's name of {', '.join(chosen)}; allowed: part of one")
    results = measure(cases, scale)
    page = as_markdown(results, provenance())
    print(page)
    if out is not None:
        out.write_text(page, encoding="utf-8")
        print(f"written: {out}", file=sys.stderr)
    return int(bool(results.faults or not results.rows))
