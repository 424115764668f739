"""One call of this rank, as an entry in the format of torch's flight recorder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from types import CodeType
from typing import Any, Protocol

import torch

Traffic = Callable[[], tuple[int, int]]
"""Returns the bytes that this rank sends and receives in a call."""

_COLLECTIVE = "nccl:all_to_all"
"""The analysis accepts only libraries and collectives that it knows; this library is known to all versions of torch. Of
an all-to-all it compares the total sizes of inputs and outputs, so ranks may differ."""
DESCRIPTION = "shardweave"
_FRAMES = 16
_RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MOST_RANKS_NAMED = 16


class Call(Protocol):
    """The part of `rendezvous.CallRecord` that is recorded."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def number(self) -> int: ...
    @property
    def text(self) -> str: ...


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
        entry = started_entry(self.number, group_name(self.call.ranks), self.call.number, name, self.created, nbytes)
        entry |= {"state": self.state, "retired": self.finished is not None}
        if entry["state"] == "completed" and self.finished is not None:
            entry["time_discovered_completed_ns"] = self.finished
            entry["duration_ms"] = (self.finished - self.created) / 1e6
        entry["frames"] = [
            {"name": code.co_name, "filename": code.co_filename, "line": line} for code, line in self.frames
        ]
        return entry


def group_name(ranks: tuple[int, ...]) -> str:
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


def started_entry(
    record: int, group: str, number: int, name: str, created: int, nbytes: tuple[int, int]
) -> dict[str, Any]:
    """An entry of a collective that has started, in the format of torch's flight recorder.

    Args:
        record: counts the entries of this rank.
        number: counts the collectives of the group.
        nbytes: sent and received.
    """
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (group, DESCRIPTION),
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
