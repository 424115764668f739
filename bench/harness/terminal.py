"""The console, tables and progress bar of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PLAIN_WIDTH = 170  # columns, of a file or a pipe


def console_of_tables() -> Console:
    """A console on stdout, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def table(title: str | None, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first columns are texts, which are folded, and whose other columns are figures.

    Args:
        title, rows: with rich's markup.
        texts, figures: the names of the columns.
    """
    view = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for name in texts:
        view.add_column(name, overflow="fold")
    for name in figures:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    return view


def progress_on(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
