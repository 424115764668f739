"""Prices of token exchanges by kind of split sizes, against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.planner.cost.token_splits import HOST_READ_US, price_splits
from shardweave.planner.cost.topology import NVLINK_INFINIBAND, NVLINK_NODE, Link

pytestmark = pytest.mark.plan
LINK = Link(latency_us=2.0, gigabytes_per_s=1.0, one_sided=False, message_us=1.0)


def test_price_splits_on_one_node():
    topology = replace(NVLINK_NODE, node=LINK)
    # 2 µs of latency, 1 µs for each of 3 peers, and 1 kB per µs.
    prices = price_splits("aaaa", 40, 16, 1000, topology, True)
    assert prices.host == 2 + 3 + 30 + HOST_READ_US and prices.fixed == 2 + 3 + 48
    assert prices.cheaper == "fixed"
    prices = price_splits("aaaa", 40, 16, 1000, topology, False)
    assert prices.host == 2 + 3 + 30 and prices.cheaper == "host"


def test_price_splits_takes_slowest_rank():
    topology = replace(NVLINK_INFINIBAND, node=LINK, network=replace(LINK, gigabytes_per_s=0.5))
    # Rank 4 is alone on its node and has four peers over the network.
    prices = price_splits("aabbc", 50, 10, 1000, topology, False)
    assert prices.host == 2 + 4 + 80 and prices.fixed == 2 + 4 + 80


def test_price_splits_cheaper_by_tokens():
    row, nodes = 7168 * 2, [rank // 8 for rank in range(16)]
    few, many = (price_splits(nodes, t * 8, t * 8, row, NVLINK_INFINIBAND, True) for t in (1, 4096))
    assert few.cheaper == "fixed" and many.cheaper == "host"
