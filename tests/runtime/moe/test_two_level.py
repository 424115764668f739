"""Dispatch and combine on two levels: bits equal to one level, bytes between nodes, the choice."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, dense, matrices_of, tokens_of
from rank_processes import run_ranks
from test_dispatch import virtual_moe
from test_processes import leaf, raw, rounds_of, virtual_rounds
from test_processes import poisoned as poison_shared_memory

from shardweave.errors import ArgumentError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports.comm_requests import Transfer
from shardweave.runtime.transports.process_group import ProcessGroupTransport

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
KINDS = {
    "two levels": {"two_level": True}, "one level": {"two_level": False},
    "fixed chunks": {"two_level": False, "chunk_capacity": 1 << 20},
    "two levels in fixed chunks": {"two_level": True, "chunk_capacity": 1 << 20},
}  # fmt: skip


def virtual(nodes: Sequence[int], **settings: Any) -> VirtualTokenDispatcher:
    """A dispatcher of ranks on nodes."""
    return VirtualTokenDispatcher(len(nodes), **with_options(one_sided=False, nodes=nodes, **settings))


def trained(
    d: VirtualTokenDispatcher, tokens: Sequence[Tokens], matrices: torch.Tensor, weighted: bool, add: bool
) -> dict[str, list[torch.Tensor]]:
    """All results and gradients of one dispatch and combine, of each rank."""
    for t in tokens:
        t.add = t.gradient if add else None
    ys, dxs, dws, of_matrices, routed = virtual_moe(d, [*tokens], matrices, weighted)
    return {
        "y": ys, "x": dxs, "weights": dws, "matrices": [of_matrices],
        "rows": [r.x.flatten(0, -2)[: int(r.num_rows)].detach() for r in routed],
        "row weights": [r.weights.flatten()[: int(r.num_rows)].detach() for r in routed],
        "overflow": [torch.stack((r.dropped, r.bad_ids)) for r in routed],
        "load": [r.load().per_physical_expert for r in routed],
    }  # fmt: skip


def check_case(
    nodes: Sequence[int],
    tokens: Sequence[Tokens],
    settings: dict[str, Any],
    weighted: bool = True,
    add: bool = False,
    shortest: int = 8,
) -> dict[str, list[torch.Tensor]]:
    """Assert that all algorithms give the same bits, near a dense mixture without dropped rows.

    Rows of fewer than `shortest` elements are not compared with it: their terms may cancel, and what remains is small
    beside the rounding of each.
    """
    experts, hidden, dtype = settings["num_experts"], settings["hidden"], settings["dtype"]
    matrices, found = matrices_of(experts, hidden, dtype), {}
    for kind, given in KINDS.items():
        found[kind] = trained(virtual(nodes, **settings, **given), tokens, matrices, weighted, add)
    want = found["two levels"]
    for kind, results in found.items():
        for name, of_ranks in results.items():
            for rank, (a, b) in enumerate(zip(of_ranks, want[name], strict=True)):
                assert raw(a) == raw(b), f"{kind}: {name} of rank {rank}, nodes {nodes}, {settings}"
    if hidden >= shortest and not any(int(of_rank[0]) for of_rank in want["overflow"]):
        for rank, t in enumerate(tokens):
            exact = dense(t, matrices)
            for name in ("y", "x", "weights"):
                assert_near(want[name][rank], exact[name], dtype, f"{name} of rank {rank}, nodes {nodes}")
    return want


def settings_of(experts: int, k: int, hidden: int, most: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "top_k": k, "hidden": hidden, "max_tokens": most, "dtype": dtype, **more}


CASES = [
    # nodes, tokens of each rank, E, K, H, dtype, routing, further settings
    ([0, 0, 1, 1], [9, 9, 9, 9], 8, 3, 8, torch.float32, "uniform", {}),
    ([0, 1, 1, 2, 2], [7, 0, 12, 5, 3], 12, 4, 9, torch.bfloat16, "holes", {"align": 4}),
    ([0, 1, 2, 0, 1], [4, 7, 1, 9, 2], 7, 5, 11, torch.float16, "zipf", {"save": "redispatch"}),
    ([0, 0, 0, 1], [5, 5, 5, 5], 6, 2, 1, torch.bfloat16, "hot", {"save": "copy"}),
    ([0, 1, 2], [3, 8, 0], 3, 3, 8, torch.float32, "uniform", {}),
    ([1, 1, 0, 0], [6, 6, 6, 6], 3, 2, 4, torch.float32, "hot rank", {}),
    ([0, 0, 1], [0, 0, 0], 4, 2, 4, torch.float32, "uniform", {}),
    ([0, 1, 0, 1], [5, 6, 7, 8], 5, 3, 4, torch.bfloat16, "zipf", {"expert_capacity": 2, "overflow": "drop"}),
    ([0, 0, 1, 1], [8, 8, 8, 8], 9, 4, 4, torch.float32, "zipf", {"capacity": 0.5, "overflow": "drop"}),
    ([0, 0, 1, 1], [5, 4, 3, 6], 4, 2, 4, torch.float32, "holes",
     {"layout": "batched", "expert_capacity": 3, "overflow": "drop"}),
    ([0, 1, 1], [6, 6, 6], 4, 3, 8, torch.bfloat16, "holes", {"expert_map": [[0, 1, 3], [2, 0], [3, 2, 1]]}),
]  # fmt: skip


@pytest.mark.parametrize("nodes, counts, experts, k, hidden, dtype, routing, more", CASES, ids=str)
def test_two_levels_equal_one_level_and_dense(
    nodes: list[int], counts: list[int], experts: int, k: int, hidden: int, dtype: torch.dtype, routing: str, more: dict
) -> None:
    tokens = [tokens_of(r, n, k, experts, hidden, dtype, routing) for r, n in enumerate(counts)]
    settings = settings_of(experts, k, hidden, max(counts), dtype, **more)
    dropped = check_case(nodes, tokens, settings, weighted=hidden != 9, add=hidden == 8)["overflow"][0][0]
    assert bool(dropped) == ("overflow" in more)


@pytest.mark.parametrize(
    "nodes, chunk_capacity, more",
    [
        ([0, 0, 1, 1], 0, {}),
        ([0, 1, 1, 2, 2], 2, {"save": "redispatch", "capacity": 0.5}),
        ([0, 1, 2, 0, 0], 1.5, {"save": "copy", "expert_capacity": 3}),
        ([0, 0, 1], 1, {"align": 4}),
    ],
    ids=str,
)
def test_two_levels_drop_the_rows_of_one_level_in_fixed_chunks(
    nodes: list[int], chunk_capacity: int | float, more: dict[str, Any]
) -> None:
    counts = [9, 0, 12, 5, 3][: len(nodes)]
    settings = settings_of(7, 4, 9, 12, torch.bfloat16, chunk_capacity=chunk_capacity, overflow="drop", **more)
    experts = [[0, 1, 3], [2], [0, 4, 5, 6], [], [2, 3]][: len(nodes)]
    for placement in (None, experts):
        for routing in ("zipf", "hot rank"):
            tokens = [tokens_of(r, n, 4, 7, 9, torch.bfloat16, routing) for r, n in enumerate(counts)]
            found = []
            for two_level in (False, True):
                d = virtual(nodes, expert_map=placement, two_level=two_level, **settings)
                results = trained(d, tokens, matrices_of(7, 9, torch.bfloat16), True, True)
                found.append({name: [raw(x) for x in of_ranks] for name, of_ranks in results.items()})
                assert sum(int(of_rank[0]) for of_rank in results["overflow"])
            for name, one in found[0].items():
                assert one == found[1][name], (name, placement, routing)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 5 * LONG_PARTS, 10))
def test_random_nodes_tokens_and_settings(first: int) -> None:
    draw = random.Random(first)
    for seed in range(first, first + 10):
        size = draw.randint(2, 7)
        nodes = [draw.randrange(draw.randint(1, size)) for _ in range(size)]
        experts, k = draw.choice([1, 3, 8, 20]), draw.randint(1, 5)
        hidden, most = draw.choice([1, 3, 8, 20]), draw.choice([0, 1, 5, 12])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        more: dict[str, Any] = {"align": draw.choice([1, 4]), "save": draw.choice(["buffer", "copy", "redispatch"])}
        if draw.random() < 0.4:
            more |= {"overflow": "drop", "expert_capacity": draw.randint(0, 6)}
        if draw.random() < 0.3:
            more |= {"overflow": "drop", "capacity": draw.choice([0, 4, 0.5])}
        if draw.random() < 0.3:
            more["expert_map"] = [[e for e in range(experts) if draw.random() < 0.5 or e % size == r]
                                  for r in range(size)]  # fmt: skip
        routing = draw.choice(["uniform", "zipf", "hot", "hot rank", "none", "holes"])
        counts = [draw.randint(0, most) for _ in range(size)]
        tokens = [tokens_of(r, n, k, experts, hidden, dtype, routing, seed) for r, n in enumerate(counts)]
        settings = settings_of(experts, k, hidden, most, dtype, **more)
        shortest = 8 if dtype is torch.float32 else 1 << 10
        check_case(nodes, tokens, settings, draw.random() < 0.7, draw.random() < 0.5, shortest)


def test_sums_are_rounded_for_each_node() -> None:
    """Expert e adds 256, 1, 2**-7 or 0 in bfloat16: the sum depends on which of them share a node."""
    values = torch.tensor([256.0, 1.0, 2**-7, 0.0])
    t = torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    for nodes, want in ((None, 258.0), ([0, 0, 1, 1], 256.0), ([0, 1, 1, 0], 258.0), ([0, 1, 2, 2], 258.0)):
        for two_level in (False, True):
            settings = settings_of(4, 3, 1, 1, torch.bfloat16, two_level=two_level)
            d = VirtualTokenDispatcher(4, **with_options(one_sided=False, nodes=nodes, **settings))
            routed = d.dispatch(*([x] * 4 for x in t))
            outputs = [r.x + value.bfloat16() for r, value in zip(routed, values, strict=True)]
            assert [y.item() for y in d.combine(outputs, routed)] == [want] * 4, (nodes, two_level)


def test_explain_states_bytes_between_nodes() -> None:
    d = VirtualTokenDispatcher(
        4,
        **with_options(one_sided=False, nodes=[0, 0, 1, 1], two_level=True, **settings_of(8, 3, 16, 64, torch.float32)),
    )
    text = d.explain()
    assert "each token once per node that has experts of it" in text and "one chunk of exact size" in text
    assert "between nodes, bytes for the 64 tokens of one rank" in text
    even, most, counts = 56, 64, 10 * 4  # 7 of 8 tokens have an expert on the other node
    row, pairs = 16 * 4, 5 * 4
    for name, nbytes, once in (("dispatch", row + pairs, counts), ("combine", row, 0),
                               ("backward of dispatch", row + 12, 0)):  # fmt: skip
        assert f"{even * nbytes + once:>16,} {most * nbytes + once:>16,}  {name}\n" in text + "\n"


def test_virtual_dispatcher_refuses_nodes() -> None:
    given = settings_of(4, 2, 8, 4, torch.float32)
    with pytest.raises(ArgumentError, match=r"nodes: \[0, 1\] with one_sided=True; allowed: None"):
        VirtualTokenDispatcher(2, **with_options(nodes=[0, 1], **given))
    with pytest.raises(ArgumentError, match="nodes: of 3 ranks; allowed: one for each of 2"):
        VirtualTokenDispatcher(2, **with_options(nodes=[0, 1, 1], one_sided=False, **given))


def test_host_reads_as_often_as_on_one_level() -> None:
    reads, settings = [], settings_of(4, 2, 8, 4, torch.float32, expert_capacity=3, overflow="drop")
    for two_level, most in ((False, None), (True, None), (False, 1 << 20), (True, 1 << 20)):
        d = virtual([0, 0, 1, 1], two_level=two_level, chunk_capacity=most, **settings)
        t = tokens_of(0, 4, 2, 4, 8, torch.float32, "uniform")
        before = stats().host_reads.total()
        routed = d.dispatch([t.x] * 4, [t.ids] * 4, [t.weights] * 4)
        d.combine([r.x for r in routed], routed)
        reads.append(stats().host_reads.total() - before)
    assert reads == [4, 4, 0, 0]


def on_pretended_nodes(rank: int, transport: str | None) -> tuple[list[bytes], str]:
    poison_shared_memory()
    bits = rounds_of(rank, transport, two_level=True)
    for more in (
        {"two_level": None}, {"two_level": False}, {"chunk_capacity": 12 * 3, "two_level": False},
        {"save": "redispatch", "two_level": True}, {"chunk_capacity": 1 << 20, "two_level": True},
    ):  # fmt: skip
        again = rounds_of(rank, transport, **more)
        assert again == bits, more
    # By messages inside a node as well.
    many = settings_of(5, 3, 1024, 512, torch.bfloat16)
    assert "levels: two, the cheaper on" in TokenDispatcher(**with_options(**many, transport="process_group")).explain()
    for more in ({}, {"save": "redispatch"}, {"save": "copy", "chunk_capacity": 1 << 20}):
        assert rounds_of(rank, "process_group", two_level=True, **more) == bits, more
    assert rounds_of(rank, "symmetric_memory", two_level=False) == bits
    return bits, TokenDispatcher(**with_options(**many, transport=transport)).explain()


@pytest.mark.multi
@pytest.mark.parametrize(
    "size, node_size",
    [(3, 2), pytest.param(3, 1, marks=pytest.mark.long), pytest.param(8, 3, marks=pytest.mark.long)],
)
def test_processes_on_pretended_nodes_equal_virtual_ranks(size: int, node_size: int, tmp_path: Path) -> None:
    """Ranks of nodes of one rank each have no common memory at all."""
    # Prices are not those that `calibrate` may have kept on this machine.
    environment = {"SHARDWEAVE_NODE_SIZE": str(node_size), "XDG_CACHE_HOME": str(tmp_path)}
    found = run_ranks(on_pretended_nodes, size, None, environment=environment)
    want = virtual_rounds(size, nodes=[rank // node_size for rank in range(size)])
    for rank, (bits, text) in enumerate(found):
        assert bits == want[rank], rank
        assert "each token once per node" in text and "levels: two, the cheaper on" in text


LEVELS: list[tuple[dict[str, Any], str]] = [
    ({"two_level": True}, "levels: two, requested"),
    ({"two_level": False}, "levels: one, requested"),
    ({"two_level": True, "chunk_capacity": 12}, "levels: two, requested"),
]


def bytes_between_nodes(rank: int, transport: str) -> list[int]:
    """What a rank sends to other nodes in a layer and its backward, by setting."""
    sent, begin, found = 0, ProcessGroupTransport.begin, []

    def counted(self: Any, request: Any) -> Any:
        nonlocal sent
        if isinstance(request, Transfer):
            sent += sum(buffer.numel() for peer, buffer in request.sends if peer // 2 != rank // 2)
        return begin(self, request)

    ProcessGroupTransport.begin = counted  # type: ignore[method-assign]
    for more, text in LEVELS:
        settings = settings_of(12, 3, 1024, 16, torch.float32, overflow="drop", **more)
        d, t, before = TokenDispatcher(**with_options(**settings, transport=transport)), tokens_of_rank(rank), sent
        routed = d.dispatch(leaf(t.x), t.ids, leaf(t.weights))
        d.combine(routed.x * 2, routed).backward(t.gradient)
        found.append(sent - before)
        assert text in d.explain()
    return found


def tokens_of_rank(rank: int) -> Tokens:
    return tokens_of(rank, 16 - 3 * rank, 3, 12, 1024, torch.float32, "holes")


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["hierarchical", "process_group", "symmetric_memory"])
def test_a_token_crosses_once_for_each_node(transport: str) -> None:
    """To another node and back, and likewise its gradients; beside them ids, weights and counts."""
    row, ids = 4 * 1024 * 4, [tokens_of_rank(rank).ids for rank in range(4)]
    there = [(of_rank >= 6 if rank < 2 else (of_rank >= 0) & (of_rank < 6)) for rank, of_rank in enumerate(ids)]
    once, each = sum(int(t.any(1).sum()) for t in there) * row, sum(int(t.sum()) for t in there) * row
    ran = run_ranks(bytes_between_nodes, 4, transport, environment={"SHARDWEAVE_NODE_SIZE": "2"})
    # Messages of fixed size have room for all tokens, since two chunks have.
    for least, sent in zip((once, each, 4 * 16 * row), map(sum, zip(*ran, strict=True)), strict=True):
        assert least <= sent <= 1.05 * least, (ran, once, each)
