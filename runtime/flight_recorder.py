"""The flight recorder: this rank's recent calls in a ring buffer, written in the format of torch's flight recorder.

torch's own recorder sees the collectives of process groups. It has no Python call that adds an entry, so calls that
ranks make through shared or symmetric memory are recorded here, and `torchfrtrace` reads the files.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import secrets
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import ArgumentError, TransportError, UnsupportedError
from .environment import flight_record_folder, requested_flight_records

_logger = logging.getLogger(__name__)

Traffic = Callable[[], tuple[int, int]]
"""Returns the bytes that this rank sends and receives in a call."""

_VERSION = "2.10"
"""Of the format, in torch 2.11 to 2.15."""
_COLLECTIVE = "nccl:all_to_all"
"""The analysis accepts only libraries and collectives that it knows; this library is known to all versions of torch. Of
an all-to-all it compares the total sizes of inputs and outputs, so ranks may differ."""
_DESCRIPTION = "shardweave"
_FILE_PREFIX = "shardweave_"
_REQUESTED = "flight records requested"
_FRAMES = 16
_POLL, _PATIENCE = 0.5, 4.0
"""Seconds between looks at the store for a request; seconds that a failed rank waits for the files of the others."""
_RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MOST_RANKS_NAMED, _MOST_KEYS = 16, (1 << 62) - 1


class Call(Protocol):
    """The part of `rendezvous.CallRecord` that is recorded."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def number(self) -> int: ...
    @property
    def text(self) -> str: ...


class Barriers(Protocol):
    """The part of the shared-memory transport that is recorded."""

    def enter_call(self, key: int) -> None: ...
    def late_peers(self) -> list[tuple[int, int]]: ...


class Record:
    """One call of this rank.

    Attributes:
        transport, device: empty and None until they are known.
        traffic: None where the host does not know the bytes, as in token dispatch.
        finished: when the host left the call, in nanoseconds; None: it has not.
        has_device_work: the call has enqueued work on a GPU.
        done: an event after that work; None: a graph was captured.
        failed: the call raised.
    """

    __slots__ = (
        "call", "created", "device", "done", "failed", "finished", "frames", "has_device_work", "number", "traffic",
        "transport",
    )  # fmt: skip

    def __init__(self, number: int, call: Call) -> None:
        self.number, self.call, self.created = number, call, time.time_ns()
        self.transport, self.has_device_work = "", False
        self.device: torch.device | None = None
        self.traffic: Traffic | None = None
        self.finished: int | None = None
        self.done: torch.cuda.Event | None = None
        self.failed = False
        self.frames = _callers()

    @property
    def state(self) -> str:
        """Where the call is: if the host has left it, "scheduled" until its work on a GPU is known to be done."""
        if self.finished is None or self.failed:
            return "started"
        if not self.has_device_work:
            return "completed"
        with suppress(RuntimeError):  # the device is broken
            if self.done is not None and self.done.query():
                return "completed"
        return "scheduled"

    def as_entry(self) -> dict[str, Any]:
        """The record as an entry of a flight record file."""
        nbytes = (0, 0) if self.traffic is None else self.traffic()
        name = f"{self.transport} {self.call.text}".strip()
        entry = _entry(self.number, _group_name(self.call.ranks), self.call.number, name, self.created, nbytes)
        entry |= {"state": self.state, "retired": self.finished is not None}
        if entry["state"] == "completed" and self.finished is not None:
            entry["time_discovered_completed_ns"] = self.finished
            entry["duration_ms"] = (self.finished - self.created) / 1e6
        entry["frames"] = [
            {"name": code.co_name, "filename": code.co_filename, "line": line} for code, line in self.frames
        ]
        return entry


