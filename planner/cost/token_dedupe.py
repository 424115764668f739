"""The price of a token exchange inside a node: a row to each expert of a token, or one to each rank that has any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from .topology import Topology

LAUNCH_US = 5.0
"""Microseconds of one more launch among those of a dispatch. An assumption, not a measurement."""
_WEIGHT = 4
_ENTRY = 8  # bytes of a pair in a table: its row and its weight


@dataclass(frozen=True)
class DedupePrices:
    """The estimated microseconds of a dispatch and a combine, and the bytes that the busiest rank sends to others or
    receives from them.

    Attributes:
        each, once: microseconds if a token crosses once for each of its experts, and once for each rank.
        each_bytes, once_bytes: bytes likewise.
    """

    each: float
    once: float
    each_bytes: float
    once_bytes: float

    @property
    def once_is_cheaper(self) -> bool:
        return self.once < self.each


def price_dedupe(
    experts: Sequence[int],
    tokens: int,
    top_k: int,
    dispatched_bytes: int,
    combined_bytes: int,
    sum_bytes: int,
    pooled_buffers: int,
    topology: Topology,
) -> DedupePrices:
    """Estimate a dispatch and a combine of evenly routed tokens, each with `top_k` different experts.

    A launch takes as long as its bytes on the link, or as those that it reads and writes in memory, whichever is more.

    Args:
        experts: the experts of each rank.
        tokens: the tokens of each rank.
        dispatched_bytes, combined_bytes: of a row that goes to an expert, and of one that returns from it.
        sum_bytes: of a sum of rows.
        pooled_buffers: into which rows are written without a copy: with one those of dispatch, with two those of both.
        topology: its link inside a node is used.
    """
    ranks, link, memory = len(experts), topology.node.gigabytes_per_s * 1e3, topology.memory_gigabytes_per_s * 1e3
    pairs = [tokens * top_k * n / sum(experts) for n in experts]  # of a rank's tokens, on each rank
    reached = [tokens * share for share in reached_shares(experts, top_k)]

    def crossing(of_each: list[float]) -> float:
        return max(sum(of_each) - min(of_each), (ranks - 1) * max(of_each))

    rows, sums, here = crossing(pairs), crossing(reached), ranks * max(pairs)  # here: rows of the fullest rank
    arrived = ranks * max(reached)
    tables = (ranks - 1) * tokens * top_k * _ENTRY

    def launch(on_link: float, in_memory: float) -> float:
        return max(on_link / link, in_memory / memory)

    each = launch(rows * (dispatched_bytes + _WEIGHT), (tokens + here) * dispatched_bytes)
    each += launch(0, 2 * here * dispatched_bytes) * (pooled_buffers < 1)
    each += launch(0, 2 * here * combined_bytes) * (pooled_buffers < 2)
    each += launch(rows * combined_bytes, here * combined_bytes + tokens * sum_bytes)
    once = launch(tables, 2 * tokens * dispatched_bytes)
    once += launch(sums * dispatched_bytes, (arrived + here) * dispatched_bytes)
    once += launch(sums * sum_bytes, here * combined_bytes + arrived * sum_bytes)
    once += launch(0, (sum(reached) + tokens) * sum_bytes)
    each_bytes = rows * (dispatched_bytes + _WEIGHT + combined_bytes)
    once_bytes = tables + sums * (dispatched_bytes + sum_bytes)
    return DedupePrices(each, once + 2 * LAUNCH_US, each_bytes, once_bytes)


def reached_shares(experts: Sequence[int], top_k: int) -> list[float]:
    """The share of evenly routed tokens that have any of their `top_k` different experts on each rank.

    Args:
        experts: the experts of each rank.
    """
    total = sum(experts)
    k = min(top_k, total)
    return [1 - comb(total - n, k) / comb(total, k) for n in experts]
