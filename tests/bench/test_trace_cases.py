"""The cases of a trace, and the memory that replaying them takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.bench.workloads import trace_cases
from shardweave.bench.workloads.trace_cases import check_memory, distinct
from shardweave.cli import replay
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh
from shardweave.runtime.tracing.merge import merge_traces
from shardweave.runtime.tracing.trace_file import Cost, Entry, Trace

GRID = Mesh((2, 2), ("dp", "tp"))


@pytest.mark.plan
def test_meshes_that_are_alike_are_one_case() -> None:
    first, second = Mesh((2,), ("tp",), ranks=[0, 1]), Mesh((2,), ("tp",), ranks=[2, 3])
    both = Mesh((2,), ("tp",), ranks=[1, 2])

    def entry(mesh: Mesh, where: str, shape: tuple[int, ...] = (8, 4), target_mesh: Mesh | None = None) -> Entry:
        return Entry(mesh, target_mesh, shape, "float32", "S0", "R", where)

    found = {
        entry(first, "a.py:1 f"): Cost(3, 64),
        entry(first, "a.py:2 f"): Cost(1, 64),
        entry(second, "a.py:1 f"): Cost(5, 64),  # another branch of the program
        entry(first, "a.py:1 f", (2, 2)): Cost(1, 8),
        entry(both, "a.py:1 f", (2, 2)): Cost(1, 8),
        entry(first, "a.py:1 f", (3, 2), second): Cost(1, 8),
        entry(second, "a.py:1 f", (3, 2), first): Cost(1, 8),
    }
    one, *apart = distinct(Trace("2.13.0", 4, (0,), found))
    assert {e.mesh for e in one.entries} == {first, second}
    assert one.cost == Cost(5, 64) and one.wheres == ("a.py:1 f", "a.py:2 f")
    assert one.of_rank(3).mesh == second and one.of_rank(0).mesh == first
    # Ranks in common do one after the other; between two meshes each is one of its own.
    assert [len(case.entries) for case in apart] == [1, 1, 1, 1]


@pytest.mark.plan
def test_calls_are_of_one_rank() -> None:
    """Rank 0 prints what it gathers, the others gather on another line; one of them once more."""

    def of_rank(rank: int, line: int, calls: int) -> Trace:
        entry = Entry(GRID, None, (8, 4), "float32", "S0 R", "R R", f"a.py:{line} f")
        return Trace("2.13.0", 4, (rank,), {entry: Cost(calls, 64)})

    traces = [of_rank(0, 1, 3), *(of_rank(rank, 2, 3 + rank // 3) for rank in range(1, 4))]
    (case,) = distinct(merge_traces(traces), traces)
    assert case.cost == Cost(4, 64) and set(case.wheres) == {"a.py:1 f", "a.py:2 f"}


@pytest.mark.plan
def test_check_memory_fails_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    from shardweave.__main__ import main

    trace = tmp_path / "trace.json"
    large = Entry(GRID, None, (128256, 4096), "bfloat16", "S0 S1", "R S1", "a.py:1 embedding")
    small = Entry(GRID, None, (8, 6), "float32", "S0 S1", "R R", "a.py:2 f")
    trace.write_text(Trace("2.13.0", 4, (0,), {large: Cost(1, 1 << 29), small: Cost(1, 144)}).to_json())
    # 4 ranks: 3 quarters each of a source of 1002 MiB, two of which take turns; 10 halves of a target.
    needed = 128256 * 4096 * 2 * (3 + 20)
    monkeypatch.setattr(replay, "run_ranks", lambda *_: pytest.fail("ranks are started"))
    monkeypatch.setattr(replay, "last_level_cache", lambda: 1)
    monkeypatch.setattr(trace_cases, "available_memory", lambda: needed - 1)
    assert main(["replay", str(trace)]) == 2
    shown = capfd.readouterr().err
    assert "S0 S1 → R S1 of bfloat16[128256, 4096], a.py:1 embedding, takes some 22.51 GiB" in shown
    assert all(option in shown for option in ("--scaled", "--only", "--most", "--topology"))
    cases = distinct(Trace.read(trace))
    monkeypatch.setattr(trace_cases, "available_memory", lambda: needed)
    check_memory(cases, 1)
    monkeypatch.setattr(trace_cases, "available_memory", lambda: needed // 60)
    with pytest.raises(ArgumentError, match="allowed: up to 384.1 MiB"):
        check_memory(cases, 1)
    check_memory([case.scaled() for case in cases], 1)
    check_memory(cases[1:], 1)


@pytest.mark.plan
def test_fsdp_tensors_stay_even_when_scaled() -> None:
    hybrid = Entry(Mesh((2, 3), ("r", "dp")), None, (3021,), "float32", "P S0", "R S0", "FSDP sums", fsdp=True)
    other = Entry(Mesh((2, 3), ("r", "dp")), None, (3021,), "float32", "P S0", "R S0", "a.py:1 f")
    first, second = distinct(Trace("2.13.0", 6, (0,), {hybrid: Cost(2, 1), other: Cost(1, 1)}))
    assert (first.collective, first.scaled().shape) == ("all_reduce", (378,)), "377, and what divides by 3"
    assert (second.collective, second.scaled().shape) == (None, (377,))
    assert first.ranks == 6
