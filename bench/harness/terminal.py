"""The console, tables and progress bar of commands."""

from __future__ import annotations

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


def console_of_tables(plain_width: int = _PLAIN_WIDTH) -> Console:
    """A console on stdout, as wide as the terminal; `plain_width`: columns of a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else plain_width, highlight=False)


def print_rows(
    console: Console, title: str | None, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table, of 150 columns or more: on a narrower terminal its lines wrap.

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
    console.print(view, width=max(console.width, _LEAST_WIDTH), crop=False)


def progress_on(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
