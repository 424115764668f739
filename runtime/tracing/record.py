"""`record`: what a block of a program redistributes, as a trace of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ArgumentError
from ..dtensor.install import bind_replacements, is_installed
from .fsdp import note_fsdp
from .recording import Recording, active, write_down
from .trace import exception_text


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[Recording]:
    """Writes down what DTensors the block redistributes, whether shardweave is installed or not: every distinct
    redistribution with its mesh, shape, dtype and layouts, how often and from where it was asked for, those that move
    most bytes first. `python -m shardweave replay` carries them out again, by torch and by shardweave.

    The gathers and reductions that FSDP2 issues itself are among them, as the flat tensors that it moves; where they
    come from begins with "FSDP".

    Args:
        path: of the trace, JSON of at most 4 MiB, written when the block ends, also by an exception, which it then
            names. Where the program has several ranks each writes its own, with `.rank<n>` before the suffix: rank and
            world size are the process group's, or torchrun's `RANK` and `WORLD_SIZE` where there is none yet. What an
            earlier run left there of this rank, or of ranks that the program does not have, is removed first.

    Raises:
        ArgumentError: the trace cannot be written; nothing is recorded inside of another `record`.
    """
    path = Path(path)
    if active() is not None:
        raise ArgumentError(f"path: {str(path)!r}, but another recording is running; allowed: one at a time")
    at = path.absolute()  # the block may change its folder
    if at.is_dir() or not os.access(at.parent, os.W_OK):
        raise ArgumentError(f"path: {str(path)!r} cannot be written; allowed: a file in a folder that is there")
    recording = Recording()
    ended: str | None = None
    recording.begin(at)
    write_down(recording)
    bind_replacements(is_installed())
    note_fsdp(True)
    try:
        yield recording
    except BaseException as error:
        ended = exception_text(error)
        raise
    finally:
        write_down(None)
        bind_replacements(is_installed())
        note_fsdp(False)
        recording.end(at, ended)
