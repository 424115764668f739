"""The arguments of `python -m shardweave record`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from .parsing import TOPOLOGIES, number_of_bytes, topology

HELP = "run a script or module and record the redistributions of its DTensors"
_WITH_INSTALL = ("costs", "topology", "reduction", "min_bytes", "spmd_types", "adapt_fsdp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("trace.json"), help="the trace (default: %(default)s)"
    )
    parser.add_argument("--install", action="store_true", help="run the script on shardweave, as install() does")
    options = parser.add_argument_group("with --install, the arguments of install() and adapt_fsdp()")
    options.add_argument("--costs", action="store_true", help="choose sharding strategies by shardweave's costs")
    options.add_argument(
        "--topology", metavar="NAME|FILE", help=f"the links between ranks: {', '.join(TOPOLOGIES)}, or a JSON file"
    )
    options.add_argument(
        "--reduction", choices=("ordered", "fast"), help="fast: backends may reduce (default: ordered)"
    )
    options.add_argument("--min-bytes", type=number_of_bytes, metavar="BYTES", help="leave smaller tensors to torch")
    options.add_argument("--spmd-types", action="store_true", help="also run the collectives of spmd_types")
    options.add_argument(
        "--adapt-fsdp", action="store_true", help="also run the collectives of all modules sharded with FSDP2"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as in python -m")
    parser.add_argument("script", help="a Python file, or with -m a module, followed by its own arguments")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    rest.required = False  # there may be none, so the error without a script does not name them


def run(arguments: argparse.Namespace) -> int:
    from .. import record

    given: dict[str, Any] = {name: getattr(arguments, name) for name in _WITH_INSTALL}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if given and not arguments.install:
        raise ArgumentError(f"--{next(iter(given)).replace('_', '-')}: given without --install; allowed: with it")
    if "topology" in given:
        given["topology"] = topology(given["topology"])
    fsdp = given.pop("adapt_fsdp", False)
    return record.run(
        arguments.script,
        arguments.arguments,
        arguments.out,
        arguments.module,
        given if arguments.install else None,
        fsdp,
    )
