"""What commands print on: a console of the width that there is, tables, and a bar of progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PLAIN_WIDTH = 170  # of a table that no terminal bounds


def console_of_tables() -> Console:
    """On stdout, as wide as the terminal; of a file or a pipe 170 columns."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def table(title: str | None, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """
    Args:
        title, rows: with rich's marks.
        texts, figures: the columns' names, those of texts, which are folded, first.
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
