"""The flight recorder: what is kept, the files, and torch's analysis of them."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError, MeetingTimeoutError, TransportError, UnsupportedError
from shardweave.runtime import flight_recorder
from shardweave.runtime.environment import flight_record_folder, requested_flight_records
from shardweave.runtime.flight_recorder import dump_flight_records
from shardweave.runtime.install import is_installed
from shardweave.runtime.transports.shared_memory.transport import SharedMemoryTransport, why_unsupported

shared_memory_only = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))


def analysed(folder: Path, *arguments: str, caplog: pytest.LogCaptureFixture) -> str:
    """What torch's analysis says of a folder."""
    # Not above: it keeps the standard error of when it is imported, which ranks inherit.
    from torch.distributed.flight_recorder import fr_trace

    caplog.clear()
    with caplog.at_level(logging.INFO, "Flight Recorder"):
        try:
            fr_trace.main([str(folder), *arguments])
        finally:
            gc.enable()  # which it switches off before torch 2.14
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.plan
def test_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in {"": 0, "0": 0, "1": 1, "1000000": 1000000}.items():
        monkeypatch.setenv("SHARDWEAVE_FR_BUFFER_SIZE", text)
        assert requested_flight_records() == size
    for text in ("-1", "1.5", "1000001", "yes", "9" * 5000, "²"):
        monkeypatch.setenv("SHARDWEAVE_FR_BUFFER_SIZE", text)
        with pytest.raises(ArgumentError, match="SHARDWEAVE_FR_BUFFER_SIZE: .*; allowed: a whole number of calls"):
            requested_flight_records()


@pytest.mark.plan
def test_folder_is_beside_the_files_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert flight_record_folder() == Path("/cache/torch/shardweave")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/nccl/trace_")
    assert flight_record_folder() == Path("/nccl/shardweave")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "records/rank_")
    assert flight_record_folder() == tmp_path / "records/shardweave"