class FlightRecorder:
    """The recent calls of this rank, and the file of them.

    Args:
        rank, ranks: this rank, and the number of ranks of the process group.
        store: the store that they share.
        size: the number of calls that are kept.

    Attributes:
        barriers: the transport whose barriers are recorded where a peer is stuck inside of a call; None: no transport.
    """

    def __init__(self, rank: int, ranks: int, store: dist.Store, size: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.barriers: Barriers | None = None
        self._records: deque[Record] = deque(maxlen=size)
        self._open: Record | None = None
        self._count = 0
        self._key = 0  # of the current call, on the control page of `barriers`
        self._has_failed = False
        self._answered_at: int | None = None  # the count when this rank last wrote its file for another one
        self._writing, self._requesting = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._store = _own_connection(store)
        self._earlier_request = ""
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self._earlier_request = self._request()
        self._thread = threading.Thread(target=self._watch, name="shardweave-flight-recorder", daemon=True)
        self._thread.start()

    def begin(self, call: Call) -> None:
        """A call begins."""
        self._open = Record(self._count, call)
        self._count += 1
        self._records.append(self._open)
        self._enter(hash((call.ranks, call.number)) & _MOST_KEYS or 1)  # hashes of ints are equal on all ranks

    def describe(self, transport: str, device: torch.device, traffic: Traffic | None = None) -> None:
        """Complete the record of the current call."""
        if self._open is not None:
            self._open.transport, self._open.device, self._open.traffic = transport, device, traffic

    def end(self, error: BaseException | None = None, stream: torch.cuda.Stream | None = None) -> None:
        """The host leaves the current call, if there is one.

        Args:
            stream: the stream that its work on a GPU was enqueued on; None: the current one.
        """
        record, self._open = self._open, None
        if record is None:
            return
        device = record.device
        if error is None and device is not None and device.type == "cuda":
            record.has_device_work = True
            if not torch.cuda.is_current_stream_capturing():
                record.done = (stream or torch.cuda.current_stream(device)).record_event()
        record.failed, record.finished = error is not None, time.time_ns()
        if error is None:
            self._enter(0)

    def suspend(self) -> Record | None:
        """The current call goes on later, with `resume`."""
        record, self._open = self._open, None
        return record

    def resume(self, record: Record | None) -> None:
        """Continue a call that was suspended."""
        self._open = record

    @contextmanager
    def attempt(self, call: Call) -> Iterator[None]:
        """A context in which ranks may wait for each other before `call`. Recorded only if it fails; a refusal,
        which may leave the call to torch, is no failure."""
        before, key = self._open, self._key
        self.begin(call)
        record = self._open
        try:
            yield
        except (ArgumentError, UnsupportedError):
            self._forget_attempt(record, key)
            raise
        except BaseException as error:
            if self._open is not record and self._open is not None:  # a call within it failed
                self._forget(record)
            else:
                self._open = record
            self.end(error)
            if isinstance(error, TransportError):
                self.failed()
            raise
        else:
            self._forget_attempt(record, key)
        finally:
            self._open = before

    def failed(self) -> None:
        """A call of this rank has failed: if it is the first one, write the file and have all other ranks write theirs.
        Waits briefly for them, because they may be ended when this rank raises. Peers that wait for this rank are
        notified before.

        A file that this rank has written for another one in the same call, or just before it, stays: it shows what this
        rank did while its peers waited."""
        if self._has_failed:
            return
        self._has_failed = True
        if self._answered_at is not None and self._count <= self._answered_at + 1:
            return
        self._write(str(self.rank))
        with suppress(RuntimeError):  # the store is gone
            with self._requesting:
                own = f"{self.rank} {secrets.token_hex(8)}"
                request = self._store.compare_set(_REQUESTED, self._earlier_request, own).decode()
                self._earlier_request = request
                self._store.set(_written_key(self.rank, request), "written")
            keys = [_written_key(rank, request) for rank in range(self.ranks)]
            deadline = time.monotonic() + _PATIENCE
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.02)

    def dump(self, folder: Path | None = None) -> Path:
        """Write this rank's file and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        folder = flight_record_folder() if folder is None else folder
        path = folder / f"{_FILE_PREFIX}{self.rank}"
        with self._writing:
            folder.mkdir(parents=True, exist_ok=True)
            # Files are complete, and links in a folder that others can write to are not followed.
            handle, name = tempfile.mkstemp(prefix=".writing-", dir=folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    pickle.dump(self.as_dict(), file)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        return path

    def as_dict(self) -> dict[str, Any]:
        """The contents of the file."""
        records = list(self._records)
        entries = [record.as_entry() for record in records]
        groups = {_group_name(record.call.ranks): record.call.ranks for record in records}
        late = self.barriers.late_peers() if self.barriers is not None and entries else []
        for i, (peer, number) in enumerate(late):  # all ranks have the record of the call, the last one
            pair = min(self.rank, peer), max(self.rank, peer)
            name = f"barriers of {_group_name(pair)}"
            groups[name] = pair
            text = f"barrier inside of {records[-1].call.text}"
            entry = _entry(records[-1].number + 1 + i, name, number, text, records[-1].created, (0, 0))
            entries.append(entry | {"frames": entries[len(records) - 1]["frames"]})
        return {
            "version": _VERSION,
            "pg_config": {
                name: {"name": name, "desc": _DESCRIPTION, "ranks": str(list(ranks))} for name, ranks in groups.items()
            },
            "pg_status": {},
            "comm_lib_version": "",
            "entries": entries,
        }

    def close(self) -> None:
        """The process group has ended."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _enter(self, key: int) -> None:
        self._key = key
        if self.barriers is not None:
            self.barriers.enter_call(key)

    def _forget_attempt(self, record: Record | None, key: int) -> None:
        """An attempt has ended without a failure. `key`: that of the call before it."""
        self._forget(self._open)
        self._forget(record)
        if record is not None and (not self._records or self._records[-1].number < record.number):
            self._count = record.number  # the analysis compares the counts of ranks
        self._enter(key)

    def _forget(self, record: Record | None) -> None:
        if record is not None and record in self._records:  # else later ones have taken its place
            self._records.remove(record)

    def _write(self, failed: str) -> None:
        """Write the file because a call of rank `failed` has failed. Raises nothing: that error matters more."""
        try:
            _logger.warning("a call of rank %s has failed: flight records are in %s", failed, self.dump())
        except Exception as error:
            _logger.warning("a call of rank %s has failed: flight records cannot be written: %r", failed, error)

    def _watch(self) -> None:
        """Write this rank's file when another rank has failed. Runs on a thread, since this rank may be stuck."""
        has_stopped = False
        with suppress(RuntimeError):  # the store is gone
            while not has_stopped:
                has_stopped = self._stopped.wait(_POLL)  # then look once more
                with self._requesting:
                    self._answer()

    def _answer(self) -> None:
        """Write this rank's file if another rank has asked for it since the last time."""
        request = self._request()
        if request != self._earlier_request:
            self._earlier_request, self._answered_at = request, self._count
            self._write(request.split()[0])
            self._store.set(_written_key(self.rank, request), "written")

    def _request(self) -> str:
        """The last request for all files: the rank that has failed, and a word of its own; "" if there is none."""
        return self._store.get(_REQUESTED).decode() if self._store.check([_REQUESTED]) else ""


