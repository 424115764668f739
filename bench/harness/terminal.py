"""The console, tables and progress bar of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rich.console
from rich.columns import Columns
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PLAIN_WIDTH = 170
_LEAST_WIDTH = 150  # columns, of a table; with fewer its texts would be folded to a few characters


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
    """Print a table, or a block of lines for each row where the console has less than 150 columns.

    Args:
        title, rows: with rich's markup.
        texts: the names of the first columns, which are folded.
        figures: the names of the other columns.
    """
    if console.width >= _LEAST_WIDTH:
        console.print(_table(title, texts, figures, rows))
        return
    if title is not None:
        console.print(f"[italic]{title}[/italic]\n")
    names = [name.replace("\n", " ") for name in figures]
    for row in rows:
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for text, cell in zip(texts, row, strict=False):
            block.add_row(f"[bold]{text}[/bold]", cell)
        console.print(block)
        cells = row[len(texts) :]
        console.print(Columns([f"{name} {cell}" for name, cell in zip(names, cells, strict=True)], padding=(0, 3)), "")


def _table(title: str | None, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
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
