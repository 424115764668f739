"""Dispatch and combine on two levels: bits equal to one level, bytes between ranks equal to the floor, the choice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, dense, matrices_of, run_experts, tokens_of
from rank_processes import run_ranks
from test_processes import poisoned as poison_shared_memory
from test_processes import rounds_of, virtual_rounds

from shardweave.errors import ArgumentError, DisagreementError
from shardweave.planner import NVLINK_INFINIBAND, MachineFigures, found_topology, price_levels
from shardweave.runtime.moe import simulate
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.node_ranks import NodeRanks, numbered
from shardweave.runtime.moe.report import inside_node, on_wire
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer.fixed import FixedTransfer
from shardweave.runtime.moe.transfer.levels import two_sided_transfer, windows_inside, with_levels
from shardweave.runtime.moe.transfer.sendrecv import SendRecvTransfer
from shardweave.runtime.moe.transfer.two_level_fixed import TwoLevelFixedTransfer
from shardweave.runtime.moe.transfer.two_level_push import TwoLevelPushTransfer
from shardweave.runtime.moe.transfer.two_level_sendrecv import TwoLevelSendRecvTransfer
from shardweave.runtime.moe.transfer.two_level_window import TwoLevelWindowTransfer
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports import in_process
from shardweave.runtime.transports.comm_requests import Transfer
from shardweave.runtime.transports.in_process import InProcessTransport

CPU = torch.device("cpu")
KINDS = {
    "two levels": {"two_level": True},
    "two levels in chunks": {"two_level": True}, "one level": {"two_level": False},
    "fixed chunks": {"two_level": False, "chunk_capacity": 1 << 20},
    "two levels in fixed chunks": {"two_level": True, "chunk_capacity": 1 << 20},
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill allocations of the transport with NaN."""

    def empty(self, shape, dtype, device):
        return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=device)

    monkeypatch.setattr(InProcessTransport, "empty", empty)


def virtual(nodes: Sequence[int], in_chunks: bool = False, **settings: Any) -> VirtualTokenDispatcher:
    """A dispatcher of ranks on nodes. `in_chunks`: on two levels ranks of a node exchange messages."""
    choose = simulate.two_sided_transfer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "two_sided_transfer", lambda config, pushed: choose(config, pushed and not in_chunks))
        return VirtualTokenDispatcher(len(nodes), **with_options(one_sided=False, nodes=nodes, **settings))


def raw(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def trained(
    d: VirtualTokenDispatcher, tokens: Sequence[Tokens], matrices: torch.Tensor, weighted: bool, add: bool
) -> dict[str, list[torch.Tensor]]:
    """All results and gradients of one dispatch and combine, of each rank."""
    experts, expert_of = leaf(matrices), d.config.expert_of or range(d.config.bounds[-1])
    xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
    adds = [leaf(t.gradient) if add else None for t in tokens]
    routed = d.dispatch(xs, [t.ids for t in tokens], weights)
    outputs = []
    for rank, r in enumerate(routed):
        own = [experts[expert_of[p]] for p in range(*d.config.bounds[rank : rank + 2])]
        with r.kept():
            outputs.append(run_experts(r, own, weighted))
    ys = d.combine(outputs, routed, add=adds, weighted=weighted)
    torch.autograd.backward(ys, [t.gradient for t in tokens])
    return {
        "y": [y.detach() for y in ys], "x": [x.grad for x in xs], "weights": [w.grad for w in weights],
        "matrices": [experts.grad], "rows": [r.x.flatten(0, -2)[: int(r.num_rows)].detach() for r in routed],
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
        d = virtual(nodes, "in chunks" in kind, **settings, **given)
        two_levels, fixed = given["two_level"] and len(set(nodes)) > 1, "chunk_capacity" in given
        transfer: type = FixedTransfer if fixed else SendRecvTransfer
        if two_levels:
            transfer = TwoLevelSendRecvTransfer if "in chunks" in kind else TwoLevelPushTransfer
        if two_levels and fixed:
            transfer = TwoLevelFixedTransfer
        assert type(d.transfers[0]) is transfer
        found[kind] = trained(d, tokens, matrices, weighted, add)
    want = found["two levels"]
    for kind, results in found.items():
        for name, of_ranks in results.items():
            for rank, (a, b) in enumerate(zip(of_ranks, want[name], strict=True)):
                assert raw(a) == raw(b), f"{kind}: {name} of rank {rank}, nodes {nodes}, {settings}"
    if hidden >= shortest and not any(int(of_rank[0]) for of_rank in want["overflow"]):
        for rank, t in enumerate(tokens):
            t.add = t.gradient if add else None
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
    [([0, 0, 1, 1], 0, {}), ([0, 1, 1, 2, 2], 2, {"save": "redispatch", "capacity": 0.5}),
     ([0, 1, 2, 0, 0], 1.5, {"save": "copy", "expert_capacity": 3}), ([0, 0, 1], 1, {"align": 4})],
    ids=str,
)  # fmt: skip
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
                kind = TwoLevelFixedTransfer if two_level else FixedTransfer
                assert type(d.transfers[0]) is kind
                results = trained(d, tokens, matrices_of(7, 9, torch.bfloat16), True, True)
                found.append({name: [raw(x) for x in of_ranks] for name, of_ranks in results.items()})
                assert sum(int(of_rank[0]) for of_rank in results["overflow"])
            for name, one in found[0].items():
                assert one == found[1][name], (name, placement, routing)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 150, 30))
