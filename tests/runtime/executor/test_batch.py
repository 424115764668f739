"""Batches: each tensor's result equals that of a single call, and a round needs the exchanges of one tensor."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from test_simulate import integers, oracle, poison, shares_memory  # noqa: F401
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, LayoutSyntaxError, UnsupportedError
from shardweave.planner import NVLINK_INFINIBAND, Batch, Mesh

pytestmark = pytest.mark.plan

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.float64)
TRAINER, GENERATOR, EXPERTS = Mesh((2, 2)), Mesh((4,), ranks=(2, 3, 4, 5)), Mesh((2,), ranks=(1, 3))


def requests_of(seed: int, number: int) -> list[tuple]:
    """Requests on three meshes, some across meshes; even, uneven, empty and scalar; with and without partial."""
    random = Random(seed)
    results = []
    for _ in range(number):
        shape = random.choice([(8, 6), (7, 5), (13,), (0, 3), (), (5, 4, 3)])
        mesh, target = random.choice([TRAINER, EXPERTS]), random.choice([None, None, GENERATOR, EXPERTS])
        tokens = ["R", "P", *(f"S{d}" for d in range(len(shape)))]
        texts = [" ".join(random.choices(tokens, k=m.ndim)) for m in (mesh, target or mesh)]
        results.append((mesh, shape, random.choice(DTYPES), *texts, *([] if target is None else [target])))
    return results


def carried_out(batch: Batch, requests: list[tuple], one_sided: bool = True, node_size: int | None = None) -> None:
    given, wanted = [], []
    for number, (program, request) in enumerate(zip(batch.programs, requests, strict=True)):
        mesh, shape, dtype, source, target = request[:5]
        other = request[5] if len(request) > 5 else mesh
        contributed = integers(oracle.contribution_shape(mesh.shape, shape, source), f"{number}{source}", -2, 2, 4)
        shards = oracle.local_shards(mesh.shape, shape, source, contributed)
        held = dict(zip(mesh.rank_array.tolist(), shards, strict=True))
        nothing = torch.empty((0,) * max(len(shape), 1))
        ranks = program.mesh.rank_array.tolist()
        given.append([held.get(rank, nothing).to(dtype) for rank in ranks])
        whole = oracle.whole_of(mesh.shape, source, contributed).reshape(*(1 for _ in other.shape), *shape)
        wanted.append((other, target, oracle.local_shards(other.shape, shape, target, whole)))
    outs = shardweave.simulate(batch, given, one_sided=one_sided, node_size=node_size)
    for program, (mesh, target, expected), mine, inputs in zip(batch.programs, wanted, outs, given, strict=True):
        by_rank = dict(zip(program.mesh.rank_array.tolist(), mine, strict=True))
        got = [by_rank[rank].double() for rank in mesh.rank_array.tolist()]
        for a, b in zip(oracle.assembled(mesh.shape, target, got), expected, strict=True):
            assert a.equal(b), program.explain()
        if not program.is_identity and "P" not in target:
            assert not any(shares_memory(x, y) for x in mine for y in inputs)


@pytest.mark.parametrize(("one_sided", "node_size"), [(True, None), (False, None), (False, 2), (False, 3)])
@pytest.mark.parametrize("topology", [None, replace(NVLINK_INFINIBAND, node_size=2)], ids=["bytes", "nodes"])
@crossed("seed", range(12), gate=lambda seed: seed < 6)
def test_batch_equals_single_redistributions(seed: int, topology: Any, one_sided: bool, node_size: int | None) -> None:
    requests = requests_of(seed, 9)
    batch = shardweave.plan_batch(requests, topology=topology)
    carried_out(batch, requests, one_sided, node_size)
    if node_size:
        return
    assert batch.exchanges == max(program.exchanges for program in batch.programs)
    for rank in batch.everyone:
        alone = shardweave.plan_batch(requests, rank=rank, topology=topology)
        assert alone.digest == batch.digest
        here = batch.ranks.index(rank)
        assert alone.bytes_received == [batch.bytes_received[here]]
        assert alone.peak_bytes == [batch.peak_bytes[here]]
        assert alone.messages == [batch.messages[here]]


def test_batch_explain() -> None:
    requests = [(TRAINER, (8, 6), "bfloat16", "S0 S1", "S0", GENERATOR), (TRAINER, (7,), "float32", "R R", "R R")]
    text = shardweave.plan_batch(requests).explain()
    assert text.splitlines() == [
        "2 tensors in 1 round",
        "  received 24 B (bound 24 B, met exactly), peak 76 B",
        "  a rank exchanges with at most 4 peers over all rounds; tensor after tensor it would be 4",
        "  S0 S1 → S0   bfloat16[8, 6]: exchange, receives 24 B",
        "  R R → R R   float32[7]: nothing to do, receives 0 B",
    ]
    assert shardweave.plan_batch([]).explain() == "0 tensors in 0 rounds"
    assert shardweave.simulate(shardweave.plan_batch([]), []) == []


def test_batch_shares_latency() -> None:
    requests = [((4, 8), (64, 64), "bfloat16", "S0 S0", "R R")] * 32
    alone = shardweave.plan_batch(requests[:1], topology=NVLINK_INFINIBAND)
    batch = shardweave.plan_batch(requests, topology=NVLINK_INFINIBAND)
    assert alone.cost_us is not None and batch.cost_us is not None
    assert batch.cost_us < 32 * alone.cost_us / 2


@pytest.mark.parametrize(
    ("requests", "error", "text"),
    [
        (
            [((2, 2), (8,), "float32", "S0 R")],
            ArgumentError,
            r"requests\[0\]: .*allowed: mesh, shape, dtype, source, target",
        ),
        ([((2, 2), (8,), "float32", "S0 R", "R R"), 5], ArgumentError, r"requests\[1\]: 5; allowed"),
        ([((2, 2), (8,), "float32", "S1 R", "R R")], ArgumentError, r"requests\[0\]: source: mesh dim 0"),
        ([((2, 2), (8,), "float32", "S0 R", "R Pprod")], UnsupportedError, r"requests\[0\]: target: mesh dim 1"),
        ([((2, 2), (8,), "float32", "S0 R", "Q R")], LayoutSyntaxError, r"requests\[0\]: target: unknown token"),
        (
            [((2,), (8,), "int32", "R", "R"), ((2,), (8,), "int32", "R", "Pavg")],
            UnsupportedError,
            r"ts\[1\]: target: mesh dim 0",
        ),
        (None, ArgumentError, "requests: None; allowed: a list"),
    ],
)
def test_plan_batch_refuses(requests: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shardweave.plan_batch(requests)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"rank": "x"}, "rank: .*allowed: whole numbers"),
        ({"rank": -1}, "rank: -1; allowed: 0 and up"),
        ({"max_bytes": "much"}, "max_bytes: .*allowed: whole numbers"),
        ({"topology": -1}, "topology: -1; allowed: a Topology"),
    ],
)
def test_plan_batch_refuses_options(option: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        shardweave.plan_batch([((2,), (8,), "int32", "S0", "R")] * 2, **option)


def test_plan_batch_max_bytes_covers_all_tensors() -> None:
    requests = [((2, 2), (8, 8), "float32", "S0 S1", "R R")] * 3
    needed = 3 * (8 * 8 * 4 + 8 * 8)
    assert max(shardweave.plan_batch(requests, max_bytes=needed).peak_bytes) == needed
    with pytest.raises(ArgumentError, match=rf"max_bytes: {needed - 1}; the 3 tensors together need {needed}"):
        shardweave.plan_batch(requests, max_bytes=needed - 1)
    # The search finds a plan with less memory, the same on all ranks.
    nodes = replace(NVLINK_INFINIBAND, node_size=2)
    one = [((4, 8), (256, 256), "float32", "S0 S1", "S0 R")]
    least = max(shardweave.plan(*one[0], topology=nodes).peak_bytes) - 1
    assert max(shardweave.plan_batch(one, topology=nodes, max_bytes=least).peak_bytes) <= least
    alone = [shardweave.plan_batch(one, topology=nodes, max_bytes=least, rank=r).digest for r in (0, 31)]
    assert alone == [shardweave.plan_batch(one, topology=nodes, max_bytes=least).digest] * 2


def test_simulate_rejects_wrong_batch_inputs() -> None:
    batch = shardweave.plan_batch([((2,), (4,), "float32", "S0", "R")])
    with pytest.raises(ArgumentError, match="locals_: 0 for a batch of 1 programs"):
        shardweave.simulate(batch, [])
    with pytest.raises(ArgumentError, match=r"locals_\[0\]\[1\]: rank at mesh position 1 gave shape \(3,\)"):
        shardweave.simulate(batch, [[torch.zeros(2), torch.zeros(3)]])
