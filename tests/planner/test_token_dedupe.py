"""Prices of tokens that cross once for each rank, against figures computed by hand and by enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from shardweave.planner.cost.hardware import MachineFigures
from shardweave.planner.cost.token_dedupe import LAUNCH_US, price_dedupe, reached_shares
from shardweave.planner.cost.topology import NVLINK_NODE, Link

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("experts, k", [((2, 2), 1), ((3, 2), 3), ((1, 0, 4), 2), ((2, 3, 1), 6), ((1, 1), 5)])
def test_reached_shares_equal_enumeration(experts: tuple[int, ...], k: int) -> None:
    rank_of = [rank for rank, n in enumerate(experts) for _ in range(n)]
    chosen = list(combinations(rank_of, min(k, len(rank_of))))
    for rank, share in enumerate(reached_shares(experts, k)):
        assert share == pytest.approx(sum(rank in ranks for ranks in chosen) / len(chosen))


def test_price_of_two_ranks() -> None:
    """2 experts of 4: 1 of a token's 2 pairs crosses, and 5 of 6 tokens."""
    topology = replace(NVLINK_NODE, node=Link(0.0, 1.0, one_sided=True), memory_gigabytes_per_s=1e6)  # 1 kB per µs
    prices = price_dedupe((2, 2), 60, 2, 1000, 500, 700, 2, topology)
    assert prices.each_bytes == 60 * (1000 + 4 + 500)
    tables = 60 * 2 * 8
    assert prices.once_bytes == pytest.approx(50 * (1000 + 700) + tables)
    assert prices.each == pytest.approx(prices.each_bytes / 1000, rel=1e-3)
    assert prices.once == pytest.approx(2 * LAUNCH_US + prices.once_bytes / 1000, rel=1e-2)
    # Copies of what lies in no pooled buffer: 120 rows of a rank, read and written.
    slow = replace(topology, node=Link(0.0, 1e6, one_sided=True), memory_gigabytes_per_s=1.0)
    none, one, two = (price_dedupe((2, 2), 60, 2, 1000, 500, 700, n, slow) for n in range(3))
    assert none.each - one.each == pytest.approx(240) and one.each - two.each == pytest.approx(120)
    assert none.once == one.once == two.once


def test_cheaper_where_tokens_have_several_experts_on_a_rank() -> None:
    topology, row = MachineFigures("NVIDIA H200", "RDMA").topology(), 7168 * 2

    def prices(ranks: int, top_k: int, tokens: int, combined: int = row):
        return price_dedupe([256 // ranks] * ranks, tokens, top_k, row, combined, row, 2, topology)

    training = prices(8, 8, 4096)
    assert training.once_is_cheaper
    # 411 MB in place of 271 MB, once for a dispatch and once for a combine.
    assert training.each_bytes == pytest.approx(2 * 411e6, rel=1e-2)
    assert training.once_bytes == pytest.approx(2 * 271e6, rel=1e-2)
    assert not prices(8, 1, 4096).once_is_cheaper and not prices(8, 8, 1).once_is_cheaper
    assert not prices(64, 8, 4096).once_is_cheaper
    assert prices(8, 8, 4096, row // 2).each < training.each
