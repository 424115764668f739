"""Prices of token exchanges between nodes, on one level and on two, against bytes computed by hand."""

from __future__ import annotations

import pytest

from shardweave.planner import NVLINK_INFINIBAND, price_levels

pytestmark = pytest.mark.plan


def test_price_of_fixed_sizes_counts_whole_messages() -> None:
    """4 ranks on two nodes, 512 tokens, top 4: a chunk has room for 2048 rows, a node for 512 tokens, or 2 * 100."""
    prices = price_levels([0, 0, 1, 1], 512, 4, 4096, NVLINK_INFINIBAND, False, 2048)
    assert prices.one_bytes == 2 * 2 * 2048 * (4100 + 4096)
    assert prices.two_bytes == 2 * 512 * (4096 + 24 + 4096)
    few = price_levels([0, 0, 1, 1], 512, 4, 4096, NVLINK_INFINIBAND, False, 100)
    assert few.one_bytes == 2 * 2 * 100 * (4100 + 4096) and few.two_bytes == 2 * 200 * (4096 + 24 + 4096)
    assert few.two < prices.two < prices.one
    nothing = price_levels([0, 0, 1], 0, 4, 4096, NVLINK_INFINIBAND, False, 0)
    assert nothing.one_bytes == nothing.two_bytes == 0


def test_price_counts_bytes_of_busiest_node() -> None:
    """Half of the tokens' pairs, and 15 of 16 tokens, cross between two nodes of two ranks."""
    prices = price_levels([0, 0, 1, 1], 512, 4, 4096, NVLINK_INFINIBAND)
    assert prices.one_bytes == 2 * 512 * 4 / 2 * (4100 + 4096)
    assert prices.two_bytes == 2 * 512 * 15 / 16 * (4096 + 24 + 4096)
    assert prices.two_is_cheaper


def test_two_levels_are_cheaper_for_several_experts_of_a_token() -> None:
    """Two nodes of eight GPUs: half of 8 rows cross, or one; with one expert of a token as many rows cross."""
    nodes = [rank // 8 for rank in range(16)]
    eight, one = (price_levels(nodes, 4096, k, 14336, NVLINK_INFINIBAND, True) for k in (8, 1))
    assert eight.two_is_cheaper and 4 * eight.two_bytes < 1.01 * eight.one_bytes and one.two_bytes > one.one_bytes
    # Messages inside a node cost more than memory there.
    sent = price_levels(nodes, 4096, 8, 14336, NVLINK_INFINIBAND, False)
    assert eight.one == sent.one and eight.two < sent.two < sent.one and eight.two_bytes == sent.two_bytes
