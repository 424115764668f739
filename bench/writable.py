"""Whether a file can be written, asked before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError


def check_writable(argument: str, path: Path | None) -> None:
    """
    Args:
        argument: the one that named the file.
        path: None is no file, which is fine.

    Raises:
        ArgumentError: it is a folder, or cannot be written; it is not touched.
    """
    if path is None:
        return
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not (path.exists() or place.is_dir()) or not os.access(place, os.W_OK):
        raise ArgumentError(f"{argument}: {str(path)!r} cannot be written; allowed: a file in a folder that is there")
