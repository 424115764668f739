"""`python -m shardweave record`: run a script or module and record the redistributions of its DTensors."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..bench.harness.writable import check_writable
from ..bench.workloads.trace_cases import distinct
from ..errors import ArgumentError, shown
from ..runtime import install, record
from ..runtime.dtensor.fsdp import adapt_fsdp_when_first_used
from ..runtime.tracing.recording import Recording
from ..runtime.tracing.trace_file import Trace


def run(
    script: str, arguments: Sequence[str], out: Path, module: bool, install_with: Mapping[str, Any] | None, fsdp: bool
) -> int:
    """Run `script` with its arguments as `python script …` would, and write the trace to `out`.

    Args:
        module: `script` is the name of a module, to be run as by `python -m`.
        install_with: call `install` with these arguments first; None: do not.
        fsdp: also adapt the modules that the script shards with FSDP2.

    Raises:
        ArgumentError: `script` is not a file or module, or `out` cannot be written; as `install`.
        UnsupportedError: as `adapt_fsdp`.
    """
    if module:
        sys.path.insert(0, os.getcwd())
        _check_module(script)
    # Path.is_file raises where a name is too long.
    elif not os.path.isfile(script):
        raise ArgumentError(f"script: {shown(script)} is not a file; allowed: a Python file, or a module with -m")
    else:
        sys.path.insert(0, str(Path(script).absolute().parent))
    check_writable("--out", out)
    if install_with is not None:
        install(**install_with)
    if fsdp:
        adapt_fsdp_when_first_used()
    sys.argv = [script, *arguments]
    recording: Recording | None = None
    try:
        with record(out) as recording:
            if module:
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
