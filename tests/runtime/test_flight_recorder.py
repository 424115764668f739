"""The flight recorder: what is kept, the files, and torch's analysis of them."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError, DisagreementError, MeetingTimeoutError, TransportError, UnsupportedError
from shardweave.runtime import flight_recorder
from shardweave.runtime.bounded_store import BoundedStore
from shardweave.runtime.environment import flight_record_folder, requested_flight_records
from shardweave.runtime.executor.run import ExclusiveCall
from shardweave.runtime.flight_recorder import Details, FlightRecorder, dump_flight_records
from shardweave.runtime.install import is_installed
from shardweave.runtime.transports.call_lock import CallLock
from shardweave.runtime.transports.rendezvous.calls import CallRecord
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


def call_of(number: int, text: str = "S0 → R") -> CallRecord:
    return CallRecord((0, 1), number, 0, text)


def refusal() -> DisagreementError:
    """An error that all ranks raise alike, so that they need no files."""
    error = DisagreementError("refused")
    error.recoverable = True
    return error


@pytest.fixture
def recorders() -> Iterator[Callable[..., FlightRecorder]]:
    """Makes recorders, and closes them."""
    made: list[FlightRecorder] = []

    def make(rank: int = 0, size: int = 4, store: dist.Store | None = None) -> FlightRecorder:
        made.append(FlightRecorder(rank, 2, BoundedStore(store or dist.HashStore()), size))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()
        assert not recorder._thread.is_alive()


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


@pytest.mark.plan
def test_only_the_last_calls_are_kept(recorders: Callable[..., FlightRecorder]) -> None:
    recorder = recorders(size=3)
    details = Details("shared_memory", torch.device("cpu"), lambda: (8, 24))
    for number in range(1, 11):
        call = call_of(number)
        recorder.begin(call, details)
        recorder.end(call, refusal() if number == 9 else None)
    recorder.begin(call_of(11, "S0: R"), Details())
    entries = recorder.as_dict()["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == [9, 10, 11]
    assert [entry["record_id"] for entry in entries] == [8, 9, 10]
    assert [entry["state"] for entry in entries] == ["started", "completed", "started"]
    assert [entry["retired"] for entry in entries] == [True, True, False]
    assert entries[1]["profiling_name"] == "nccl:all_to_all shared_memory S0 → R"
    assert entries[2]["profiling_name"] == "nccl:all_to_all S0; R"
    assert (entries[1]["input_sizes"], entries[1]["output_sizes"]) == ([[8]], [[24]])
    assert entries[1]["time_created_ns"] <= entries[1]["time_discovered_completed_ns"] <= time.time_ns()
    assert entries[0]["time_discovered_completed_ns"] is entries[2]["time_discovered_completed_ns"] is None
    frame = entries[2]["frames"][0]
    assert (frame["name"], frame["filename"]) == ("test_only_the_last_calls_are_kept", __file__) and frame["line"] > 0


@pytest.mark.plan
def test_attempts_are_recorded_only_if_they_fail(recorders: Callable[..., FlightRecorder]) -> None:
    recorder = recorders()
    with recorder.attempt(call_of(1, "binding")):
        recorder.begin(call_of(1, "prepare"), Details())
    for given in (UnsupportedError, ValueError):  # the first one leaves the call to torch
        with pytest.raises(given), recorder.attempt(call_of(1, "binding")):
            raise given
    assert recorder.as_dict()["entries"] == []
    call = call_of(1)
    recorder.begin(call, Details())
    recorder.end(call, None)
    with pytest.raises(DisagreementError), recorder.attempt(call_of(2, "binding")):
        raise refusal()
    found = [(e["record_id"], e["profiling_name"].split()[-1], e["state"]) for e in recorder.as_dict()["entries"]]
    assert found == [(0, "R", "completed"), (1, "binding", "started")]


@pytest.mark.plan
def test_work_on_a_gpu_is_scheduled_until_its_event_is_done(
    recorders: Callable[..., FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, done, capturing = recorders(), [False], [False]  # type: FlightRecorder, list[bool | None], list[bool]

    def query() -> bool:
        if done[0] is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return done[0]

    stream: Any = SimpleNamespace(record_event=lambda: SimpleNamespace(query=query))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    for number, capturing[0] in ((1, False), (2, True)):
        call = call_of(number)
        recorder.begin(call, Details("symmetric_memory", torch.device("cuda:0")))
        recorder.end(call, None)

    def states() -> list[str]:
        return [entry["state"] for entry in recorder.as_dict()["entries"]]

    assert states() == ["scheduled"] * 2
    done[0] = True
    assert states() == ["completed", "scheduled"]
    done[0] = None
    assert states() == ["scheduled"] * 2


@pytest.mark.plan
def test_file_of_a_rank_whose_peer_has_failed(
    recorders: Callable[..., FlightRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    store = dist.HashStore()
    store.set("flight records requested", "1 by an earlier process group")
    one, other = recorders(0, store=store), recorders(1, store=store)
    call = call_of(1)
    for recorder in (one, other):
        recorder.begin(call, Details())
    time.sleep(2.5 * flight_recorder._POLL)
    assert not list(tmp_path.iterdir())  # the request of the earlier group is not theirs
    one.end(call, MeetingTimeoutError())
    assert sorted(path.name for path in (tmp_path / "shardweave").iterdir()) == ["shardweave_0", "shardweave_1"]
    (entry,) = pickle.loads((tmp_path / "shardweave/shardweave_1").read_bytes())["entries"]
    assert entry["state"] == "started"
    for path in (tmp_path / "shardweave").iterdir():
        path.unlink()
    one.end(call, MeetingTimeoutError())  # once
    other.end(call, MeetingTimeoutError())  # because of the first failure, which its file shows
    assert not list((tmp_path / "shardweave").iterdir())


@pytest.mark.plan
def test_later_failure_is_written_by_all_ranks(
    recorders: Callable[..., FlightRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    store = dist.HashStore()
    one, other = recorders(0, store=store), recorders(1, store=store)
    one.end(call_of(0), MeetingTimeoutError())
    for number in (1, 2):
        call = call_of(number)
        for recorder in (one, other):
            recorder.begin(call, Details())
        one.end(call, None)
        other.end(call, MeetingTimeoutError() if number == 2 else None)
    for rank, states in enumerate((["completed", "completed"], ["completed", "started"])):
        entries = pickle.loads((tmp_path / f"shardweave/shardweave_{rank}").read_bytes())["entries"]
        assert [entry["state"] for entry in entries] == states


class CutOff:
    """A store whose host is cut off until `back` is set. It has no connections."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def clone(self) -> dist.Store:
        raise RuntimeError("not implemented")  # as stores of torch without connections do

    def check(self, keys: list[str]) -> bool:
        assert self.back.wait(30)
        return False

    def compare_set(self, *_: str) -> bytes:
        assert self.back.wait(30)
        return b"0 now"

    def set(self, key: str, value: str) -> None:
        pass


