"""What a program redistributes, written down while it runs: each distinct redistribution, how often, and from where."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, ShardweaveError
from ...planner import Mesh, plan, position_of
from ..convert_specs import dtype_name, layout_of_spec, mesh_of
from ..dtensor.observer import observe
from ..dtensor.partials import transformed_request
from .trace import MOST_ENTRIES, Cost, Entry, Trace, remove_larger, remove_own

_ROOT = Path(inspect.getfile(ShardweaveError)).parent
_NOT_THE_CALLER = (
    *(str(_ROOT / room) + os.sep for room in ("runtime", "planner", "kernels", "cli")),
    str(_ROOT / "__main__.py"),
    str(Path(torch.__file__).parent) + os.sep,
    "<",  # frozen and generated code
)
T = TypeVar("T")

_LARGEST_PLANNED_WHOLE = 64  # ranks; of larger meshes the bytes are this rank's


@dataclass(frozen=True)
class _Key:
    current: DTensorSpec
    target: DTensorSpec
    dtype: torch.dtype
    where: str
    traced: bool


class Recording:
    """What `record` gives its block: it counts until it is written.

    Attributes:
        left_out: calls of redistributions that no trace holds, by why.
        written: this rank's file, once the block has ended.
    """

    def __init__(self) -> None:
        self._calls: Counter[_Key] = Counter()
        self._entries: Counter[Entry] = Counter()
        self._meshes: dict[DeviceMesh, Mesh] = {}
        self._launched = _launched_as()
        (self._rank, self._size), self._ranks_meet = self._launched or (0, 1), True
        self._ask_group()
        self.left_out: Counter[str] = Counter()
        self.written: Path | None = None
        self._process = os.getpid()

    def note(self, dtype: torch.dtype, current: DTensorSpec, target: DTensorSpec) -> None:
        for spec in (current, target):
            if spec.mesh not in self._meshes:  # a part of a mesh knows its ranks while there is a process group
                self._meshes[spec.mesh] = mesh_of(spec.mesh)
        key = _Key(current, target, dtype, _caller(), torch.compiler.is_compiling())
        try:
            if not (key.traced and key in self._calls):  # passes over one graph, which say nothing of calls
                self._count(self._calls, key)
        except TypeError:  # cannot be hashed
            self.left_out["symbolic shapes"] += 1

    def note_entry(self, entry: Entry) -> None:
        """What no `redistribute` is called for."""
        self._count(self._entries, entry)

    def _count(self, calls: Counter[T], key: T) -> None:
        self._ask_group()
        if key not in calls and len(self._calls) + len(self._entries) >= MOST_ENTRIES:
            self.left_out[f"beyond the first {MOST_ENTRIES} distinct ones"] += 1
            return
        calls[key] += 1

    def _ask_group(self) -> None:
        """Now, because it may be gone when the trace is made."""
        if dist.is_initialized():
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._ranks_meet = dist.get_backend() != "fake"

    def begin(self, path: Path) -> None:
        """Remove what an earlier run left at `path`, which would pass for this one where this one does not end."""
        remove_own(path, self._rank, self._size)
        if self._launched or dist.is_initialized():  # else this may be a rank that does not know it yet
            remove_larger(path, self._size)

    def end(self, path: Path, ended: str | None) -> None:
        """Write the trace, with the exception that ended the block, if any. A process that the block forked, and
        that leaves it too, writes none: the file is its parent's."""
        if os.getpid() != self._process:
            return
        self.written = replace(self.trace(), ended=ended).write(path)

    def trace(self) -> Trace:
        """What has been counted so far; what takes most bytes first."""
        self._ask_group()
        found: dict[Entry, Cost] = {}
        left_out = self.left_out.copy()
        noted: list[tuple[_Key | Entry, int]] = [*self._calls.items(), *self._entries.items()]
        for key, calls in noted:
            try:
                entry = key if isinstance(key, Entry) else _entry(key, self._meshes)
                bytes_received = _bytes_received(entry, self._rank)
                # Specs that differ in what no trace says, as in strides.
                before = found[entry].calls if entry in found else 0
                found[entry] = Cost(max(before, calls) if entry.traced else before + calls, bytes_received)
            except ShardweaveError as error:
                left_out[str(error)] += calls
        alive = (_process_began(), round(time.time(), 2)) if self._ranks_meet else (0.0, 0.0)
        return Trace(torch.__version__, self._size, (self._rank,), found, dict(left_out), alive)


def _entry(key: _Key, meshes: Mapping[DeviceMesh, Mesh]) -> Entry:
    """
    Raises:
        ShardweaveError: a redistribution that programs do not carry.
    """
    current, target = key.current, key.target
    if request := transformed_request(current, target):
        current, target = request.current, request.target
    if current.tensor_meta is None:
        raise ArgumentError("a spec without tensor_meta")
    mesh, other = meshes[current.mesh], meshes[target.mesh]
    source, goal = layout_of_spec(current, mesh), layout_of_spec(target, other)
    shape, dtype = tuple(current.tensor_meta.shape), dtype_name(key.dtype)
    target_mesh = None if mesh == other else other
    return Entry(mesh, target_mesh, shape, dtype, str(source), str(goal), key.where, key.traced)


def _bytes_received(entry: Entry, rank: int) -> int:
    """What the rank that gets most receives; of large meshes, what this rank does.

    Raises:
        ShardweaveError: a redistribution that programs do not carry.
    """
    mesh, other = entry.mesh, entry.target_mesh or entry.mesh
    whole = max(mesh.size, other.size) <= _LARGEST_PLANNED_WHOLE
    at = None if whole else position_of(rank, mesh, other)
    program = plan(mesh, entry.shape, entry.dtype, entry.source, entry.target, target_mesh=other, rank=at)
    return max(program.bytes_received)


def _launched_as() -> tuple[int, int] | None:
    """Rank and world size, as torchrun tells each of its processes; None where nothing does."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) else None


def _process_began() -> float:
    """Seconds since the epoch, to the hundredth."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 2)


def _caller() -> str:
    """The nearest frame that is neither torch's nor ours, as file:line and function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_CALLER):
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


def write_down(recording: Recording | None) -> None:
    """From now on redistributions are noted there, or nowhere."""
    global _active
    _active = recording
    observe(recording)
