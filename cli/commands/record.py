"""`python -m shardweave record`: run a script, and write down what its DTensors redistribute."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from ...errors import ArgumentError, shown
from ...runtime import install, record
from ...runtime.tracing.recording import Recording
from ...runtime.tracing.trace import Trace

HELP = "run a script, and write down what its DTensors redistribute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(default: %(default)s)"
    )
    parser.add_argument("--install", action="store_true", help="run it on shardweave")
    parser.add_argument("script", type=Path, help="a Python file; what follows are its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(arguments: argparse.Namespace) -> int:
    # Path.is_file raises where a name is too long.
    if not os.path.isfile(arguments.script):
        raise ArgumentError(f"script: {shown(str(arguments.script))} is no file; allowed: a Python file")
    # As `python script …` would have it.
    sys.argv = [str(arguments.script), *arguments.arguments]
    sys.path.insert(0, str(arguments.script.absolute().parent))
    recording: Recording | None = None
    try:
        with record(arguments.out) as recording:
            if arguments.install:
                install()
            runpy.run_path(str(arguments.script), run_name="__main__")
    finally:
        if recording is not None and recording.written is not None:
            _tell(recording.written)
    return 0


def _tell(written: Path) -> None:
    """By rank 0, what is in its trace."""
    trace = Trace.read(written)
    if trace.ranks != (0,):
        return
    of = f" of rank 0 of {trace.world_size}" if trace.world_size > 1 else ""
    number = len(trace.found)
    said = f"{number} distinct redistribution{'' if number == 1 else 's'}{of}{'' if number else f': {trace.why_empty}'}"
    print(f"record: {written}: {said}", file=sys.stderr, flush=True)
