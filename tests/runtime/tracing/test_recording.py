"""Traces: their entries, merging, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import shardweave
from shardweave.errors import ArgumentError
from shardweave.planner import Mesh
from shardweave.runtime.tracing.merge import merge_traces
from shardweave.runtime.tracing.trace_file import Cost, Entry, Trace

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def program(rank: int, path: str, installed: bool) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(48.0).reshape(8, 6), mesh, (S0, S1), src_data_rank=None)
    x.requires_grad_()
    with shardweave.tracing.record(path):
        if installed:
            shardweave.install()
        for _ in range(3):
            y = x.redistribute(placements=(S1, S0))
        y.backward(y)
        shardweave.redistribute(x.detach(), (S0, S0), shard_order={0: (1, 0)})
        ids = DTensor.from_local(torch.arange(4), mesh, (R, R), run_check=False)
        weight = distribute_tensor(torch.ones(8, 6), mesh, (R, S0), src_data_rank=None)
        functional.embedding(ids, weight).redistribute(placements=(R, R))
        shardweave.redistribute_batch([x.detach()] * 2, [(R, S1), (S0, R)])
    assert shardweave.is_installed() == installed
    bound = torch_redistribute.redistribute_local_tensor
    shardweave.uninstall()
    assert (bound is not torch_redistribute.redistribute_local_tensor) == installed
    return installed


@pytest.mark.multi
@pytest.mark.parametrize("installed", [False, True])
def test_recorded_redistributions_of_a_program(tmp_path: Path, installed: bool) -> None:
    run_ranks(program, 4, str(tmp_path / "trace.json"), installed)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"trace.rank{r}.json" for r in range(4)]
    traces = [Trace.read(file) for file in files]
    assert set.intersection(*(set(of_rank.sessions) for of_rank in traces))
    apart = [replace(of_rank, alive=(3600.0 * i, 3600.0 * i + 9)) for i, of_rank in enumerate(traces)]
    trace = merge_traces(apart)
    assert trace.world_size == 4 and trace.ranks == (0, 1, 2, 3) and not trace.left_out
    by_layouts = {(e.source, e.target, "backward" in e.where): (e, cost) for e, cost in trace.heaviest_first()}
    entry, cost = by_layouts["S0 S1", "S1 S0", False]
    assert entry.mesh == Mesh((2, 2), ("dp", "tp")) and entry.target_mesh is None
    assert (entry.shape, entry.dtype, cost) == ((8, 6), "float32", Cost(3, 48))
    assert entry.where.startswith("test_recording.py:") and entry.where.endswith(" program")
    assert by_layouts["S1 S0", "S0 S1", True][1] == Cost(1, 48)
    assert by_layouts["S0 S1", "S0 S0 @ 0:1,0", False][1].calls == 1
    # Tensors of a batch are counted one by one.
    assert [by_layouts["S0 S1", target, False][1].calls for target in ("R S1", "S0 R")] == [1, 1]
    # A masked partial is recorded as a sum.
    assert by_layouts["R P", "R R", False][0].shape == (4, 6)
    first = [cost.total_bytes for _, cost in trace.heaviest_first()]
    assert first == sorted(first, reverse=True) and first[0] == 144


def half_a_mesh(rank: int, path: str) -> None:
    """The merged trace contains the redistributions of every rank."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    x = distribute_tensor(torch.ones(4, 2 + 2 * (rank // 2)), pair, (S0,), src_data_rank=None)
    with shardweave.tracing.record(path):
        for _ in range(2 + 2 * (rank // 2)):
            x.redistribute(placements=(R,))
        with pytest.raises(ArgumentError, match="another recording is active"):
            with shardweave.tracing.record(path):
                pass


@pytest.mark.multi
def test_traces_of_ranks_that_differ(tmp_path: Path) -> None:
    run_ranks(half_a_mesh, 4, str(tmp_path / "trace.json"))
    trace = merge_traces([Trace.read(file) for file in tmp_path.iterdir()])
    found = {e.mesh.rank_array.tolist()[0]: (e.shape, cost.calls) for e, cost in trace.redistributions.items()}
    assert found == {0: ((4, 2), 2), 2: ((4, 4), 4)}


@pytest.mark.plan
def test_forked_process_writes_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with shardweave.tracing.record(path) as recording:
        child = os.fork()
    if not child:
        os._exit(0 if recording.written is None else 1)
    assert recording.written == path and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def traced(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, (S0,), src_data_rank=None)

    @torch.compile(backend="aot_eager")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).redistribute(placements=(R,))  # type: ignore[attr-defined]

    with shardweave.tracing.record(path):
        for _ in range(3):
            twice(x)


@pytest.mark.multi
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch does not trace this function before 2.13")
def test_compiled_calls_are_counted_once(tmp_path: Path) -> None:
    """torch passes over the graph several times."""
    run_ranks(traced, 2, str(tmp_path / "trace.json"))
    ((entry, cost),) = Trace.read(tmp_path / "trace.rank0.json").redistributions.items()
    assert entry.traced and cost.calls == 1


def launched(monkeypatch: pytest.MonkeyPatch, rank: object, world_size: object) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


@pytest.mark.plan
def test_exception_before_the_process_group_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is that of torchrun, and the trace of an earlier run is removed."""
    path = tmp_path / "trace.json"
    for rank in range(8):
        Trace("2.13.0", 8, (rank,), {ENTRY: Cost(1, 1)}).write(path)
    launched(monkeypatch, 1, 4)
    with pytest.raises(ValueError, match="no such"):
        with shardweave.tracing.record(path) as recording:
            assert sorted(file.name for file in tmp_path.iterdir()) == [f"trace.rank{r}.json" for r in (0, 2, 3)]
            raise ValueError("no such\n  file")
    assert recording.written == tmp_path / "trace.rank1.json"
    trace = Trace.read(recording.written)
    assert (trace.world_size, trace.ranks, trace.redistributions) == (4, (1,), {})
    assert trace.ended == "ValueError: no such file"
    launched(monkeypatch, 0, 1)
    with shardweave.tracing.record(path):
        assert not list(tmp_path.iterdir())
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    for rank, world_size in ((0, ""), (4, 4), ("x", 2)):  # invalid, so files of other ranks may be of this run
        launched(monkeypatch, rank, world_size)
        other = Trace("2.13.0", 4, (2,), {}).write(path)
        with shardweave.tracing.record(path) as recording:
            assert list(tmp_path.iterdir()) == [other]
        assert recording.written == path and Trace.read(path).world_size == 1 and other.exists()


@pytest.mark.plan
def test_program_that_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is resolved when the recording begins."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    with shardweave.tracing.record("trace.json") as recording:
        monkeypatch.chdir(other)
    assert recording.written == tmp_path / "trace.json" and recording.written.exists() and not list(other.iterdir())


@pytest.mark.plan
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, None),
        (SystemExit(), None),
        (SystemExit(0), None),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("x" * 999), "RuntimeError: " + "x" * 186),
    ],
)
def test_trace_names_the_exception(tmp_path: Path, error: BaseException | None, says: str | None) -> None:
    path = tmp_path / "trace.json"
    with suppress(BaseException), shardweave.tracing.record(path):
        if error is not None:
            raise error
    assert Trace.read(path).ended == says and ("ended" in path.read_text()) == (says is not None)


ENTRY = Entry(
    Mesh((2, 2), ranks=[3, 1, 2, 0]), Mesh((2,), ("x",)), (4, 0), "bfloat16", "S0/2 S0", "P", "a.py:1 f", True
)
TRACE = Trace("2.13.0", 4, (1,), {ENTRY: Cost(2, 7)}, {"symbolic shapes": 1}, (1000.25, 1001.5), None, ("a1", "b2"))


@pytest.mark.plan
def test_trace_write_and_read() -> None:
    assert Trace.from_json(TRACE.to_json()) == TRACE
    nothing = Trace("2.13.0", 1, (0,), {}, ended='ValueError: "é"')
    assert Trace.from_json(nothing.to_json()) == nothing


@pytest.mark.plan
def test_merge_traces() -> None:
    other = Trace("2.13.0", 4, (0,), {ENTRY: Cost(5, 3)}, {"symbolic shapes": 4, "else": 1}, (1001.5, 1003))
    both = merge_traces([TRACE, other])
    assert both.redistributions == {ENTRY: Cost(5, 7)} and both.ranks == (0, 1)
    assert both.left_out == {"symbolic shapes": 4, "else": 1}
    assert both.missing == (2, 3) and both.alive == (1001.5, 1001.5) and both.ended is None
    ends = ("ValueError: no", None, "ValueError: no", "SystemExit: 1")
    all_ranks = merge_traces([Trace("2.13.0", 4, (rank,), {}, ended=ended) for rank, ended in enumerate(ends)])
    assert all_ranks.ended == "ranks 0, 2: ValueError: no; rank 3: SystemExit: 1"


@pytest.mark.plan
def test_traces_of_different_runs_are_refused() -> None:
    def of(rank: int, began: float, written: float, size: int = 4) -> Trace:
        return Trace("2.13.0", size, (rank,), {}, {}, (began, written))

    smaller = [of(0, 50, 60, 2), of(1, 50, 60, 2)]
    with pytest.raises(ArgumentError, match=r"ranks 0-1 of a run of 2, ranks 2-3, 7 of a run of 8; allowed: one"):
        merge_traces([*smaller, of(3, 10, 20, 8), of(2, 10, 20, 8), of(7, 10, 20, 8)])
    with pytest.raises(ArgumentError, match="rank 1 more than once"):
        merge_traces([*smaller, of(1, 10, 20, 2)])
    with pytest.raises(ArgumentError, match=r"rank 3 was written at \d{4}-.*, and the process of rank 1 began"):
        merge_traces([of(0, 50, 60), of(1, 51, 60), of(2, 50, 70), of(3, 10, 49)])
    merge_traces([of(0, 50, 60), of(1, 59, 80)])
    with pytest.raises(ArgumentError, match="by the clocks of their machines, since they have no call"):
        merge_traces([of(0, 50, 60), of(1, 61, 80)])
    with pytest.raises(ArgumentError, match="traces: none; allowed: one or more"):
        merge_traces([])


@pytest.mark.plan
def test_ranks_that_met_are_of_one_run_whatever_their_clocks_say() -> None:
    def of(rank: int, began: float, *sessions: str) -> Trace:
        return Trace("2.13.0", 5, (rank,), {}, {}, (began, began + 10), None, sessions)

    chain = [of(0, 50, "a"), of(1, 3650, "b"), of(2, 7250, "b", "a"), of(3, 10, "a")]
    for order in (chain, chain[::-1]):
        merged = merge_traces(order)
        assert merged.ranks == (0, 1, 2, 3) and merged.sessions == ("a", "b")
        assert merge_traces([merged, of(4, 1e6, "b")]).ranks == (0, 1, 2, 3, 4)
        with pytest.raises(ArgumentError, match="they have no call"):
            merge_traces([*order, of(4, 50, "c")])
        with pytest.raises(ArgumentError, match="they have no call"):
            merge_traces([*order, of(4, 50)])
    with pytest.raises(ArgumentError, match="rank 0 was written .* process of rank 2"):
        merge_traces([of(0, 50), of(1, 55), of(2, 61)])


@pytest.mark.plan
def test_traces_of_a_larger_run_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    path, kept = folder / "tr*ce.json", []
    for rank in (0, 3, 4, 12):
        Trace("2.13.0", 16, (rank,), {}).write(path)
    for name in ("tr*ce.rank9.json", "trace.rank8.json", "tr*ce.rankx.json", "tr*ce.rank7.json.old"):
        (folder / name).write_text("{}" if "9" in name else TRACE.to_json())
        kept.append(name)
    TRACE.write(path)
    found = sorted(file.name for file in folder.iterdir())
    assert found == sorted(["tr*ce.rank0.json", "tr*ce.rank1.json", "tr*ce.rank3.json", *kept])
    assert Trace.read(folder / "tr*ce.rank1.json") == TRACE
    Trace("2.13.0", 1, (0,), {}).write(path)
    assert Trace.read(path).world_size == 1 and len(list(folder.iterdir())) == 8


@pytest.mark.plan
def test_trace_size_is_bounded() -> None:
    mesh = Mesh((512,), ranks=range(511, -1, -1))
    found = {
        Entry(mesh, None, (n,), "float32", "S0", "R", "a.py:1 f"): Cost(2, n) for n in range(1, 101)
    }  # some 3 KB each
    left_out = {f"{'why ' * 100}{n}": 1 for n in range(200)} | {"most often": 7}
    trace = Trace("2.13.0", 512, (0,), found, left_out)
    text = trace.to_json(100_000)
    assert 96_000 < len(text.encode()) <= 100_000
    read = Trace.from_json(text)
    beyond = read.left_out["beyond the 100000 bytes of a trace"]
    assert beyond == 2 * (100 - len(read.redistributions)) > 0
    assert {e.shape[0] for e in read.redistributions} == set(range(101 - len(read.redistributions), 101)), (
        "what moves most is kept"
    )
    assert read.left_out["most often"] == 7 and sum(read.left_out.values()) == 207 + beyond
    assert len(trace.to_json()) > 200_000 and Trace.from_json(trace.to_json()).redistributions == found


@pytest.mark.plan
def test_trace_contains_process_lifetime(tmp_path: Path) -> None:
    before = time.time()
    with shardweave.tracing.record(tmp_path / "trace.json"):
        pass
    began, written = Trace.read(tmp_path / "trace.json").alive
    assert began < before <= written + 0.01 and written <= time.time() + 0.01
    ps = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True)
    if ps.returncode == 0:
        assert abs(time.time() - began - int(ps.stdout)) <= 2


def changed(**changes: Any) -> str:
    data = json.loads(TRACE.to_json())
    entry = data["redistributions"][0]
    for name, value in changes.items():
        (entry if name in entry else data)[name] = value
    return json.dumps(data)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TRACE.to_json()[:-20], "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "not a trace"),
        (changed(shardweave_trace=1), "version 1; allowed: version 2"),
        (changed(calls=-1), "-1 is not a whole number from 0"),
        (changed(source="S0 S"), "layout text"),
        (changed(mesh={"shape": [2, 0], "names": None, "ranks": None}), "at least 1"),
        (changed(dtype=3), "not a valid trace"),
        (changed(dtype="float33"), "dtype: 'float33' is not known"),
        (changed(source="R"), "source: R has 1 placements, the mesh"),
        (changed(target="S2"), "target: mesh dim 0 shards tensor dim 2, out of range"),
        (changed(world_size=3), "does not fit in 3 ranks"),
        (changed(target_mesh={"shape": [2], "names": None, "ranks": [1, 4]}), "does not fit in 4 ranks"),
        (changed(redistributions=[{}]), "not a valid trace"),
        (changed(ranks=[]), "of 4"),
        (changed(ranks=[4]), r"ranks \[4\] of 4"),
        (changed(alive=[1]), "not a valid trace"),
        (changed(alive=[1, -1]), "not a number of seconds"),
        (changed(fsdp=True, target_mesh=None, target="R R"), "not a collective of FSDP2"),
        (
            changed(fsdp=True, target_mesh=None, source="P S0", target="R S0"),
            r"P S0 -> R S0 of \[4, 0\] is not a collective",
        ),
        (changed(fsdp=None), "not a valid trace"),
        (changed(ended=1), "ended: 1"),
        (changed(sessions=[1]), r"sessions: \[1\]"),
        (changed(calls=10**400), "is not a whole number from 0 to 2"),
        (changed(world_size=10**9), "world_size 1000000000; allowed: up to 16777216"),
        (changed(shape=[1 << 40, 1 << 40]), r"more than 2\*\*58 elements"),
        (changed(source="Pmax S0", dtype="complex64"), "source: mesh dim 0: partial op 'max' of complex64"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=says) as error:
        Trace.read(file)
    assert str(file) in str(error.value)


@pytest.mark.plan
def test_trace_file_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(ArgumentError, match=f"path: '{path}' cannot be written"):
            with shardweave.tracing.record(path):
                raise AssertionError("not reached")
    with pytest.raises(ArgumentError, match="cannot be read"):
        Trace.read(tmp_path / "missing.json")
