"""Randomly changed program JSON is either rejected when parsed, or valid for every function that takes a program."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import shardweave
from shardweave.errors import ArgumentError, ShardweaveError
from shardweave.planner import Link, Mesh, Program

pytestmark = pytest.mark.plan

LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
SLOW = Link(latency_us=50, gigabytes_per_s=1, one_sided=False, message_us=10)
NODES = replace(shardweave.NVLINK_INFINIBAND, node_size=2, network=SLOW)
REQUESTS: list[tuple[Any, tuple[int, ...], str, str, str, dict[str, Any]]] = [
    ((2, 2), (8, 6), "float32", "S0 S1", "S1 S0", {}),
    ((2, 2), (7, 5), "bfloat16", "P S0", "S0 S0 @ 0:1,0", {}),
    ((3,), (7,), "int32", "Pmax", "R", {}),
    ((3,), (7,), "int64", "S0", "P", {}),
    ((2, 2), (4, 4), "float64", "R R", "Pavg R", {}),
    ((4,), (12,), "float32", "S0//3", "R", {}),
    ((2, 2), (9, 4), "bool", "S0//2 S0", "R S1", {}),
    ((2, 1, 2), (), "float32", "R R R", "P R R", {}),
    ((2, 2), (0, 3), "float32", "S0 S1", "R R", {}),
    ((2, 2), (8,), "float32", "R S0", "R S0", {}),
    ((4,), (16, 3), "float32", "S0", "R", {"topology": NODES}),
    ((2, 2), (8, 8), "float16", "P P", "R R", {"topology": NODES}),
    ((2, 2), (6, 4), "float32", "S0 S1", "R S0", {"rank": 2}),
    (Mesh((2, 2), ("dp", "tp"), (3, 2, 1, 0)), (6, 4), "float32", "S0 S1", "S1 S0", {}),
    ((2, 2), (6, 4), "float32", "S0 S1", "S0", {"target_mesh": Mesh((3,), ranks=(1, 4, 7))}),
    ((2,), (6, 4), "float32", "P", "R Pmax", {"target_mesh": Mesh((2, 2), ranks=range(2, 6)), "topology": NODES}),
]
NUMBERS: list[Any] = [-1, 0, 1, 2, 3, 5, 100, 2**31, 2**58, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400, 0.5, -0.0]
VALUES = [*NUMBERS, 1e308, math.nan, math.inf, -math.inf, True, False, None, "", "S0", "R", "P", "x", "1", "-1", "nan"]
VALUES += [
    "S0 S1",
    "S" + "9" * 5000,
    "float32",
    "exchange",
    "é\0",
    [],
    {},
    [0],
    [[]],
    [[[]]],
    {"a": 1},
    [None],
    "R " * 99,
]


@pytest.fixture(scope="module")
def programs() -> list[str]:
    results = []
    for mesh, shape, dtype, source, target, more in REQUESTS:
        program = shardweave.plan(mesh, shape, dtype, source, target, **more)
        assert Program.from_json(program.to_json()).to_json() == program.to_json()
        results.append(program.to_json())
    return results


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers in a JSON value, each with its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def changed(text: str, random: Random) -> str:
    """The JSON with one to three changed values, or sometimes a changed text."""
    if random.random() < 0.1:
        return of_text(text, random)
    data = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        every = list(places(data))
        # Most values of a program are in its boxes; choose other values as often.
        few = [(holder, key) for holder, key in every if isinstance(key, str)]
        holder, key = random.choice(few if few and random.random() < 0.5 else every)
        change_one(holder, key, random)
    return json.dumps(data)


def change_one(holder: Any, key: Any, random: Random) -> None:
    value, what = holder[key], random.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, list):
        holder.insert(random.randint(0, len(holder)), copy.deepcopy(random.choice([value, *VALUES])))
    elif what == 1:
        holder[random.choice(("more", "", "shape", "a b", "é"))] = copy.deepcopy(random.choice(VALUES))
    elif what <= 3 and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = random.choice((value + 1, value - 1, -value, value * 2, float(value), str(value)))
    elif what == 4 and isinstance(value, list):
        holder[key] = random.choice((value[::-1], value[:-1], value + value, [value], value[0] if value else None))
    elif what == 5 and isinstance(value, str):
        at = random.randint(0, len(value))
        holder[key] = random.choice(
            (value[:at], value[:at] + random.choice("S0R1P @:,/(\0é9") + value[at:], value * 40)
        )
    elif what == 6 and isinstance(holder, list):
        other = random.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))


def of_text(text: str, random: Random) -> str:
    at = random.randrange(len(text))
    digits = "9" * random.choice((20, 5000))
    return random.choice(
        (
            text[:at],
            text[:at] + random.choice('"{}[],:0-eN') + text[at:],
            text[:at] + text[at + 1 :],
            text.replace("4", digits, 1),
            text.replace("2", f"-{digits}", 1),
            text.replace("0", "NaN", 1),
            text.replace("[", "[" * random.choice((1, 10, 100_000)), 1),
            text * 2,
        )
    )


def check(text: str) -> bool:
    """Whether the text parses; if so, every function that takes a program must accept it."""
    try:
        program = Program.from_json(text)
    except ArgumentError as error:
        assert len(str(error)) < 1500, f"{len(str(error))} characters: {error}"
        return False
    assert program.explain()
    assert Program.from_json(program.to_json()).to_json() == program.to_json()
    assert isinstance(program.digest, int)
    try:
        assert shardweave.draw(program).startswith("<svg")
    except ShardweaveError:
        pass
    if program.rank is None:
        dtype = getattr(torch, program.dtype)
        locals_ = [torch.ones(program.source_shape(p)).to(dtype) for p in program.ranks]
        outs = shardweave.simulate(program, locals_)
        assert [tuple(x.shape) for x in outs] == [program.target_shape(p) for p in program.ranks]
    return True


def many(programs: list[str], first: int, count: int) -> int:
    """The number of texts that parsed."""
    read = 0
    for seed in range(first, first + count):
        random = Random(seed)
        text = changed(random.choice(programs), random)
        try:
            read += check(text)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return read


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_changed_programs(programs: list[str], first: int) -> None:
    assert 0 < many(programs, first, 200) < 60


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_changed_programs_at_length(programs: list[str], part: int) -> None:
    many(programs, 10_000 + 2000 * part, 2000)
