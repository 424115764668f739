"""Bytes of token dispatch at the links of hosts, beside the least that a token once per host needs; bits of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from moe_reference import Tokens, assert_near, tokens_of
from node_bytes import most_counted
from test_on_hosts import THREE, TWO, UNORDERED

import shardweave
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.link_bytes import bytes_received
from shardweave.runtime.moe.options import DispatchOptions

pytestmark = pytest.mark.multi


class Shape(NamedTuple):
    """Tokens of a rank are a function of it: `counts`, which repeats."""

    counts: tuple[int, ...]
    hidden: int
    k: int
    experts: int
    dtype: torch.dtype
    routing: str


def given(shape: Shape, rank: int) -> Tokens:
    count = shape.counts[rank % len(shape.counts)]
    return tokens_of(rank, count, shape.k, shape.experts, shape.hidden, shape.dtype, shape.routing)


def least(shape: Shape, host_of: list[int], bounds: tuple[int, ...], each: int) -> list[int]:
    """The bytes that enter each host if a token of `each` bytes is sent once to every other host that has an expert of
    it, and once back."""
    into = [0] * (max(host_of) + 1)
    for rank, host in enumerate(host_of):
        ids = given(shape, rank).ids
        rank_of_id = torch.bucketize(ids, torch.tensor(bounds[1:]), right=True).clamp(max=len(host_of) - 1)
        at = torch.tensor(host_of)[rank_of_id]
        for other in set(host_of) - {host}:
            number = int(((at == other) & (ids >= 0)).any(1).sum())
            into[other] += number * each
            into[host] += number * each
    return into


def dispatched(rank: int, shape: Shape, host_of: list[int], transport: str | None = None) -> dict[str, Any]:
    """A rank's bits on both levels, and the bytes into its host: counted and least, without and with backward."""
    t = given(shape, rank)
    bits: dict[bool | None, list[bytes]] = {}
    found: dict[str, Any] = {}
    for two_level in (False, None):
        dispatcher = shardweave.TokenDispatcher(
            num_experts=shape.experts,
            top_k=shape.k,
            hidden=shape.hidden,
            max_tokens=max(shape.counts),
            dtype=shape.dtype,
            transport=transport,
            options=DispatchOptions(two_level=two_level),
        )
        x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()

        def forward(x: torch.Tensor = x, weights: torch.Tensor = weights, d: Any = dispatcher) -> torch.Tensor:
            routed = d.dispatch(x, t.ids, weights)
            return d.combine(routed.x, routed)

        def both(x: torch.Tensor = x, weights: torch.Tensor = weights) -> list[torch.Tensor]:
            y = forward(x, weights)
            return [y.detach(), *torch.autograd.grad(y, (x, weights), t.gradient)]

        bits[two_level] = [v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in both()]
        if two_level is None:
            y, of_x, of_weights = both()
            found["explain"], bounds = dispatcher.explain(), dispatcher.config.bounds
            with torch.no_grad():
                found["forward"] = bytes_received(forward)
            found["both"] = bytes_received(both)
    assert bits[False] == bits[None], rank
    wide = [v.double() for v in (t.x, t.weights, t.gradient)]
    share = (wide[1] * (t.ids >= 0)).sum(1, keepdim=True)
    assert_near(y.detach(), wide[0] * share, shape.dtype, f"y of rank {rank}")
    assert_near(of_x, wide[2] * share, shape.dtype, f"dx of rank {rank}")
    assert_near(of_weights, (wide[0] * wide[2]).sum(1, keepdim=True) * (t.ids >= 0), torch.float32, f"dw of {rank}")
    row = shape.hidden * shape.dtype.itemsize
    found["least forward"] = least(shape, host_of, bounds, row)[host_of[rank]]
    # By messages inside a host each rank has the counts of all.
    receivers = len(set(host_of)) - 1 if transport is None else sum(host != host_of[rank] for host in host_of)
    found["counts"] = receivers * (bounds[-1] + 2) * 4
    return found


def check_bytes(start_hosts: Callable[..., Hosts], ranks: list[list[int]], shape: Shape, transport: str | None) -> None:
    host_of = [next(h for h, own in enumerate(ranks) if rank in own) for rank in range(sum(map(len, ranks)))]
    with start_hosts(ranks, gigabits=10.0) as hosts:
        found = hosts.run(dispatched, shape, host_of, transport, timeout=300)
    pair_bytes = 4 * (shape.k + (shape.k + 1) // 2)  # of a token, beside its row: experts and weights of its pairs
    row = shape.hidden * shape.dtype.itemsize
    for host, own in enumerate(ranks):
        of_host = found[own[0]]
        assert "each token once per node" in of_host["explain"] and "levels: two" in of_host["explain"]
        rows = of_host["least forward"]
        assert rows > 0
        beside = rows // row * pair_bytes + sum(found[rank]["counts"] for rank in range(len(host_of)))
        assert rows <= of_host["forward"] <= most_counted(rows + beside), (host, of_host)
        # Backward carries the gradients of weights as well: of combined and of received rows.
        assert 2 * rows <= of_host["both"] <= most_counted(2 * rows + 3 * beside), (host, of_host)


def test_token_crosses_once_per_host(start_hosts: Callable[..., Hosts]) -> None:
    """Within 15% of a token once per host and direction, headers, experts and weights included."""
    shape = Shape((256,), 512, 4, 32, torch.float32, "uniform")
    host_of = [0, 0, 1, 1]
    with start_hosts(TWO, gigabits=10.0) as hosts:
        found = [of_rank for t in (None, "process_group") for of_rank in hosts.run(dispatched, shape, host_of, t)]
    for of_rank in found:
        assert of_rank["least forward"] <= of_rank["forward"] <= 1.15 * of_rank["least forward"]
        assert 2 * of_rank["least forward"] <= of_rank["both"] <= 1.15 * 2 * of_rank["least forward"]


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, shape, transport",
    [
        (THREE, Shape((200, 0, 130), 256, 4, 10, torch.float32, "holes"), None),
        (UNORDERED, Shape((64, 300), 384, 6, 40, torch.bfloat16, "zipf"), "process_group"),
        ([[0], [1], [2]], Shape((150,), 512, 3, 9, torch.float32, "uniform"), None),
        (TWO, Shape((512,), 128, 8, 64, torch.float16, "hot rank"), "process_group"),
        ([[0, 1, 2], [3]], Shape((300, 10, 0, 77), 1000, 2, 5, torch.bfloat16, "hot"), None),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_of_hosts_are_least(
    ranks: list[list[int]], shape: Shape, transport: str | None, start_hosts: Callable[..., Hosts]
) -> None:
    check_bytes(start_hosts, ranks, shape, transport)
