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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import TransportError, UnsupportedError
from ..kernels import capturing
from .bounded_store import BoundedStore
from .environment import flight_record_folder, requested_flight_records
from .text_files import write_whole

_logger = logging.getLogger(__name__)

# The analysis accepts only libraries and collectives that it knows; this library is known to all versions of torch. Of
# an all-to-all it compares the total sizes of inputs and outputs, so ranks may differ.
_COLLECTIVE, _DESCRIPTION, _VERSION = "nccl:all_to_all", "shardweave", "2.10"  # in torch 2.11 to 2.15
_REQUESTED = "flight records requested"  # a key of the store
# Seconds between looks at the store for a request; seconds that a failed rank waits for the files of the others;
# seconds that the store may take to answer.
_POLL, _PATIENCE, _LONGEST_ANSWER = 0.5, 4.0, 2.0
_FRAMES, _MOST_RANKS_NAMED, _KEYS = 16, 16, (1 << 62) - 1
_RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Details(NamedTuple):
    """What is recorded of a call beside its request. `traffic` returns the bytes that this rank sends and receives;
    None where the host does not know them, as in token dispatch."""

    transport: str = ""
    device: torch.device | None = None
    traffic: Callable[[], tuple[int, int]] | None = None


class Record:
    """One call of this rank, a `rendezvous.CallRecord`. `finished` is when the host left it, in nanoseconds."""

    def __init__(self, number: int, call: Any, details: Details) -> None:
        self.number, self.call, self.details, self.created = number, call, details, time.time_ns()
        self.finished: int | None = None
        self.has_failed = False
        self.done: torch.cuda.Event | None = None  # after the work of the call on a GPU
        self.frames: list[tuple[Any, int]] = []  # the innermost ones outside of the runtime: function and line
        frame = sys._getframe(2)
        while frame is not None and len(self.frames) < _FRAMES:
            if not frame.f_code.co_filename.startswith(_RUNTIME):
                self.frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]

    def end(self, error: BaseException | None) -> None:
        device = self.details.device
        if error is None and device is not None and device.type == "cuda" and not capturing(device):
            self.done = torch.cuda.current_stream(device).record_event()
        self.has_failed, self.finished = error is not None, time.time_ns()

    @property
    def state(self) -> str:
        """Where the call is: if the host has left it, "scheduled" until its work on a GPU is known to be done."""
        if self.finished is None or self.has_failed:
            return "started"
        if self.details.device is None or self.details.device.type != "cuda":
            return "completed"
        with suppress(RuntimeError):  # the device is broken
            if self.done is not None and self.done.query():
                return "completed"
        return "scheduled"

    def entry(self, group: str, number: int, name: str, later: int = 0) -> dict[str, Any]:
        """An entry of a file: of this call, or of a barrier inside of it, which comes `later`."""
        state, traffic = self.state, None if later else self.details.traffic
        sent, received = (0, 0) if traffic is None else traffic()
        return {
            "record_id": self.number + later, "op_id": self.number + later, "collective_seq_id": number,
            "pg_id": 0, "p2p_seq_id": 0, "is_p2p": False, "process_group": (group, _DESCRIPTION),
            "profiling_name": f"{_COLLECTIVE} {name.strip().replace(':', ';')}",  # the analysis splits it at colons
            "time_created_ns": self.created, "time_discovered_started_ns": self.created,
            "time_discovered_completed_ns": self.finished if state == "completed" else None,
            "state": state, "retired": self.finished is not None,
            "input_sizes": [[sent]], "input_dtypes": ["Byte"], "output_sizes": [[received]], "output_dtypes": ["Byte"],
            "frames": [{"name": of.co_name, "filename": of.co_filename, "line": line} for of, line in self.frames],
        }  # fmt: skip