@pytest.mark.plan
def test_failure_while_the_store_is_cut_off(
    recorders: Callable[..., FlightRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    for name, seconds in {"_POLL": 0.05, "_PATIENCE": 0.2, "_LONGEST_ANSWER": 0.1}.items():
        monkeypatch.setattr(flight_recorder, name, seconds)
    store: Any = CutOff()
    start = time.monotonic()
    recorder = recorders(store=store)
    time.sleep(0.2)  # its thread asks
    recorder.end(call_of(1), MeetingTimeoutError())
    assert [path.name for path in (tmp_path / "shardweave").iterdir()] == ["shardweave_0"]
    assert recorder._thread.is_alive()  # the store may come back
    recorder.close()
    assert time.monotonic() - start < 15
    store.back.set()


@pytest.mark.plan
def test_rank_that_ends_after_a_request_writes_its_file(
    recorders: Callable[..., FlightRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    monkeypatch.setattr(flight_recorder, "_POLL", 60.0)
    store = dist.HashStore()
    recorder = recorders(1, store=store)
    store.set("flight records requested", "0 now")
    recorder.close()
    assert [path.name for path in (tmp_path / "shardweave").iterdir()] == ["shardweave_1"]


@pytest.mark.plan
def test_peers_are_notified_before_flight_records_are_written() -> None:
    events: list[str] = []
    transport: Any = SimpleNamespace(
        rank=0, busy=False, pending=None, error=None, fail=lambda error: events.append(f"notified: {error}"),
        rendezvous=SimpleNamespace(lock=CallLock(0, 5.0, str), end=lambda error: events.append("written")),
    )  # fmt: skip
    statistics: Any = SimpleNamespace(milliseconds=0.0)
    with pytest.raises(MeetingTimeoutError), ExclusiveCall(transport, statistics):
        raise MeetingTimeoutError("late")
    assert events == ["notified: late", "written"]


@pytest.mark.plan
def test_failures_to_write_are_logged_and_raised_on_request(
    recorders: Callable[..., FlightRecorder],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = recorders()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(flight_recorder, "current", recorder)
    with pytest.raises(OSError):
        dump_flight_records(tmp_path / "file")
    path = dump_flight_records(str(tmp_path / "some" / "folder"))
    assert path == tmp_path / "some/folder/shardweave_0" and pickle.loads(path.read_bytes())["entries"] == []
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "file" / "rank_"))
    monkeypatch.setattr(flight_recorder, "_PATIENCE", 0.0)
    recorder.end(call_of(1), MeetingTimeoutError())
    assert "a call of rank 0 has failed: flight records cannot be written: NotADirectoryError" in caplog.text
    recorder.begin(CallRecord((0, 1), 1, 0, lambda: 1 // 0), Details())  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        dump_flight_records(path.parent)
    assert [each.name for each in path.parent.iterdir()] == ["shardweave_0"]  # as before, and complete
    assert pickle.loads(path.read_bytes())["entries"] == []
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    recorder._write("1")
    assert "a call of rank 1 has failed: flight records cannot be written: ZeroDivisionError" in caplog.text


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


def cached_calls(rank: int) -> tuple[set[str], list[str]]:
    """The files of the package whose functions run in a cached call, and the names of the process's threads."""
    line = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(8, 6), line, [Shard(0)])
    experts = shardweave.TokenDispatcher(num_experts=4, top_k=2, hidden=8, max_tokens=6, dtype=torch.float32)
    tokens, ids, weights = torch.randn(6, 8), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    files: set[str] = set()

    def entered(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    for profiler in (None, None, entered):
        sys.setprofile(profiler)
        shardweave.redistribute(x, [Replicate()])
        routed = experts.dispatch(tokens, ids, weights)
        experts.combine(routed.x, routed)
    sys.setprofile(None)
    return {os.path.basename(file) for file in files}, [thread.name for thread in threading.enumerate()]


@pytest.mark.multi
def test_nothing_runs_in_cached_calls_unless_asked_for() -> None:
    ours = {"flight_recorder.py", "logs.py", "ranges.py", "environment.py"}
    name = "shardweave-flight-recorder"
    for files, threads in run_ranks(cached_calls, 2, environment={"SHARDWEAVE_FR_BUFFER_SIZE": ""}):
        assert "call.py" in files and "dispatcher.py" in files
        assert not files & ours and not any("logging" in file for file in files) and name not in threads
    for files, threads in run_ranks(cached_calls, 2, environment={"SHARDWEAVE_FR_BUFFER_SIZE": "9"}):
        assert files & ours == {"flight_recorder.py"} and name in threads
