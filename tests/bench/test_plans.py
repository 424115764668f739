"""The counting of torch's plans, against figures counted from the collectives that it issues."""

from __future__ import annotations

import pytest

from shardweave.bench.plans import EVEN, byte_table, measure

pytestmark = pytest.mark.plan


def cells(table: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_byte_table_has_a_row_for_each_planner() -> None:
    rows = cells(byte_table([pair for shape in EVEN[:2] for pair in measure((2, 2), shape)]))
    assert [row[0] for row in rows] == ["torch greedy", "torch graph", "shardweave"]
    assert rows[2][2:8] == ["1.00", "1.00", "1.00", "1.0", "100.0%", "100% / 0% / 0% / 0%"]
    # With one tensor dim there are 4 layouts, with two 9: all 12 + 72 pairs are in one column or the other.
    assert all(row[1] == "66" and row[-1] == "0 of 18" for row in rows)
