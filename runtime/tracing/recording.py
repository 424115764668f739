"""Counts the distinct redistributions of a running program, with the lines that call them."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, ShardweaveError
from ...planner import Layout, Mesh, plan, position_of
from ..convert_specs import dtype_name, layout_of_spec, mesh_of
from ..dtensor.observer import observe
from ..dtensor.partials import plain_requests
from ..transports.select import sessions
from .trace_file import MOST_ENTRIES, Cost, Entry, Trace, remove_larger, remove_own

_ROOT = Path(inspect.getfile(ShardweaveError)).parent
_SKIPPED_FILES = (
    *(str(_ROOT / room) + os.sep for room in ("runtime", "planner", "kernels", "cli")),
    str(_ROOT / "__main__.py"),
    str(Path(torch.__file__).parent) + os.sep,
    "<",  # frozen and generated code
)
T = TypeVar("T")

_MAX_PLANNED_RANKS = 64  # on larger meshes only this rank's bytes are computed


@dataclass(frozen=True)
class _Key:
    current: DTensorSpec
    target: DTensorSpec
    dtype: torch.dtype
    where: str
    traced: bool


class Recording:
    """The counters of `record`.

    Attributes:
        left_out: the number of calls that the trace does not contain, by reason.
        written: the file of this rank, once the block has ended.
    """

    def __init__(self) -> None:
        self._calls: Counter[_Key] = Counter()
        self._entries: Counter[Entry] = Counter()
        self._meshes: dict[DeviceMesh, Mesh] = {}
        self._torchrun = _torchrun_rank()
        (self._rank, self._size), self._ranks_communicate = self._torchrun or (0, 1), True
        self._sessions: set[str] = set()
        self._read_group()
        self.left_out: Counter[str] = Counter()
        self.written: Path | None = None
        self._process = os.getpid()

    def note(self, dtype: torch.dtype, current: DTensorSpec, target: DTensorSpec) -> None:
        for spec in (current, target):
            if spec.mesh not in self._meshes:  # read now: a submesh needs the process group to list its ranks
                self._meshes[spec.mesh] = mesh_of(spec.mesh)
        key = _Key(current, target, dtype, _caller(), torch.compiler.is_compiling())
        try:
            if not (key.traced and key in self._calls):  # repeated passes over one graph are not calls
                self._count(self._calls, key)
        except TypeError:  # cannot be hashed
            self.left_out["symbolic shapes"] += 1

    def note_layouts(
        self, dtype: torch.dtype, mesh: Mesh, shape: Sequence[int], source: Layout | str, target: Layout | str
    ) -> None:
        """Count a redistribution of a plain tensor."""
        self.note_entry(Entry(mesh, None, tuple(shape), dtype_name(dtype), str(source), str(target), _caller()))

    def note_entry(self, entry: Entry) -> None:
        """Count a redistribution that does not call `redistribute`."""
        self._count(self._entries, entry)

    def _count(self, calls: Counter[T], key: T) -> None:
        self._read_group()
        if key not in calls and len(self._calls) + len(self._entries) >= MOST_ENTRIES:
            self.left_out[f"beyond the first {MOST_ENTRIES} distinct ones"] += 1
            return
        calls[key] += 1

    def _read_group(self) -> None:
        """Read rank, world size and sessions, because the group may be destroyed before the trace is made."""
        self._sessions |= sessions()
        if dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._ranks_communicate = dist.get_backend() != "fake"

    def begin(self, path: Path) -> None:
        """Remove traces of an earlier run at `path`, which could be taken for this run's if it does not finish."""
        remove_own(path, self._rank, self._size)
        if self._torchrun or dist.is_initialized():  # otherwise the world size may not be known yet
            remove_larger(path, self._size)

    def end(self, path: Path, ended: str | None) -> None:
        """Write the trace. `ended`: the exception that ended the block. A process that was forked in the block writes
        none: the file belongs to its parent."""
        if os.getpid() != self._process:
            return
        self.written = replace(self.trace(), ended=ended).write(path)

    def trace(self) -> Trace:
        """The trace of the calls that have been counted so far."""
        self._read_group()
        redistributions: dict[Entry, Cost] = {}
        left_out = self.left_out.copy()
        counts: list[tuple[_Key | Entry, int]] = [*self._calls.items(), *self._entries.items()]
        for key, calls in counts:
            try:
                entry = key if isinstance(key, Entry) else _entry(key, self._meshes)
                bytes_received = _bytes_received(entry, self._rank)
                # Different specs may have the same entry, since a trace does not contain strides.
                before = redistributions[entry].calls if entry in redistributions else 0
                redistributions[entry] = Cost(max(before, calls) if entry.traced else before + calls, bytes_received)
            except ShardweaveError as error:
                left_out[str(error)] += calls
        alive = (_process_start(), round(time.time(), 2)) if self._ranks_communicate else (0.0, 0.0)
        names = tuple(sorted(self._sessions))
        return Trace(torch.__version__, self._size, (self._rank,), redistributions, dict(left_out), alive, None, names)


def _entry(key: _Key, meshes: Mapping[DeviceMesh, Mesh]) -> Entry:
    """The entry of a recorded call, with plain sums in place of transformed partials.

    Raises:
        ShardweaveError: a redistribution that shardweave does not support.
    """
    requests = plain_requests(key.current, key.target)
    current, target = requests[0].current, requests[-1].target
    if current.tensor_meta is None:
        raise ArgumentError("a spec without tensor_meta")
    mesh, other = meshes[current.mesh], meshes[target.mesh]
    source, destination = layout_of_spec(current, mesh), layout_of_spec(target, other)
    shape, dtype = tuple(current.tensor_meta.shape), dtype_name(key.dtype)
    target_mesh = None if mesh == other else other
    return Entry(mesh, target_mesh, shape, dtype, str(source), str(destination), key.where, key.traced)


def _bytes_received(entry: Entry, rank: int) -> int:
    """The most bytes that a rank receives; on large meshes the bytes of this rank.

    Raises:
        ShardweaveError: a redistribution that shardweave does not support.
    """
    mesh, other = entry.mesh, entry.target_mesh or entry.mesh
    whole = max(mesh.size, other.size) <= _MAX_PLANNED_RANKS
    at = None if whole else position_of(rank, mesh, other)
    program = plan(mesh, entry.shape, entry.dtype, entry.source, entry.target, target_mesh=other, rank=at)
    return max(program.bytes_received)


def _torchrun_rank() -> tuple[int, int] | None:
    """Rank and world size from torchrun's environment variables; None where they are not set."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) else None


def _process_start() -> float:
    """The start of this process in seconds since the epoch, rounded to 0.01."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 2)


def _caller() -> str:
    """The file, line and function of the innermost frame outside torch and shardweave."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED_FILES):
            break
        frame = frame.f_back
    if frame is None:
        return "autograd" if in_backward() else "torch"
    at = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
    return f"{at}, backward" if in_backward() else at


def in_backward() -> bool:
    return torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]


_active: Recording | None = None


def active() -> Recording | None:
    return _active


def set_active(recording: Recording | None) -> None:
    """Count redistributions in `recording`; None stops counting."""
    global _active
    _active = recording
    observe(recording)
