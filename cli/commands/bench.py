"""The arguments of `python -m shardweave bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parsing import need_rich

PROGRAMS = (
    "host_cost",
    "codegen.aot",
    "gpu.targets",
    "suites.moe",
    "plans",
    "workloads.record_workloads",
    "baselines.autoparallel_model",
    "baselines.torch_tests",
    "suites.training",
    "reliability.faults",
    "reliability.soak",
)
HELP = "benchmark shardweave against other implementations, with checked results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Further measurements are separate programs, python -m shardweave.bench.NAME: "
        f"{', '.join(PROGRAMS)}. gpu.targets measures kernels against their targets on a GPU; make gpu runs it."
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="redistribute, kernels, dispatch, plan (default: all of these), compiled, hosts",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds; takes minutes")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write what is printed to this file")


def run(arguments: argparse.Namespace) -> int:
    need_rich("bench")
    from ...bench.harness import run as suites

    return suites.run(arguments.suites, "quick" if arguments.quick else "full", arguments.match, arguments.out)
