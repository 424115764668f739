"""Parsers on random text: changed pieces of what they write, and of what users type. Each raises only the package's own
exceptions, in little time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from variants import crossed

import shardweave
from shardweave.__main__ import main
from shardweave.errors import ArgumentError, ShardweaveError, UnsupportedError
from shardweave.planner import NVLINK_INFINIBAND, NVLINK_NODE, Layout, MachineFigures, Mesh, Program, Topology
from shardweave.runtime.tracing.trace_file import Trace
from shardweave.runtime.transports.machine_figures import from_text, to_text

pytestmark = pytest.mark.plan

ROOT = Path(shardweave.__file__).parent
MOST_SECONDS = 2.0  # of the process, for one input
MOST_MEBIBYTES = 512  # that the process may grow by
ODD = (
    None, True, -1, 0, 1, 2**31, 2**70, -(2**63), 1e308, 5e-324, float("nan"), float("inf"), "", "S0", "R" * 3000, "\0",
    "💥", [], {}, [[[[[]]]]], {"a": {}}, [0] * 2000, "1" * 5000,
)  # fmt: skip
PIECES = (
    "S0", "S1//2", "R", "Pavg", "@", "0:1,0", "S0/0", "S99999999999999999999", " ", "\t", "\n", ",", "(", ")", "-", "_",
    "Shard(dim=0)", "0x1", "1e9", "\ud800", "é", "[" * 500, "{", "}", '"', ":", "null", "NaN", "9" * 400,
)  # fmt: skip


def changed_text(text: str, random: Random) -> str:
    for _ in range(random.randint(1, 4)):
        a, b = sorted(random.randint(0, len(text)) for _ in range(2))
        if random.random() < 0.5:
            b = min(b, a + 5)
        middle = random.choice(("", text[a:b] * 2, random.choice(PIECES), chr(random.randrange(32, 127)), text[b:a:-1]))
        text = (text[:a] + middle + text[b:])[: 1 << 20]
    return text


def changed_json(text: str, random: Random) -> str:
    """JSON with some values replaced, left out or moved; one in four is text that is changed anywhere."""
    if random.random() < 0.25:
        return changed_text(text, random)
    data = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    collect(data)
    for node, key in random.sample(places, min(len(places), random.randint(1, 3))):
        if not (key in node if isinstance(node, dict) else key < len(node)):
            continue
        change = random.randrange(4)
        if change == 0:
            del node[key]
        elif change == 1:
            other, place = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                node[key] = json.loads(json.dumps(other[place]))
        else:
            node[key] = random.choice(ODD)
    return json.dumps(data)


def layout(text: str, folder: Path) -> None:
    Layout.parse(text)
    Layout.parse(text, (2, 3))


def topology(text: str, folder: Path) -> None:
    Topology.from_json(text).to_json()


def figures(text: str, folder: Path) -> None:
    assert from_text(to_text(from_text(text))) == from_text(text)


def program(text: str, folder: Path) -> None:
    """What parses is valid for every function that takes a program."""
    program = Program.from_json(text)
    assert program.explain() and isinstance(program.digest, int)
    assert Program.from_json(program.to_json()).to_json() == program.to_json()
    with contextlib.suppress(ShardweaveError):
        assert shardweave.draw(program).startswith("<svg")
    if program.rank is None:
        locals_ = [torch.ones(program.source_shape(p)).to(getattr(torch, program.dtype)) for p in program.ranks]
        outs = shardweave.simulate(program, locals_)
        assert [tuple(x.shape) for x in outs] == [program.target_shape(p) for p in program.ranks]


def trace(text: str, folder: Path) -> None:
    Trace.from_json(text)


def command_line(text: str, folder: Path) -> None:
    """Arguments that are separated by bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(text.split("|"))
        except SystemExit as end:  # argparse
            assert end.code in (0, 2)


