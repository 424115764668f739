"""Where ranks push in each other's windows: every rank knows the same places, which do not overlap."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

import shardweave
from shardweave.planner import FILL, ITEMSIZE, Exchange
from shardweave.runtime.executor.choose_algorithm import AssumedTransport, choose_algorithm
from shardweave.runtime.executor.window_layout import pushed_pieces, why_not_direct, why_not_pulled, window_bytes
from shardweave.runtime.transports.backend_limits import WindowPolicy

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


PLACED = ("R R", "S0 R", "R S1", "S0 S1", "S1 S0", "S0 S0", "S0 S0 @ 0:1,0", "P S0", "P P")
WIDTHS = (
    ((16, 16), "float32"), ((8, 12), "float32"), ((8, 6), "bfloat16"), ((12, 64), "bfloat16"), ((7, 16), "int8"),
    ((9, 32), "uint8"), ((6, 4, 8), "float64"), ((3, 5), "complex128"), ((4, 0), "float32"),
)  # fmt: skip


def are_wide(program: Any, step: Any, members: Any, of_receivers: bool) -> bool:
    """Brute force over elements: whether all runs that are contiguous in both shards begin and end at multiples of 16
    bytes in those of receivers, or of senders."""
    size = ITEMSIZE[program.dtype]
    for row in step.boxes.rows():
        for sender in row.senders if row.receiver in members else ():
            if sender in (row.receiver, FILL):
                continue
            places = []  # [elements], of each side
            for box, shape in (
                (row.source_start, program.shape_before(step, sender)),
                (row.target_start, program.shape_after(step, row.receiver)),
            ):
                flat = np.arange(prod(shape)).reshape(shape)
                part = flat[tuple(slice(b, b + n) for b, n in zip(box, row.extent, strict=True))]
                places.append(part.reshape(-1))
            ends = np.flatnonzero((np.diff(places[0]) != 1) | (np.diff(places[1]) != 1)) + 1
            side = places[1 if of_receivers else 0]
            for run in np.split(side, ends):
                if len(run) and (int(run[0]) * size % 16 or (int(run[-1]) + 1) * size % 16):
                    return False
    return True


def test_narrow_accesses_are_known() -> None:
    """Direct pushes and pulls take place only where all accesses to peers are 16 bytes wide. Of equal holders one
    sends; what the others would send counts as well."""
    found = set()
    for (shape, dtype), source, target in product(WIDTHS, PLACED, PLACED):
        if source == target or "P" in target:
            continue
        program = shardweave.plan((2, 2), shape, dtype, source, target)
        for step in (s for s in program.steps if isinstance(s, Exchange)):
            members = program.members(step, 0)
            narrow, packs = why_not_pulled(program, step, members), pushed_pieces(program, step, members) is not None
            if packs and (not narrow or "R" not in source):
                assert are_wide(program, step, members, of_receivers=False) is not bool(narrow), (source, target)
            direct = why_not_direct(program, step, members, 1 << 30)
            if not direct or "R" not in source:
                assert are_wide(program, step, members, of_receivers=True) is not bool(direct), (source, target)
            chosen = choose_algorithm(program, step, 0, AssumedTransport(program.mesh, True, windows=WindowPolicy()))
            assert packs or not narrow
            assert ("not pulled from shards of which runs" in chosen.why) <= (chosen.name == "push")
            found.add((bool(narrow), chosen.name))
    assert found == {(True, "push"), (False, "pull"), (False, "push")}
