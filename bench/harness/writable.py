"""Checks that a file can be written, before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import ArgumentError, shown


def check_writable(argument: str, path: Path | None) -> None:
    """Raise where the file cannot be written; it is not touched.

    Args:
        argument: the one that named the file.
        path: None is no file, which is fine.

    Raises:
        ArgumentError: it is a folder, or cannot be written.
    """
    if path is None:
        return
    folder = path.absolute().parent
    try:
        place = path if path.exists() else folder
        writable = not path.is_dir() and folder.is_dir() and os.access(place, os.W_OK) and "\0" not in str(path)
    except OSError:  # a name that is too long
        writable = False
    if not writable:
        raise ArgumentError(
            f"{argument}: {shown(str(path))} cannot be written; allowed: a file in a folder that is there"
        )
