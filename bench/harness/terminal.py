"""The console, tables and progress bar of commands."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PLAIN_WIDTH = 170
_LEAST_WIDTH = 150  # columns; with fewer, texts would be folded to a few characters


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        # rich ends the process with status 1.
        raise


def console_of_tables(plain_width: int = _PLAIN_WIDTH, least_width: int = _LEAST_WIDTH) -> Console:
    """A console on stdout.

    Args:
        plain_width: columns of a file or a pipe.
        least_width: columns on a terminal, which wraps lines if it has fewer.
    """
    is_terminal = sys.stdout.isatty()
    width = max(shutil.get_terminal_size().columns, least_width) if is_terminal else plain_width
    return Console(width=width, highlight=False)


def print_rows(
    console: Console, title: str | None, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table.

    Args:
        title, rows: with rich's markup.
        texts: the names of the first columns, which are folded.
        figures: the names of the other columns.
    """
    view = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for name in texts:
        view.add_column(name, overflow="fold")
    for name in figures:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    console.print(view)


def progress_on(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
