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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import ArgumentError, TransportError, UnsupportedError
from ..kernels import capturing
from .bounded_store import BoundedStore
from .environment import flight_record_folder, requested_flight_records
from .flight_record import DESCRIPTION, Call, Record, Traffic, group_name, started_entry

_logger = logging.getLogger(__name__)
T = TypeVar("T")

_VERSION = "2.10"
"""Of the format, in torch 2.11 to 2.15."""
_FILE_PREFIX = "shardweave_"
_REQUESTED = "flight records requested"
_POLL, _PATIENCE, _LONGEST_ANSWER = 0.5, 4.0, 2.0
"""Seconds between looks at the store for a request; seconds that a failed rank waits for the files of the others;
seconds that the store may take to answer."""
_MOST_KEYS = (1 << 62) - 1


class Barriers(Protocol):
    """The part of the shared-memory transport that is recorded."""

    def enter_call(self, key: int) -> None: ...
    def late_peers(self) -> list[tuple[int, int]]: ...


class FlightRecorder:
    """The recent calls of this rank, and the file of them.

    Args:
        rank, ranks: this rank, and the number of ranks of the process group.
        store: the store that they share.
        size: the number of calls that are kept.

    Attributes:
        barriers: the transport whose barriers are recorded where a peer is stuck inside of a call; None: no transport.
    """

    def __init__(self, rank: int, ranks: int, store: BoundedStore, size: int) -> None:
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
        self._store = store.with_own_connection(_PATIENCE)  # this rank may be waiting in the first one
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
            if not capturing(device):
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
                request = self._ask(lambda store: store.compare_set(_REQUESTED, self._earlier_request, own)).decode()
                self._earlier_request = request
                self._ask(lambda store: store.set(_written_key(self.rank, request), "written"))
            keys = [_written_key(rank, request) for rank in range(self.ranks)]
            deadline = time.monotonic() + _PATIENCE
            while not self._ask(lambda store: store.check(keys)) and time.monotonic() < deadline:
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
        groups = {group_name(record.call.ranks): record.call.ranks for record in records}
        late = self.barriers.late_peers() if self.barriers is not None and entries else []
        for i, (peer, number) in enumerate(late):  # all ranks have the record of the call, the last one
            pair = min(self.rank, peer), max(self.rank, peer)
            name = f"barriers of {group_name(pair)}"
            groups[name] = pair
            text = f"barrier inside of {records[-1].call.text}"
            entry = started_entry(records[-1].number + 1 + i, name, number, text, records[-1].created, (0, 0))
            entries.append(entry | {"frames": entries[len(records) - 1]["frames"]})
        return {
            "version": _VERSION,
            "pg_config": {
                name: {"name": name, "desc": DESCRIPTION, "ranks": str(list(ranks))} for name, ranks in groups.items()
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
                with self._requesting, suppress(dist.DistStoreError):  # the store is late
                    self._answer()

    def _answer(self) -> None:
        """Write this rank's file if another rank has asked for it since the last time."""
        request = self._request()
        if request != self._earlier_request:
            self._earlier_request, self._answered_at = request, self._count
            self._write(request.split()[0])
            self._ask(lambda store: store.set(_written_key(self.rank, request), "written"))

    def _request(self) -> str:
        """The last request for all files: the rank that has failed, and a word of its own; "" if there is none."""
        return self._ask(lambda store: store.get(_REQUESTED).decode() if store.check([_REQUESTED]) else "")

    def _ask(self, operation: Callable[[dist.Store], T]) -> T:
        """`operation` on the store.

        Raises:
            dist.DistError: the store is gone, or does not answer in time (dist.DistStoreError).
        """
        return self._store.run(operation, _LONGEST_ANSWER)


def _written_key(rank: int, request: str) -> str:
    return f"flight records of rank {rank} for {request}"


current: FlightRecorder | None = None
"""The recorder of the default process group; None where SHARDWEAVE_FR_BUFFER_SIZE does not ask for one."""


def start(rank: int, ranks: int, store: BoundedStore) -> None:
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
