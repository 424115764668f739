"""Standard output and error of commands: closed, lost, or of an encoding that lacks characters."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

_SPELLINGS = {"→": "->", "×": "x", "…": "...", "±": "+-", "÷": "/", "µ": "u", "∪": "|", "“": '"', "”": '"'}


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """The error handler of codecs: characters that an encoding lacks, in ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLINGS.get(character, "?") for character in lacking), error.end


codecs.register_error("shardweave", _spelled)


@contextmanager
def spelled_in_ascii() -> Iterator[None]:
    """A context in which characters that the encoding of standard output or error lacks are printed in ASCII."""
    streams = [
        stream
        for stream in (sys.stdout, sys.stderr)
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf")
    ]
    errors = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="shardweave")
    try:
        yield
    finally:
        for stream, before in zip(streams, errors, strict=True):
            stream.reconfigure(errors=before)


def open_streams() -> bool:
    """Open standard output and error to nowhere if they are closed. Returns whether standard output was."""
    was_closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    return was_closed


def print_wrapped(text: str) -> None:
    """Print lines: on a terminal wrapped between words, in a file or a pipe as they are."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, columns) for line in text.split("\n"))
    print(text)


def _wrapped(line: str, columns: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def lost_output() -> OSError | None:
    """Why standard output cannot be written, if it cannot. What is left of it goes nowhere, also at the end."""
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