LAYOUTS = ("S0 S0 @ 0:1,0", "R P", "S0/2 Pavg", "S1 S0 S1 @ 1:2,0", "(Shard(dim=0), Replicate())", "R", "Pmax S12 R R")
COMMANDS = (
    "plan|--mesh|2,2|--shape|8,6|S0 S1|R R", "plan|--mesh|4@8|--shape|8,6|--dtype|bf16|--json|S0|S1",
    "plan|--mesh|2,3|--shape|7,5|--topology|nvlink-node|--max-bytes|4096|P S0|R S1", "plan|--mesh|2|--shape||R|R",
    "dispatch|--ranks|4|--experts|8|--top-k|2|--hidden|64|--tokens|32",
    "plan|--mesh|4|--target-mesh|2@8|--shape|8|S0|S0",
)  # fmt: skip


def _text_of(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def _inputs(name: str) -> tuple[Callable[[str, Path], None], list[str], Callable[[str, Random], str]]:
    """A parser, valid texts for it, and what changes them."""
    if name == "layouts":
        return layout, list(LAYOUTS), changed_text
    if name == "topologies":
        return topology, [t.to_json() for t in (NVLINK_NODE, NVLINK_INFINIBAND)], changed_json
    if name == "figures":
        kinds = MachineFigures("cpu"), MachineFigures("H100", "RDMA", 8, 50.0, NVLINK_NODE_FIGURES)
        return figures, [to_text(kind) for kind in kinds], changed_json
    if name == "programs":
        requests = (((2, 2), (8, 6), "S0 S1", "R R"), ((3,), (7,), "P", "S0"), ((2, 2), (5, 4), "P S0", "R S1"))
        programs = [shardweave.plan(m, s, "float32", a, b) for m, s, a, b in requests]
        on_nodes = dataclasses.replace(NVLINK_INFINIBAND, node_size=2)  # which split a mesh dim
        programs.append(shardweave.plan((4,), (8, 6), "float32", "S0", "R", topology=on_nodes))
        assert programs[-1].requested is not None
        programs.append(shardweave.plan((2, 2), (9, 4), "bool", "S0//2 S0", "R S1"))
        programs.append(shardweave.plan((3,), (7,), "int32", "Pmax", "R"))
        programs.append(shardweave.plan((2, 2), (6, 4), "float32", "S0 S1", "R S0", rank=2))
        other = Mesh((3,), ranks=(1, 4, 7))
        programs.append(shardweave.plan((2, 2), (6, 4), "float32", "P S1", "S0", target_mesh=other))
        return program, [one.to_json() for one in programs], changed_json
    if name == "traces":
        return trace, [_text_of("tests", "cli", "traces", n) for n in TRACES], changed_json
    return command_line, list(COMMANDS), changed_text


TRACES = sorted(path.name for path in (ROOT / "tests" / "cli" / "traces").glob("*.json"))[:2]
NVLINK_NODE_FIGURES = {name: NVLINK_NODE.to_dict()[name] for name in ("node", "memory_gigabytes_per_s", "call_us")}
NAMES = ("layouts", "topologies", "figures", "programs", "traces", "command line")
GATE = 40
LONG = 100_000


@crossed("name, number", NAMES, [GATE, LONG], gate=lambda name, number: number == GATE)
def test_random_input_raises_own_exceptions_only(name: str, number: int, tmp_path: Path) -> None:
    parser, texts, change = _inputs(name)
    for text in texts:
        parser(text, tmp_path)
    before, refused, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0
    for seed in range(number):
        random = Random(f"{name} {seed}")
        text = change(random.choice(texts), random)
        start = time.process_time()
        try:
            parser(text, tmp_path)
        except ShardweaveError as error:
            assert isinstance(error, ArgumentError | UnsupportedError) or name == "command line", (seed, text, error)
            assert len(str(error)) < 20_000
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}: {error}\n{text[:2000]}") from error
        slowest = max(slowest, time.process_time() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert slowest < MOST_SECONDS and grown < MOST_MEBIBYTES, (slowest, grown)
    assert name == "command line" or refused > number // 4
    print(f"{name}: {number} inputs, {refused} refused, {slowest:.2f} s at most, {grown:.0f} MiB more")
