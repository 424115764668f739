"""Where ranks push in each other's windows: every rank knows the same places, which do not overlap."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

import shardweave
from shardweave.planner import ITEMSIZE, Exchange
from shardweave.runtime.executor.window_layout import pushed_pieces, window_bytes

pytestmark = pytest.mark.plan
CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], str, str, str, bool], ...] = (
    ((4,), (8, 5), "float32", "S0", "R", True),
    ((4,), (7, 5), "bfloat16", "S0", "S1", True),
    ((4,), (9, 3, 7), "int8", "P", "S1", True),
    ((4,), (3, 7), "bfloat16", "P", "S0", True),  # the last rank receives nothing
    ((2, 2), (7, 5), "complex128", "P S0", "S0 S1", True),
    ((2, 2), (7, 5), "float64", "S0 S0", "S0 S0 @ 0:1,0", True),
    ((2, 2), (), "float16", "P P", "R R", True),
    ((2, 2), (7, 5), "bfloat16", "S0 R", "P S1", True),
    ((4, 2), (0, 5), "float32", "S0 S1", "R S0", True),
    ((4, 2), (25, 6), "bfloat16", "S0/3 R", "S1 R", False),  # strided
)


def programs(case: Any) -> list[tuple[Any, Any]]:
    """The exchanges of a case, with the program of each rank."""
    mesh, shape, dtype, source, target, _ = case
    of_rank = [shardweave.plan(mesh, shape, dtype, source, target, rank=rank) for rank in range(prod(mesh))]
    return [(n, of_rank) for n, step in enumerate(of_rank[0].steps) if isinstance(step, Exchange)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[3]}, {case[4]} of {case[2]} {case[1]}")
def test_pieces(case: Any) -> None:
    *_, packs = case
    for number, of_rank in programs(case):
        written: dict[int, list[tuple[int, int]]] = {}
        kinds = set()
        for rank, program in enumerate(of_rank):
            step = program.steps[number]
            members = program.members(step, rank)
            pieces = pushed_pieces(program, step, members)
            same = [pushed_pieces(of_rank[p], of_rank[p].steps[number], members) for p in members]
            assert all(other == pieces for other in same)
            assert window_bytes(program, step, members, "push") == (
                pieces.nbytes if pieces else window_bytes(of_rank[0], of_rank[0].steps[number], members, "push")
            )
            kinds.add(pieces is not None)
            size, sent = ITEMSIZE[program.dtype], set()
            for row in step.boxes.rows() if pieces else ():
                if rank in row.senders and row.receiver != rank:
                    assert row.receiver not in sent, "two pieces for one peer"
                    sent.add(row.receiver)
                    first = pieces.first[row.receiver, rank] * size
                    end = first + -(-prod(row.extent) * size // 16) * 16
                    assert first % 16 == 0 and end <= pieces.nbytes
                    written.setdefault(row.receiver, []).append((first, end))
        assert kinds == {packs}
        for spans in written.values():
            spans.sort()
            assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:], strict=False))


def test_windows_larger_than_outputs_are_not_packed() -> None:
    """Of equal holders one sends; the others' places would be unused."""
    program = shardweave.plan((2, 4), (64, 64), "float32", "R S0", "S0 R", rank=0)
    for step in program.steps:
        members = program.members(step, 0)
        pieces = pushed_pieces(program, step, members)
        most = max(prod(program.shape_after(step, p)) for p in members) * 4
        assert (pieces.nbytes if pieces else most) <= most + 16 * len(members)