def test_random_nodes_tokens_and_settings(first: int) -> None:
    draw = random.Random(first)
    for seed in range(first, first + 30):
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


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Count the bytes of messages from one rank to another from now on."""
    sent: Counter[tuple[int, int]] = Counter()
    post = in_process._post

    def counted(rank, request, posted):
        if isinstance(request, Transfer):
            for peer, buffer in request.sends:
                sent[rank, peer] += buffer.numel()
        post(rank, request, posted)

    monkeypatch.setattr(in_process, "_post", counted)
    return sent


@pytest.mark.parametrize("routing", ["uniform", "hot rank", "none"])
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 2, 2, 0]], ids=str)
@pytest.mark.parametrize("capacity", [None, 1])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_bytes_between_ranks_equal_floor(
    nodes: list[int], routing: str, capacity: int | None, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token with a row on another node crosses once, to one rank of it, and its sum returns; likewise gradients.
    Where ranks of a node exchange messages, dropped rows count, too, since they are not known before tokens are sent,
    and each rank has the counts of all."""
    experts, k, hidden, size = 12, 3, 16, len(nodes)
    counts = [5 + r for r in range(size)]
    settings = settings_of(experts, k, hidden, max(counts), torch.float32, expert_capacity=capacity, overflow="drop")
    tokens = [tokens_of(r, n, k, experts, hidden, torch.float32, routing) for r, n in enumerate(counts)]
    d = virtual(nodes, in_chunks, two_level=True, **settings)
    sent = sent_bytes(monkeypatch)
    trained(d, tokens, matrices_of(experts, hidden, torch.float32), True, False)
    node_of_expert = [nodes[e // (experts // size)] for e in range(experts)]
    kept: Counter[int] = Counter()
    want: Counter[tuple[int, int]] = Counter()
    ranks = NodeRanks(numbered(nodes) or ())
    for rank, t in enumerate(tokens):
        there: list[set[int]] = []
        for ids in t.ids.tolist():
            reached = set()
            for e in ids:
                if e >= 0 and (in_chunks or capacity is None or kept[e] < capacity):
                    reached.add(node_of_expert[e])
                    kept[e] += 1
            there.append(reached)
        for node in set(nodes) - {nodes[rank]}:
            peer, number = ranks.forwarder(rank, node), sum(node in reached for reached in there)
            dropping = 8 if capacity is not None and routing != "none" and not in_chunks else 0
            # Rows, and per pair 6 bytes of expert and weight, of which two share a word; counts, and a gradient of
            # each weight.
            want[rank, peer] += number * (2 * 4 * hidden + 4 * (k + 2)) + dropping
            for other in [r for r in range(size) if nodes[r] == node] if in_chunks else [peer]:
                want[rank, other] += (experts + 2) * 4
            want[peer, rank] += number * (2 * 4 * hidden + 4 * k)
    between = {(a, b): n for (a, b), n in sent.items() if n and nodes[a] != nodes[b]}
    assert between == {pair: n for pair, n in want.items() if n}
    assert in_chunks or sum(between.values()) == sum(sent.values())


@pytest.mark.parametrize("routing", ["uniform", "none"])
@pytest.mark.parametrize("chunk_capacity", [2, 36])
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 2, 2, 0]], ids=str)
def test_bytes_in_fixed_chunks_equal_report(
    nodes: list[int], chunk_capacity: int, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However tokens are routed. All ranks have as many peers and sources, so that the report of one is that of all."""
    settings = settings_of(
        12, 3, 16, 12, torch.float32, chunk_capacity=chunk_capacity, overflow="drop", two_level=True
    )  # fmt: skip
    tokens = [tokens_of(r, 12 - 2 * r, 3, 12, 16, torch.float32, routing) for r in range(len(nodes))]
    d, sent = virtual(nodes, **settings), sent_bytes(monkeypatch)
    trained(d, tokens, matrices_of(12, 16, torch.float32), True, False)
    between = sum(n for (a, b), n in sent.items() if nodes[a] != nodes[b])
    reported = [
        on_wire(d.config, d.transfers[0], chunk_capacity),
        inside_node(d.config, d.transfers[0], chunk_capacity),
    ]
    for wire in reported:
        assert all(even == most for even, most in wire.values())
    assert [between, sent.total() - between] == [
        len(nodes) * sum(most for _, most in wire.values()) for wire in reported
    ]
    # A token has one place in a message to a node, and at most as many as rows there.
    places = min(12, 2 * chunk_capacity) * (len(set(nodes)) - 1)
    assert reported[0]["combine"][1] == places * 16 * 4
    text = d.explain()
    assert "messages of fixed size" in text and "inside a node, bytes that a rank sends for itself" in text
    assert f"{reported[1]['dispatch'][1]:>16,}  dispatch" in text


def test_ranks_take_turns_in_forwarding() -> None:
    for nodes in ([0, 0, 1, 1], [0, 1, 1, 2, 2], [0, 1, 2, 3, 3, 3], [0, 1, 0, 2, 1, 1, 0], [0, 0, 0, 0, 1]):
        ranks = NodeRanks(nodes)
        for node, members in enumerate(ranks.members):
            forwarded = [len(ranks.sources(rank)) for rank in members]
            assert sum(forwarded) == len(nodes) - len(members) and max(forwarded) - min(forwarded) <= 1
            for rank in members:
                assert all(ranks.forwarder(source, node) == rank for source in ranks.sources(rank))
    assert numbered(["b", "a", "b"]) == (0, 1, 0) and numbered(["b", "b"]) is None


def config_of(**given: Any) -> DispatchConfig:
    settings = {"num_experts": 32, "top_k": 4, "hidden": 1024, "max_tokens": 512, "dtype": torch.float32, **given}
    return DispatchConfig(4, settings.pop("nodes", [0, 0, 1, 1]), **settings)


@pytest.mark.plan
def test_levels_are_chosen_by_price() -> None:
    topology = found_topology([0, 0, 1, 1], [MachineFigures("cpu")])
    assert topology is not None
    config, why = with_levels(config_of(), CPU, "hierarchical", lambda: topology)
    assert config.two_level and why.startswith("levels: two, the cheaper on 2 nodes of 2 ranks by cpu (assumed")
    # Many nodes, short rows and many experts of each token: ids and weights outweigh what two levels save.
    nodes = list(range(16))
    config, why = with_levels(
        DispatchConfig(16, nodes, num_experts=64, top_k=8, hidden=1, max_tokens=4096, dtype=torch.bfloat16),
        CPU, "process_group", lambda: topology,
    )  # fmt: skip
    assert config.two_level is False and why.startswith("levels: one, the cheaper")
    for given, transport, device, text in (
        ({"two_level": True}, "hierarchical", CPU, "levels: two, requested"),
        ({"two_level": False}, "hierarchical", CPU, "levels: one, requested"),
        ({"two_level": True}, "process_group", torch.device("cuda"), "levels: two, requested"),
        (
            {"two_level": True, "chunk_capacity": 1 << 20},
            "process_group",
            torch.device("cuda"),
            "levels: two, requested",
        ),
    ):
        # Ranks on which the request is given publish their figures, too: others may wait for them.
        asked: list[None] = []
        config, why = with_levels(config_of(**given), device, transport, lambda asked=asked: asked.append(None))
        assert len(asked) == 1
        assert why.startswith(text) and config.two_level is text.startswith("levels: two")
    config, why = with_levels(config_of(chunk_capacity=1 << 20), CPU, "hierarchical", lambda: topology)
    assert config.two_level and why.startswith("levels: two, the cheaper on") and "messages of fixed size" in why
    config, why = with_levels(config_of(), CPU, "hierarchical", lambda: None)
    assert why == "levels: one, the machines of the ranks are not known" and config.two_level is False
    assert with_levels(config_of(nodes=None), CPU, "shared_memory", pytest.fail) == (config_of(nodes=None), "")


@pytest.mark.plan
def test_levels_of_gpus_are_chosen_by_price() -> None:
    """Eight experts of a token and two nodes of eight GPUs: half of 8 rows cross, or one. With one expert as many."""
    nodes = [rank // 8 for rank in range(16)]
    topology, cuda = found_topology(nodes, [MachineFigures("H100", "RDMA", 8)]), torch.device("cuda")
    settings = {"num_experts": 256, "hidden": 7168, "max_tokens": 4096, "dtype": torch.bfloat16}
    for name in ("process_group", "hierarchical symmetric_memory"):
        for top_k, two in ((8, True), (1, False)):
            config, why = with_levels(DispatchConfig(16, nodes, top_k=top_k, **settings), cuda, name, lambda: topology)
            assert config.two_level is two and " us and " in why and "on one, with even routing" in why, why
    # Messages inside a node cost more than memory there.
    pushed, sent = (price_levels(nodes, 4096, 8, 14336, NVLINK_INFINIBAND, pushed) for pushed in (True, False))
    assert pushed.one == sent.one and pushed.two < sent.two < sent.one and pushed.two_bytes == sent.two_bytes


@pytest.mark.plan
def test_windows_inside_nodes_with_messages_of_fixed_size() -> None:
    name, cuda = "hierarchical symmetric_memory", torch.device("cuda")
    settings = {"num_experts": 256, "hidden": 7168, "dtype": torch.bfloat16, "top_k": 8, "max_tokens": 4096}
    for number, chunk_capacity in ((2, 1 << 20), (16, None)):
        nodes = [rank // 8 for rank in range(8 * number)]
        config = DispatchConfig(len(nodes), nodes, chunk_capacity=chunk_capacity, **settings)
        topology = found_topology(nodes, [MachineFigures("H100", "RDMA", 8)])
        chosen, why = with_levels(config, cuda, name, lambda topology=topology: topology)
        assert chosen.two_level and why.startswith("levels: two, the cheaper"), why
        kind = TwoLevelWindowTransfer if chunk_capacity else TwoLevelSendRecvTransfer
        assert two_sided_transfer(chosen, False, windows_inside(nodes, name)) is kind
    assert not windows_inside([0, 1, 2], name) and not windows_inside([0, 0, 1], "process_group")
    assert not windows_inside(None, name) and not windows_inside([0, 0], name) and windows_inside([0, 1, 0], name)


@pytest.mark.plan
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


@pytest.mark.plan
def test_price_counts_bytes_of_busiest_node() -> None:
    """Half of the tokens' pairs, and 15 of 16 tokens, cross between two nodes of two ranks."""
    prices = price_levels([0, 0, 1, 1], 512, 4, 4096, NVLINK_INFINIBAND)
    assert prices.one_bytes == 2 * 512 * 4 / 2 * (4100 + 4096)
    assert prices.two_bytes == 2 * 512 * 15 / 16 * (4096 + 24 + 4096)
    assert prices.two_is_cheaper


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
    for two_level, in_chunks, chunk_capacity in (
        (False, False, None), (True, False, None), (True, True, None), (False, False, 8), (True, False, 8),
    ):  # fmt: skip
        d = virtual([0, 0, 1, 1], in_chunks, two_level=two_level, chunk_capacity=chunk_capacity, **settings)
        t = tokens_of(0, 4, 2, 4, 8, torch.float32, "uniform")
        before = stats().host_reads.total()
        routed = d.dispatch([t.x] * 4, [t.ids] * 4, [t.weights] * 4)
        d.combine([r.x for r in routed], routed)
        reads.append(stats().host_reads.total() - before)
    assert reads == [4, 4, 4, 0, 0]


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
    return bits, TokenDispatcher(**with_options(**many, transport=transport)).explain()


@pytest.mark.multi
@pytest.mark.parametrize(
    "size, node_size",
    [(3, 2), pytest.param(4, 2, marks=pytest.mark.long), pytest.param(3, 1, marks=pytest.mark.long),
     pytest.param(8, 3, marks=pytest.mark.long)],
)  # fmt: skip
def test_processes_on_pretended_nodes_equal_virtual_ranks(size: int, node_size: int, tmp_path: Path) -> None:
    """Ranks of nodes of one rank each have no common memory at all."""
    # Prices are not those that `calibrate` may have kept on this machine.
    environment = {"SHARDWEAVE_NODE_SIZE": str(node_size), "XDG_CACHE_HOME": str(tmp_path)}
    found = run_ranks(on_pretended_nodes, size, None, environment=environment)
    want = virtual_rounds(size, nodes=[rank // node_size for rank in range(size)])
    for rank, (bits, text) in enumerate(found):
        assert bits == want[rank], rank
        assert "each token once per node" in text and "levels: two, the cheaper on" in text


def disagreeing(rank: int) -> str:
    settings = settings_of(4, 2, 8, 4, torch.float32, two_level=rank == 0)
    d = TokenDispatcher(**with_options(**settings))
    with pytest.raises(DisagreementError) as error:
        d.dispatch(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    return str(error.value)


@pytest.mark.multi
@pytest.mark.long
def test_ranks_with_other_levels_disagree() -> None:
    environment = {"SHARDWEAVE_NODE_SIZE": "1", "SHARDWEAVE_TIMEOUT": "20"}
    assert all("dispatch" in text for text in run_ranks(disagreeing, 2, environment=environment))


@pytest.mark.long
@pytest.mark.parametrize("save", ["buffer", "copy"])
@pytest.mark.parametrize("in_chunks, chunk_capacity", [(False, None), (True, None), (True, 12)])
def test_compiled_equals_eager(save: str, in_chunks: bool, chunk_capacity: int | None) -> None:
    torch._dynamo.reset()
    settings = settings_of(4, 2, 8, 6, torch.float32, save=save, chunk_capacity=chunk_capacity, two_level=True)
    d = virtual([0, 1, 1], in_chunks, **settings)
    tokens = [tokens_of(r, 2 * r + 1, 2, 4, 8, torch.float32, "holes") for r in range(3)]

    def layer(xs: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        routed = d.dispatch(xs, [t.ids for t in tokens], weights)
        return d.combine([r.x * 2 for r in routed], routed)

    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
        ys = call(xs, weights)
        torch.autograd.backward(ys, [t.gradient for t in tokens])
        found.append([raw(x) for x in (*ys, *[x.grad for x in xs], *[w.grad for w in weights])])
    assert found[0] == found[1]
