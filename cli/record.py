"""`python -m shardweave record`: run a script or module and record the redistributions of its DTensors."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from ..bench.harness.writable import check_writable
from ..bench.workloads.trace_cases import distinct
from ..errors import ArgumentError, shown
from ..planner import TOPOLOGIES
from ..runtime.dtensor.fsdp import adapt_fsdp_when_first_used
from ..runtime.install import install
from ..runtime.tracing.record import record
from ..runtime.tracing.recording import Recording
from ..runtime.tracing.trace_file import Trace
from .parsing import topology

_WITH_INSTALL = ("costs", "topology", "reduction", "spmd_types", "adapt_fsdp")


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
    options.add_argument("--spmd-types", action="store_true", help="also run the collectives of spmd_types")
    options.add_argument(
        "--adapt-fsdp", action="store_true", help="also run the collectives of all modules sharded with FSDP2"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as in python -m")
    parser.add_argument("script", help="a Python file, or with -m a module, followed by its own arguments")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    rest.required = False  # there may be none, so the error without a script does not name them


def main(arguments: argparse.Namespace) -> int:
    """Run a script with its arguments as `python script …` would, and write the trace.

    Raises:
        ArgumentError: the script is not a file or module, or the trace cannot be written; as `install`.
        UnsupportedError: as `adapt_fsdp`.
    """
    script, options = arguments.script, {name: getattr(arguments, name) for name in _WITH_INSTALL}
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    if options and not arguments.install:
        raise ArgumentError(f"--{next(iter(options)).replace('_', '-')}: given without --install; allowed: with it")
    if "topology" in options:
        options["topology"] = topology(options["topology"])
    fsdp = options.pop("adapt_fsdp", False)
    if arguments.module:
        sys.path.insert(0, os.getcwd())
        _check_module(script)
    # Path.is_file raises where a name is too long.
    elif not os.path.isfile(script):
        raise ArgumentError(f"script: {shown(script)} is not a file; allowed: a Python file, or a module with -m")
    else:
        sys.path.insert(0, str(Path(script).absolute().parent))
    check_writable("--out", arguments.out)
    if arguments.install:
        install(**options)
    if fsdp:
        adapt_fsdp_when_first_used()
    sys.argv = [script, *arguments.arguments]
    recording: Recording | None = None
    try:
        with record(arguments.out) as recording:
            if arguments.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    finally:
        if recording is not None and recording.written is not None:
            _summarize(recording.written)
    return 0


def _check_module(name: str) -> None:
    """Check that a module can be run. Imports the packages that it is in.

    Raises:
        ArgumentError: there is no such module, or it is a package without `__main__`.
    """
    found = None
    try:
        if not name.startswith("."):
            found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except ValueError:  # no name at all
        pass
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # imported by one of the packages
            raise
    if found is None:
        raise ArgumentError(
            f"script: {shown(name)} is not a module that can be run; allowed with -m: a module, or a package with "
            f"__main__"
        )


def _summarize(written: Path) -> None:
    """Print the number of redistributions in the trace of rank 0."""
    trace = Trace.read(written)
    if trace.ranks != (0,):
        return
    of = f" of rank 0 of {trace.world_size}" if trace.world_size > 1 else ""
    number = len(distinct(trace))  # as `replay` counts: the same from several lines is one
    count = (
        f"{number} distinct redistribution{'' if number == 1 else 's'}{of}{'' if number else f': {trace.why_empty}'}"
    )
    print(f"record: {written}: {count}", file=sys.stderr, flush=True)
