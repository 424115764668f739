"""Random values for the arguments of the planner: a readable shardweave error, or a result."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import tensor as torch_tensor

import shardweave
from shardweave.errors import ShardweaveError
from shardweave.planner import (
    NVLINK_INFINIBAND,
    NVLINK_NODE,
    Layout,
    Link,
    Mesh,
    Partial,
    Program,
    Replicate,
    Request,
    Shard,
    StridedShard,
    Topology,
)

pytestmark = pytest.mark.plan

LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
SLOW = Link(1, 1, False, 1)
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, True, None, 1.5, math.nan, math.inf, 2**31, 2**58, 2**62, 2**63, 2**64, 10**40, 10**5000,
    -(10**5000), 5e-324, 1e308, "1", "x", np.int64(3), np.float64(2), torch.tensor(2), [], (), {}, b"1",
]  # fmt: skip
MESHES: list[Any] = [
    (2, 2), (3,), 4, (1,), (2, 1, 2), Mesh((2, 2), ("a", "b"), (3, 1, 0, 2)), (), (0,), (-1,), "ab", None, 5.5, [2, 2],
    {2}, (1,) * 24, (1,) * 30, (True, 2), (2.0,), ((2,),), np.array([2, 2]), torch.tensor([2, 2]), 10**5000,
    (10**5000,), Mesh((2,), ranks=(5, 2**20)), Mesh((2, 2)).flatten((1, 0)), math.nan, b"ab", torch.tensor(2),
]  # fmt: skip
SHAPES: list[Any] = [
    (8, 6), (7, 5), (0, 3), (), (5,), 8, None, "ab", (2**58,), (2**59,), (2**63,), (1,) * 32, (1,) * 40, (3,) * 20,
    (-1,), (True,), (1.5,), [4, 4], np.array([4, 4]), torch.Size([4, 4]), {3, 4}, (10**5000,),
]  # fmt: skip
DTYPES: list[Any] = [
    "float32", "bfloat16", "int64", "bool", "uint16", "complex64", "float8_e8m0fnu", "float8_e4m3fn", torch.float32,
    torch.quint8, None, "x", "", 5, [], {}, "f" * 9999,
]  # fmt: skip
LAYOUTS: list[Any] = [
    "S0 S1", "R R", "P S0", "S0 S0 @ 0:1,0", "P P", "Pavg R", "S0//3 R", "S0/2 S0", "R", "S0", "P", "Pmax", "Pprod",
    "S0//5000000", "S0//99999999999", "S5", "R R R", "", None, 5, [], "(", "S0 " * 24, "S" + "9" * 5000,
    Layout((Shard(0), Replicate())), Layout((Shard(2**58),)), Layout(()), [Shard(0), Replicate()], b"R", [None, None],
    "(Shard(dim=0), Replicate())", [torch_tensor.Shard(0)], (torch_tensor.Replicate(),) * 2, ["x"],
]  # fmt: skip
TOPOLOGIES: list[Any] = [
    None, NVLINK_NODE, NVLINK_INFINIBAND, replace(NVLINK_INFINIBAND, node_size=2), "x", 5, {},
    replace(NVLINK_INFINIBAND, node_size=1 << 62, network=SLOW),
]  # fmt: skip
TEXTS: list[Any] = ["", None, 5, "{}", "[]", "1" * 5000, b"{}", b"\xff", "\ud800", "NaN", [], {}, {"mesh": 1}, {1: 2}]


def refused_or_done(call: Callable[[], Any]) -> bool:
    """Whether the call succeeded. Errors of other types, or with very long texts, fail the test."""
    try:
        call()
    except ShardweaveError as error:
        assert len(str(error)) < 3000, f"{len(str(error))} characters: {error}"
        return False
    return True


def drawn(random: Random, values: list[Any], fits: int, likely: float = 0.6) -> Any:
    return random.choice(values[:fits] if random.random() < likely else values)


def try_a_plan(random: Random) -> bool:
    requested = [
        random.choice([(2, 2), (3, 2), (2, 1), [2, 2], Mesh((2, 2), ("a", "b"), (3, 1, 0, 2))]),
        random.choice([(8, 6), (7, 5), (0, 3), (1, 4)]),
        random.choice(DTYPES[:5]),
        *random.choices([text for text in LAYOUTS[:8] if text[0] != "P"], k=2),
    ]
    for place, values in enumerate((MESHES, SHAPES, DTYPES, LAYOUTS, LAYOUTS)):
        if random.random() < 0.15:
            requested[place] = random.choice(values)
    more = {
        "topology": drawn(random, TOPOLOGIES, 4, 0.8),
        "rank": drawn(random, NUMBERS, 2),
        "max_bytes": drawn(random, [None, 10**6, 100, *NUMBERS], 2),
        "target_mesh": drawn(random, MESHES, 6),
    }
    more = {name: value for name, value in more.items() if random.random() < 0.3}

    def plan() -> None:
        program = shardweave.plan(*requested, **more)
        assert program.explain() and isinstance(program.digest, int)
        refused_or_done(lambda: shardweave.draw(program))
        assert Program.from_json(program.to_json()).to_json() == program.to_json()
        try_simulating(program, random)

    def batch() -> None:
        requests = [Request(*requested), Request((2, 2), (8, 6), "float32", "S0 S1", "S1 S0")]
        options = {name: value for name, value in more.items() if name != "target_mesh"}
        made = shardweave.plan_batch(drawn(random, [requests, 5, None, [None], "x", []], 1), **options)
        assert made.explain()

    which = random.random()
    if which < 0.2:
        return refused_or_done(batch)
    if which < 0.4:
        return refused_or_done(lambda: shardweave.redistribute_cost(*requested, drawn(random, TOPOLOGIES[1:], 3, 0.8)))
    return refused_or_done(plan)


def try_simulating(program: Program, random: Random) -> None:
    if program.rank is not None or max(program.peak_bytes) > 1 << 20:
        return
    dtype = getattr(torch, program.dtype)
    locals_: list[Any] = [torch.zeros(program.source_shape(p)).to(dtype) for p in program.ranks]
    shardweave.simulate(program, locals_)
    for wrong in ([None, *locals_[1:]], locals_[1:], 5, "x", [torch.zeros(1, 2, 3, 4), *locals_[1:]]):
        refused_or_done(lambda wrong=wrong: shardweave.simulate(program, wrong))
    for name, values in (("node_size", NUMBERS), ("backend", ["gloo", *TEXTS]), ("reduction", ["fast", *TEXTS])):
        given = random.choice(values)
        refused_or_done(lambda n=name, g=given: shardweave.simulate(program, locals_, one_sided=False, **{n: g}))


def try_a_mesh(random: Random) -> bool:
    names = [None, ("a", "b"), "ab", 5, ["a"], (1, 2), [["a"], "b"]]
    ranks = [None, None, (0, 1), range(4), 5, "ab", (0, 2**70), [0, 1, 2, None], np.arange(4), torch.arange(4)]
    dims = [*NUMBERS, "a", (0, 1), (1, 0), ["a"], ("a", "b"), [0]]

    def any_dims() -> Any:
        return random.choice(dims)

    def mesh() -> None:
        made = Mesh(random.choice(MESHES), random.choice(names), random.choice(ranks))
        for call in (made.__getitem__, made.submeshes, made.transpose, made.flatten, made.complement, made.coordinate,
                     made.position, made.rank_at, made.dim):  # fmt: skip
            refused_or_done(lambda call=call: call(any_dims()))
        for two in (made.submesh, made.flatten, made.unflatten):
            refused_or_done(lambda two=two: two(any_dims(), any_dims()))

    return refused_or_done(mesh)


def try_a_layout(random: Random) -> bool:
    def placement() -> Any:
        a, b = random.choice(NUMBERS), random.choice(NUMBERS)
        own = random.choice([False, True, 5])
        op = random.choice(["sum", "avg", *TEXTS])
        return random.choice([Replicate(), Shard(a), StridedShard(a, b, own), Partial(op), None, "R"])

    orders = [
        None,
        {},
        {0: (0, 1)},
        {0: (1, 0)},
        {0: 5},
        5,
        "x",
        {"a": (0,)},
        [(0, (0,))],
        {2**70: (0,)},
        {0: (True, 0)},
    ]

    def layout() -> None:
        made = Layout([placement() for _ in range(random.randint(0, 3))], random.choice(orders))
        assert repr(made) and isinstance(hash(made), int)
        shape = random.choice([(2, 2), (2,), (), (2, 1), (1, 1, 1)])
        for call in (made.decoded, made.without_size_one, lambda sizes: made.check(sizes, 2)):
            refused_or_done(lambda call=call: call(shape))
        if made.placements:
            assert Layout.parse(str(made)) == made

    return refused_or_done(layout)


def try_a_topology(random: Random) -> bool:
    def link() -> Link:
        return Link(
            random.choice(NUMBERS), random.choice(NUMBERS), random.choice([True, False, 1]), random.choice(NUMBERS)
        )

    def topology() -> None:
        of = [drawn(random, [SLOW, None, 5], 1) for _ in range(2)]
        Topology(
            random.choice(["a", 5, None]), random.choice(NUMBERS), *of, random.choice(NUMBERS), random.choice(NUMBERS)
        )

    for read in (Topology.from_json, Topology.from_dict, Program.from_json, Program.from_dict, Layout.parse):
        refused_or_done(lambda read=read: read(random.choice(TEXTS)))
    refused_or_done(lambda: shardweave.draw(random.choice(TEXTS)))
    refused_or_done(lambda: shardweave.simulate(random.choice(TEXTS), []))
    refused_or_done(link)
    return refused_or_done(topology)


def many(first: int, count: int) -> int:
    """The number of calls that succeeded."""
    done = 0
    for seed in range(first, first + count):
        random = Random(seed)
        what = random.choice([try_a_plan, try_a_plan, try_a_plan, try_a_mesh, try_a_layout, try_a_topology])
        try:
            done += what(random)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {what.__name__}: {type(error).__name__}: {error}") from error
    return done


def test_random_values() -> None:
    assert 30 < many(0, 400) < 300


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_random_values_at_length(part: int) -> None:
    many(10_000 + 1000 * part, 1000)