def in_a_fake_group(rank: int) -> tuple[list[str], list[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with shardweave.installed():
        time.sleep(1.5 * flight_recorder._POLL)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with shardweave.installed():
        during = [thread.name for thread in threading.enumerate()]
    dist.destroy_process_group()
    after = [thread.name for thread in threading.enumerate()]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return during, after


@pytest.mark.multi
def test_recorder_ends_with_its_process_group(tmp_path: Path) -> None:
    """Also where the store keeps nothing."""
    environment = {"SHARDWEAVE_FR_BUFFER_SIZE": "5", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_")}
    ((during, after),) = run_ranks(in_a_fake_group, 1, environment=environment)
    name = "shardweave-flight-recorder"
    assert during.count(name) == 1 and name not in after and not list(tmp_path.iterdir())


@pytest.mark.plan
def test_dump_without_recorder_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "current", None)
    with pytest.raises(UnsupportedError, match="nothing is recorded; allowed: with SHARDWEAVE_FR_BUFFER_SIZE set"):
        dump_flight_records()


def last_calls(rank: int, folder: str) -> list[tuple[int, str]]:
    """The numbers and states of recorded calls, of which the last one is refused by all ranks alike."""
    line, path = init_device_mesh("cpu", (2,)), Path(folder, f"rank{rank}")
    x = distribute_tensor(torch.randn(8, 6), line, [Shard(0)])
    for _ in range(9):
        shardweave.redistribute(x, [Replicate()])
    with pytest.raises(ArgumentError):
        shardweave.redistribute(x, [Shard(7)])
    path.write_text("")
    with pytest.raises(OSError):
        dump_flight_records(path)
    written = dump_flight_records(str(Path(folder, "some", "folder")))
    assert written == Path(folder, f"some/folder/shardweave_{rank}")
    entries = pickle.loads(written.read_bytes())["entries"]
    for entry in entries:
        frame = entry["frames"][0]
        assert (frame["name"], frame["filename"]) == ("last_calls", __file__) and frame["line"] > 0
        assert entry["time_created_ns"] <= entry["time_discovered_completed_ns"] <= time.time_ns()
    return [(entry["collective_seq_id"], entry["state"]) for entry in entries]


@pytest.mark.multi
def test_only_the_last_calls_are_kept(tmp_path: Path) -> None:
    for entries in run_ranks(last_calls, 2, str(tmp_path), environment={"SHARDWEAVE_FR_BUFFER_SIZE": "3"}):
        assert entries == [(number, "completed") for number in (7, 8, 9)]


def installed_with_a_wrong_variable(rank: int) -> bool:
    os.environ["SHARDWEAVE_FR_BUFFER_SIZE"] = "many"
    with pytest.raises(ArgumentError, match="SHARDWEAVE_FR_BUFFER_SIZE: 'many'"):
        shardweave.install()
    return is_installed()


@pytest.mark.multi
def test_install_that_raises_changes_nothing() -> None:
    assert run_ranks(installed_with_a_wrong_variable, 1) == [False]


def redistributions(folder: str | None) -> list[list[tuple[str, str]]]:
    """Calls of all kinds on 4 ranks. Returns the names and states of the recorded ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(7, 5), mesh, [Shard(0), Shard(0)])  # uneven: 2, 2, 2, 1 rows
    half = distribute_tensor(torch.randn(3, 6), line, [Shard(0)])  # the last rank has none
    shardweave.redistribute(x, [Replicate(), Shard(1)])
    shardweave.redistribute(x, [Shard(1), Replicate()])
    shardweave.redistribute(half, [Replicate()])
    partial = x.from_local(torch.ones(4, 2), mesh, [Partial(), Replicate()], run_check=False)
    shardweave.redistribute(partial, [Shard(0), Replicate()])
    shardweave.redistribute(half, [Shard(1)], device_mesh=other)
    later = shardweave.redistribute(half, [Shard(1)], async_op=True)
    during = [] if flight_recorder.current is None else flight_recorder.current.as_dict()["entries"][-1:]
    later.to_local().sum()
    shardweave.redistribute_batch([x, half], [[Replicate(), Shard(1)], [Replicate()]])
    experts = shardweave.TokenDispatcher(num_experts=4, top_k=2, hidden=8, max_tokens=6, dtype=torch.float32)
    routed = experts.dispatch(torch.randn(dist.get_rank(), 8), torch.zeros(dist.get_rank(), 2, dtype=torch.int32),
                              torch.ones(dist.get_rank(), 2))  # fmt: skip
    experts.combine(routed.x, routed)
    if folder is None:
        return []
    dump_flight_records(folder)
    assert flight_recorder.current is not None
    entries = flight_recorder.current.as_dict()["entries"]
    return [[(e["profiling_name"], e["state"]) for e in each] for each in (during, entries)]


def healthy(rank: int, folder: str) -> list[list[tuple[str, str]]]:
    return redistributions(folder)


@pytest.mark.multi
@pytest.mark.parametrize(
    "transport",
    [None, "symmetric_memory", pytest.param("process_group", marks=pytest.mark.long),
     pytest.param("hierarchical", marks=[pytest.mark.long, shared_memory_only])],
)  # fmt: skip
def test_analysis_finds_nothing_after_calls_of_all_kinds(
    transport: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"SHARDWEAVE_FR_BUFFER_SIZE": "50", "SHARDWEAVE_TRANSPORT": transport or ""}
    if transport == "hierarchical":
        environment |= {"SHARDWEAVE_TRANSPORT": "", "SHARDWEAVE_NODE_SIZE": "2"}
    results = run_ranks(healthy, 4, str(tmp_path), environment=environment)
    for during, entries in results:
        assert len(entries) >= 8 and {state for _, state in entries} == {"completed"}, entries
        assert {state for _, state in during} <= {"started", "completed"}
        if transport is None:
            assert during[0][1] == "started"
            texts = " ".join(name for name, _ in entries)
            for part in ("a batch of 2 tensors", "dispatch of token dispatcher 1", "combine of token dispatcher 1"):
                assert part in texts
    assert analysed(tmp_path, caplog=caplog) == ""
    # The total bytes that ranks send are those that they receive, or the analysis would report the call.
    files = [pickle.loads((tmp_path / f"shardweave_{rank}").read_bytes()) for rank in range(4)]
    sums = [sum(entry["input_sizes"][0][0] for file in files for entry in file["entries"]),
            sum(entry["output_sizes"][0][0] for file in files for entry in file["entries"])]  # fmt: skip
    assert sums[0] == sums[1] > 0


def stuck(rank: int, folder: str, inside: bool) -> str:
    """Rank 2 does not arrive until its own thread has written its file, for the failures of both peers: what it does
    afterwards would be in it too."""
    line = init_device_mesh("cpu", (3,))
    x = distribute_tensor(torch.randn(8, 6), line, [Shard(0)])
    for _ in range(3):
        shardweave.redistribute(x, [Shard(1)])

    def sleep() -> None:
        file, deadline = Path(folder, "shardweave", "shardweave_2"), time.monotonic() + 20
        while not file.exists() or time.time() < file.stat().st_mtime + 2:
            assert time.monotonic() < deadline, "rank 2 wrote no file"
            time.sleep(0.05)

    if rank == 2 and not inside:
        sleep()
        return "stuck"
    if rank == 2:
        answer = SharedMemoryTransport.answer

        def late(self: SharedMemoryTransport, request: Any) -> Any:
            sleep()
            return answer(self, request)

        SharedMemoryTransport.answer = late  # type: ignore[method-assign]
    try:
        shardweave.redistribute(x, [Replicate()])
    except TransportError as error:
        return str(error)
    return "no error"


def stuck_ranks(tmp_path: Path, transport: str, inside: bool) -> None:
    environment = {
        "SHARDWEAVE_FR_BUFFER_SIZE": "50",
        "SHARDWEAVE_TIMEOUT": "1",
        "SHARDWEAVE_TRANSPORT": transport,
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_"),
    }
    ends = end_ranks(stuck, 3, str(tmp_path), inside, environment=environment)
    errors = [end.value or end.message for end in ends]
    assert "rank 2" in errors[0] and "rank 2" in errors[1] and ends[2].error is None, errors


@pytest.mark.multi
@pytest.mark.parametrize(
    "transport",
    [pytest.param("shared_memory", marks=shared_memory_only), "symmetric_memory",
     pytest.param("process_group", marks=pytest.mark.long)],
)  # fmt: skip
def test_analysis_names_the_rank_that_is_stuck_before_a_call(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck_ranks(tmp_path, transport, inside=False)
    said = analysed(tmp_path / "shardweave", caplog=caplog)
    assert said.startswith("Not all ranks joining collective, sequence number: 4\n"), said
    assert f"\ncollective: nccl:all_to_all {transport} S0 → R float32[8, 6] on 3\nmissing ranks: {{2}}\n" in said
    assert "\nexpected ranks: {0, 1, 2}\ncollective state: started\n" in said
    assert f"stuck at {__file__}:" in said and said.count("Not all ranks") == 1


@pytest.mark.multi
@shared_memory_only
def test_analysis_names_the_rank_that_is_stuck_inside_a_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck_ranks(tmp_path, "shared_memory", inside=True)
    said = analysed(tmp_path / "shardweave", caplog=caplog)
    # A rank that comes late hears that the other one has failed, before it waits for rank 2.
    waiting = [f"group info: barriers of ranks {rank},2:shardweave\n" in said for rank in range(2)]
    assert said.count("Not all ranks joining collective") == said.count("missing ranks: {2}") == sum(waiting) > 0, said
    assert "collective: nccl:all_to_all barrier inside of S0 → R float32[8, 6] on 3\n" in said
    assert f"stuck at {__file__}:" in said


def unused_before(rank: int, folder: str) -> str:
    """Rank 2 never uses shardweave."""
    line = init_device_mesh("cpu", (3,))
    x = distribute_tensor(torch.randn(8, 6), line, [Shard(0)])
    if rank == 2:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(list(Path(folder).glob("shardweave/shardweave_*"))) < 2:
            time.sleep(0.05)
        return "unused"
    flight_recorder._PATIENCE = 0.5
    with pytest.raises(MeetingTimeoutError):
        shardweave.redistribute(x, [Replicate()])
    return "timed out"


@pytest.mark.multi
@shared_memory_only
def test_rank_without_file_is_named_by_a_partial_analysis(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = {"SHARDWEAVE_FR_BUFFER_SIZE": "50", "SHARDWEAVE_TIMEOUT": "1",
                   "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_")}  # fmt: skip
    ends = end_ranks(unused_before, 3, str(tmp_path), environment=environment)
    values = [end.value for end in ends]
    assert values == ["timed out", "timed out", "unused"], [end.message for end in ends]
    with pytest.raises(AssertionError, match=r"Missing dump files from ranks \{2\}"):
        analysed(tmp_path / "shardweave", caplog=caplog)
    said = analysed(tmp_path / "shardweave", "--allow-incomplete-ranks", caplog=caplog)
    assert "we missed FR dumps from ranks ({2})" in said
