"""What commands print on: a console of the width that there is, and tables that can be read at any."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_PLAIN_WIDTH = 170  # of a table that no terminal bounds
_LEAST_WIDTH = 14  # of a column of texts, which are folded


def console_of_tables() -> Console:
    """On stdout, as wide as the terminal; of a file or a pipe 170 columns."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def show_table(
    console: Console, title: str, texts: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A table; where that would leave too little of its texts, each row in lines of its own.

    Args:
        title, rows: with rich's marks.
        texts, figures: the columns' names, those of texts first; of figures perhaps in two lines.
    """
    view = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for place, name in enumerate(texts):
        longest = max((console.measure(row[place]).maximum for row in rows), default=0)
        view.add_column(name, overflow="fold", min_width=min(_LEAST_WIDTH, longest))
    for name in figures:
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    unbounded = console.options.update(width=1000)
    if Measurement.get(console, unbounded, view).minimum <= console.width:
        console.print(view)
        return
    console.print(f"[bold]{title}[/bold]")
    for row in rows:
        said = [text.replace("\n", ", ") for text in row[: len(texts)]]
        console.print(f" • {'; '.join(said)}")
        console.print("   " + ", ".join(map(_in_words, figures, row[len(texts) :])))


def _in_words(name: str, figure: str) -> str:
    """A figure in a line: its unit, which is the second line of the column's name, comes after it."""
    what, _, more = name.partition("\n")
    if more not in ("ms", "MB"):
        return f"{what} {more} {figure}".replace("  ", " ")
    value, _, spread = figure.partition(" ±")
    return f"{what} {value} {more}" + (f" ±{spread.strip()}" if spread else "")