def _own_connection(store: Any) -> dist.Store:
    """A second connection to a store, because this rank may be waiting in the first one; the store itself if it has no
    connections, as that of a fake process group."""
    try:
        return store.clone()
    except RuntimeError:
        return store


def _written_key(rank: int, request: str) -> str:
    return f"flight records of rank {rank} for {request}"


def _group_name(ranks: tuple[int, ...]) -> str:
    """A name of these ranks, which no other ranks have."""
    if len(ranks) <= _MOST_RANKS_NAMED:
        return f"ranks {','.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {blake2b(str(ranks).encode(), digest_size=4).hexdigest()}"


def _callers() -> list[tuple[CodeType, int]]:
    """The innermost frames outside of the runtime, of which a file has the functions and lines."""
    frame = sys._getframe(2)
    frames: list[tuple[CodeType, int]] = []
    while frame is not None and len(frames) < _FRAMES:
        if not frame.f_code.co_filename.startswith(_RUNTIME):
            frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _entry(record: int, group: str, number: int, name: str, created: int, nbytes: tuple[int, int]) -> dict[str, Any]:
    """An entry of a collective that has started, in the format of torch's flight recorder.

    Args:
        record: counts the entries of this rank.
        number: counts the collectives of the group.
        nbytes: sent and received.
    """
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (group, _DESCRIPTION),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": record,
        "is_p2p": False,
        "profiling_name": f"{_COLLECTIVE} {name.replace(':', ';')}",  # the analysis splits it at colons
        "time_created_ns": created,
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": None,
        "input_sizes": [[nbytes[0]]],
        "input_dtypes": ["Byte"],
        "output_sizes": [[nbytes[1]]],
        "output_dtypes": ["Byte"],
        "state": "started",
        "retired": False,
        "frames": [],
    }


current: FlightRecorder | None = None
"""The recorder of the default process group; None where SHARDWEAVE_FR_BUFFER_SIZE does not ask for one."""


def start(rank: int, ranks: int, store: dist.Store) -> None:
    """Start the recorder of a new default process group, if the environment asks for one.

    Raises:
        ArgumentError: SHARDWEAVE_FR_BUFFER_SIZE has a value that is not allowed.
    """
    global current
    size = requested_flight_records()
    current = FlightRecorder(rank, ranks, store, size) if size else None


def stop() -> None:
    """The default process group has ended."""
    global current
    recorder, current = current, None
    if recorder is not None:
        recorder.close()


atexit.register(stop)  # the thread must not use the store while the process ends


def dump_flight_records(folder: str | os.PathLike[str] | None = None) -> Path:
    """Write this rank's recent calls for torch's analysis of flight records, `torchfrtrace`.

    If a call fails, every rank does so by itself. The last call in the file of a stuck rank is the one before that in
    which its peers wait.

    Args:
        folder: where to write `shardweave_<rank>`; made if it does not exist. Ranks on different machines write to
            their own. Default: `shardweave`, in the folder of TORCH_FR_DUMP_TEMP_FILE, else of
            TORCH_NCCL_DEBUG_INFO_TEMP_FILE, else in that of torch's cache.

    Returns:
        The path of the file.

    Raises:
        UnsupportedError: SHARDWEAVE_FR_BUFFER_SIZE is not set, or no call has been made in this process group.
        OSError: the file cannot be written.
    """
    if current is None:
        raise UnsupportedError(
            "dump_flight_records: nothing is recorded; allowed: with SHARDWEAVE_FR_BUFFER_SIZE set to a number of "
            "calls, once ranks have communicated by shardweave"
        )
    return current.dump(None if folder is None else Path(folder))