class FlightRecorder:
    """The last `size` calls of this rank, and the file of them. All `ranks` ranks share the store. `barriers` returns
    the shared-memory transport, if there is one: whose barriers are recorded where a peer is stuck inside of a call."""

    def __init__(
        self, rank: int, ranks: int, store: BoundedStore, size: int, barriers: Callable[[], Any] = lambda: None
    ) -> None:
        self.rank, self.ranks, self._barriers, self._count = rank, ranks, barriers, 0
        self._records: deque[Record] = deque(maxlen=size)
        self._has_failed = False
        self._answered_at: int | None = None  # the count when this rank last wrote its file for another one
        self._stopped = threading.Event()
        self._store = store.with_own_connection(_PATIENCE)  # this rank may be waiting in the first one
        self._known = ""
        with suppress(RuntimeError):  # the store of a fake group keeps nothing
            self._known = self._request()
        self._thread = threading.Thread(target=self._watch, name="shardweave-flight-recorder", daemon=True)
        self._thread.start()

    def begin(self, call: Any, details: Details) -> Record:
        record = Record(self._count, call, details)
        self._count += 1
        self._records.append(record)
        self._enter_call()
        return record

    def end(self, call: Any, error: BaseException | None) -> None:
        """The host leaves a call, if it has not yet. Waits for files of other ranks if it has failed."""
        record = next((record for record in reversed(self._records) if record.call is call), None)
        if record is not None and record.finished is None:
            record.end(error)
            self._enter_call()
        if error is not None and not getattr(error, "recoverable", False):
            self._fail()

    @contextmanager
    def attempt(self, call: Any) -> Iterator[None]:
        """A context in which ranks may wait for each other before a call. Recorded only if that fails."""
        record = self.begin(call, Details())
        try:
            yield
        except TransportError as error:
            self.end(call, error)
            raise
        finally:
            while record.finished is None and self._records and self._records[-1].number >= record.number:
                self._count = self._records.pop().number  # the analysis compares the counts of ranks
            self._enter_call()

    def dump(self, folder: Path) -> Path:
        """Write this rank's file."""
        folder.mkdir(parents=True, exist_ok=True)
        return write_whole(folder / f"shardweave_{self.rank}", pickle.dumps(self.as_dict()))

    def as_dict(self) -> dict[str, Any]:
        """The contents of the file."""
        records, barriers = list(self._records), self._barriers()
        entries, groups = [], {}
        for record in records:
            group, name = _name_of(record.call.ranks), f"{record.details.transport} {record.call.text}"
            entries.append(record.entry(group, record.call.number, name))
            groups[group] = record.call.ranks
        late = barriers.late_peers() if barriers is not None and records else []
        for i, (peer, number) in enumerate(late, 1):  # all ranks have the record of the call, the last one
            pair, text = (min(self.rank, peer), max(self.rank, peer)), f"barrier inside of {records[-1].call.text}"
            groups[name := f"barriers of {_name_of(pair)}"] = pair
            entries.append(records[-1].entry(name, number, text, i))
        config = {n: {"name": n, "desc": _DESCRIPTION, "ranks": str(list(ranks))} for n, ranks in groups.items()}
        file = {"version": _VERSION, "pg_config": config, "pg_status": {}, "comm_lib_version": ""}
        return {**file, "entries": entries}

    def close(self) -> None:
        """The process group has ended."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _enter_call(self) -> None:
        """Tell peers in shared memory which call this rank is in."""
        if (barriers := self._barriers()) is not None:
            call = self._records[-1].call if self._records and self._records[-1].state == "started" else None
            # Hashes of ints are equal on all ranks.
            barriers.enter_call(0 if call is None else hash((call.ranks, call.number)) & _KEYS or 1)

    def _fail(self) -> None:
        """A call of this rank has failed: if it is the first one, write the file, have all other ranks write theirs,
        and wait briefly for them, because they may be ended when this rank raises. A file that this rank has written
        for another one in the same call, or just before it, stays: it shows what this rank did while peers waited."""
        answered, has_failed, self._has_failed = self._answered_at, self._has_failed, True
        if has_failed or (answered is not None and self._count <= answered + 1):
            return
        self._write(str(self.rank))
        with suppress(RuntimeError):  # the store is gone
            own = f"{self.rank} {secrets.token_hex(8)}"
            # That of another rank, if it was first.
            request = self._known = self._ask(lambda store: store.compare_set(_REQUESTED, self._known, own)).decode()
            self._ask(lambda store: store.set(f"{request} {self.rank}", "written"))
            self._store.wait([f"{request} {rank}" for rank in range(self.ranks)], _PATIENCE)

    def _write(self, failed: str) -> None:
        """Write the file because a call of rank `failed` has failed. Raises nothing: that error matters more."""
        try:
            path = self.dump(flight_record_folder())
            _logger.warning("a call of rank %s has failed: flight records are in %s", failed, path)
        except Exception as error:
            _logger.warning("a call of rank %s has failed: flight records cannot be written: %r", failed, error)

    def _watch(self) -> None:
        """Write this rank's file when another rank has failed. Runs on a thread, since this rank may be stuck."""
        has_stopped = False
        with suppress(RuntimeError):  # the store is gone
            while not has_stopped:
                has_stopped = self._stopped.wait(_POLL)  # then look once more
                with suppress(dist.DistStoreError):  # the store is late
                    if (request := self._request()) != self._known:
                        self._known, self._answered_at = request, self._count
                        self._write(request.split()[0])
                        self._ask(lambda store: store.set(f"{self._known} {self.rank}", "written"))

    def _request(self) -> str:
        """The last request for all files: the rank that has failed, and a word of its own; "" if there is none."""
        return self._ask(lambda store: store.get(_REQUESTED).decode() if store.check([_REQUESTED]) else "")

    def _ask(self, operation: Callable[[dist.Store], Any]) -> Any:
        return self._store.run(operation, _LONGEST_ANSWER)


def _name_of(ranks: tuple[int, ...]) -> str:
    """A name of these ranks, which no other ranks have."""
    if len(ranks) <= _MOST_RANKS_NAMED:
        return f"ranks {','.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {blake2b(str(ranks).encode(), digest_size=4).hexdigest()}"


current: FlightRecorder | None = None
"""The recorder of the default process group; None where SHARDWEAVE_FR_BUFFER_SIZE does not ask for one."""


def start(rank: int, ranks: int, store: BoundedStore, barriers: Callable[[], Any]) -> None:
    """Start the recorder of a new default process group, if `requested_flight_records` asks for one."""
    global current
    size = requested_flight_records()
    current = FlightRecorder(rank, ranks, store, size, barriers) if size else None


def stop() -> None:
    """The default process group has ended."""
    global current
    if current is not None:
        current.close()
    current = None


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
    return current.dump(flight_record_folder() if folder is None else Path(folder))
