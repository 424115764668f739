"""Messages in pieces: the same bits as whole, however small the pieces are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import brute_force_oracle as oracle
import pytest
import torch
from test_node_topologies import HOW, drawn, without_latency
from test_simulate import poison  # noqa: F401

import shardweave
from shardweave.planner import Program, plan
from shardweave.runtime.executor import bind, pieces
from shardweave.runtime.executor.pieces import cuts_of, part_of_row, pieces_of
from shardweave.runtime.executor.step_forward import ForwardStep

pytestmark = pytest.mark.plan

WHOLE = 1 << 62


@pytest.mark.parametrize("extent", [(), (0,), (1, 1), (7,), (1, 5, 3), (4, 1, 6), (2, 9)])
def test_cuts_cover_box(extent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 12)
    cuts = cuts_of(extent, 4)
    if math.prod(extent) <= 3:
        assert cuts == [None]
        return
    axes, starts, stops = zip(*[cut for cut in cuts if cut], strict=True)
    assert len(set(axes)) == 1 and extent[: axes[0]] == (1,) * axes[0]
    assert (0, *stops[:-1]) == starts and stops[-1] == extent[axes[0]]


def test_pieces_keep_order_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    program = plan((2,), (13, 5), "float32", "S0", "S1")
    rows = [(i, row) for i, row in enumerate(program.steps[0].boxes.rows())]
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50)
    cut = [part for piece in pieces_of(rows, 4) for part in piece]
    assert len(pieces_of(rows, 4)) > len(rows)
    for i, row in rows:
        parts = [part_of_row(row, cut_) for key, _, cut_ in cut if key == i]
        assert [part for key, part, _ in cut if key == i] == parts
        assert sum(math.prod(part.extent) for part in parts) == math.prod(row.extent)


def outputs(program: Program, locals_: Sequence[torch.Tensor], how: dict, nbytes: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", nbytes)
        return shardweave.simulate(program, locals_, **how)


def check_bits(seeds: range, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare pieces of a few bytes with whole messages; returns the number of steps that forwarded."""
    forwarded: list[ForwardStep] = []

    def counted(*args: object) -> ForwardStep:
        forwarded.append(ForwardStep(*args))  # type: ignore[arg-type]
        return forwarded[-1]

    monkeypatch.setattr(bind, "ForwardStep", counted)
    for seed in seeds:
        random = Random(seed)
        case = drawn(seed, ("P", "Pavg", "Pmax", None)[seed % 4], uneven=seed % 3 > 0)
        if case is None:
            continue
        mesh, nodes, source, target = case
        shape = random.choice([(11, 6), (7, 9), (1, 5), (0, 3), (24, 12)])
        dtype = random.choice([torch.float32, torch.bfloat16, torch.float64])
        program = plan(mesh, shape, str(dtype)[6:], source, target, topology=without_latency(nodes))
        generator = torch.Generator().manual_seed(seed)
        given = torch.randn(oracle.contribution_shape(mesh, shape, source), generator=generator, dtype=torch.float64)
        locals_ = [x.to(dtype) for x in oracle.local_shards(mesh, shape, source, given)]
        for how in (*HOW, {"one_sided": False}, {"one_sided": False, "node_size": 3}):
            whole = outputs(program, locals_, how, WHOLE)
            for nbytes in (1, 40):
                for rank, (a, b) in enumerate(zip(outputs(program, locals_, how, nbytes), whole, strict=True)):
                    assert torch.equal(a, b), f"{case} {shape} {dtype} {how} {nbytes} rank {rank}\n{program.explain()}"
    return len(forwarded)


def test_pieces_give_same_bits(poison: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert check_bits(range(24), monkeypatch) > 8


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_pieces_give_same_bits(part: int, poison: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    check_bits(range(100 + 60 * part, 160 + 60 * part), monkeypatch)
