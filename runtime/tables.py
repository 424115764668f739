"""Tables as text and as HTML, by the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of cells as text. Every column but the last ones, of which there are `texts`, has numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


def as_text(tables: Sequence[Table]) -> str:
    """The tables one below the other, their columns aligned."""
    return "\n\n".join("\n".join(_lines(table)) for table in tables)


def _lines(table: Table) -> list[str]:
    columns = []
    for number, column in enumerate(zip(table.head, *table.rows, strict=True)):
        width = max(map(len, column))
        is_text = number >= len(table.head) - table.texts
        columns.append([cell.ljust(width) if is_text else cell.rjust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def as_html(tables: Sequence[Table]) -> str:
    """The tables as HTML elements."""
    return "\n".join(_html(table) for table in tables)


def _html(table: Table) -> str:
    numbers = len(table.head) - table.texts

    def row(cells: Sequence[str], tag: str) -> str:
        styles = ["right" if c < numbers else "left" for c in range(len(cells))]
        return "".join(
            f'<{tag} style="text-align: {style}">{escape(cell)}</{tag}>'
            for cell, style in zip(cells, styles, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    return f"<table><thead><tr>{row(table.head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
