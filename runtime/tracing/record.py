"""`record`: write the redistributions of a block to one trace per rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ArgumentError
from ..install import bind_replacements, is_installed
from .fsdp import record_fsdp
from .recording import Recording, active, set_active
from .trace_file import exception_text


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[Recording]:
    """A context manager that records the DTensor redistributions of the block, with or without `install`, and writes
    them to a trace: every distinct redistribution with its mesh, shape, dtype and layouts, the number of calls and the
    calling line, the most bytes first. `python -m shardweave replay` runs them again on torch and on shardweave.

    FSDP2's own all-gathers and reductions are included, as redistributions of the flat tensors that it communicates;
    their calling line begins with "FSDP".

    Args:
        path: the trace, a JSON file of at most 4 MiB, written when the block ends. If an exception ends the block, the
            trace names it. In a program of several ranks each rank writes its own file, with `.rank<n>` before the
            suffix; rank and world size are those of the process group, or torchrun's `RANK` and `WORLD_SIZE` before
            there is one. Traces of an earlier run of this rank, or of ranks that this program does not have, are
            removed first.

    Yields:
        The `Recording`, which counts calls; its `written` is the file, once the block has ended.

    Raises:
        ArgumentError: the trace cannot be written, or another recording is active.
    """
    path = Path(path)
    if active() is not None:
        raise ArgumentError(f"path: {str(path)!r}, but another recording is active; allowed: one at a time")
    at = path.absolute()  # the block may change the working directory
    if at.is_dir() or not os.access(at.parent, os.W_OK):
        raise ArgumentError(f"path: {str(path)!r} cannot be written; allowed: a file in an existing folder")
    recording = Recording()
    ended: str | None = None
    recording.begin(at)
    set_active(recording)
    bind_replacements(is_installed())
    record_fsdp(True)
    try:
        yield recording
    except BaseException as error:
        ended = exception_text(error)
        raise
    finally:
        set_active(None)
        bind_replacements(is_installed())
        record_fsdp(False)
        recording.end(at, ended)
