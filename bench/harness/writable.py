"""Checks that a file can be written, before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import ArgumentError, shown


def check_writable(argument: str, path: Path | None) -> None:
    """Check that the file can be written, without touching it; None is no file.

    Raises:
        ArgumentError: it is a folder, or cannot be written; the text names `argument`.
    """
    if path is None:
        return
    folder = path.absolute().parent
    try:
        if folder.is_dir() and not path.is_dir() and os.access(path if path.exists() else folder, os.W_OK):
            return
    except (OSError, ValueError):  # a name that is too long, or with a null byte
        pass
    raise ArgumentError(f"{argument}: {shown(str(path))} cannot be written; allowed: a file in a folder that is there")
