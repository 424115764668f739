"""Text files that users name, which may be pipes and devices; files that are written as a whole."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

_MOST_OF_PIPE = 1 << 26  # characters


def read_text(path: Path) -> str:
    """The text of a file in UTF-8.

    Of what is no regular file, such as a pipe or a device, up to 64 Mi characters are read.

    Raises:
        OSError: it cannot be read, is a pipe or a device with more than that, or a pipe with nothing in it that no
            process has open for writing.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(path, encoding="utf-8", opener=_open_at_once) as file:
        os.set_blocking(file.fileno(), True)
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            return file.read()
        text = file.read(_MOST_OF_PIPE + 1)
        if not text and stat.S_ISFIFO(mode):
            raise OSError(errno.ENODATA, "an empty pipe that no process has open for writing")
        if len(text) > _MOST_OF_PIPE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return text


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file and return its path. Readers see the old file or the new one; a link at `path` is replaced, not
    followed.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _open_at_once(path: str, flags: int) -> int:
    # Without O_NONBLOCK a named pipe is opened when somebody opens it for writing.
    return os.open(path, flags | os.O_NONBLOCK)
