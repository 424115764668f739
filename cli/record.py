"""`python -m shardweave record`: run a script and record the redistributions of its DTensors."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, shown
from ..runtime import install, record
from ..runtime.tracing.recording import Recording
from ..runtime.tracing.trace_file import Trace


def run(script: Path, arguments: Sequence[str], out: Path, on_shardweave: bool) -> int:
    """Run `script` with its arguments as `python script …` would, and write the trace to `out`.

    Args:
        on_shardweave: call `install` first.

    Raises:
        ArgumentError: `script` is not a file, or `out` cannot be written.
    """
    # Path.is_file raises where a name is too long.
    if not os.path.isfile(script):
        raise ArgumentError(f"script: {shown(str(script))} is not a file; allowed: a Python file")
    check_writable("--out", out)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    recording: Recording | None = None
    try:
        with record(out) as recording:
            if on_shardweave:
                install()
            runpy.run_path(str(script), run_name="__main__")
    finally:
        if recording is not None and recording.written is not None:
            _summarize(recording.written)
    return 0


def _summarize(written: Path) -> None:
    """Print the number of redistributions in the trace of rank 0."""
    trace = Trace.read(written)
    if trace.ranks != (0,):
        return
    of = f" of rank 0 of {trace.world_size}" if trace.world_size > 1 else ""
    number = len(trace.redistributions)
    count = (
        f"{number} distinct redistribution{'' if number == 1 else 's'}{of}{'' if number else f': {trace.why_empty}'}"
    )
    print(f"record: {written}: {count}", file=sys.stderr, flush=True)
