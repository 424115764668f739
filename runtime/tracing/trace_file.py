"""Traces: the distinct redistributions of a rank of a program, as JSON that `replay` reads."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from glob import escape
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, ShardweaveError
from ...planner import MOST_RANKS, Layout, Mesh, check_dtype, check_layout, check_shape, mesh_to_dict
from ..text_files import read_text

VERSION = 2
MOST_ENTRIES = 4096
"""The most distinct redistributions that a rank counts."""
MOST_BYTES = 4 << 20
"""The most bytes of a trace file; the redistributions that move least bytes are left out."""
_MOST_REASONS = 64  # in `left_out`
_MOST_SESSIONS = 256
_LONGEST_REASON = 200
_INT64_END = 1 << 63
_HEAD = '{"shardweave_trace"'
FSDP_COLLECTIVES = {
    ("S0", "R"): "all_gather",
    ("P", "S0"): "reduce_scatter",
    ("Pavg", "S0"): "reduce_scatter",
    ("P S0", "R S0"): "all_reduce",
    ("Pavg S0", "R S0"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("Pavg", "R"): "all_reduce",
}
"""The collectives that FSDP2 calls on its flat tensors, by source and target. The last mesh dim has the shards."""


@dataclass(frozen=True)
class Entry:
    """One distinct redistribution.

    Attributes:
        mesh: the source's mesh.
        target_mesh: the target's mesh; None: the same.
        shape: the global shape.
        source, target: layouts in text form.
        where: file, line and function of the caller; ", backward" is appended for calls by autograd.
        traced: recorded while torch.compile traced, so that the number of calls is not known.
        fsdp: issued by FSDP2 as one of `FSDP_COLLECTIVES` on a flat tensor, without `redistribute`.
    """

    mesh: Mesh
    target_mesh: Mesh | None
    shape: tuple[int, ...]
    dtype: str
    source: str
    target: str
    where: str
    traced: bool = False
    fsdp: bool = False

    def to_dict(self) -> dict[str, Any]:
        meshes = {
            "mesh": mesh_to_dict(self.mesh),
            "target_mesh": None if self.target_mesh is None else mesh_to_dict(self.target_mesh),
        }
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, **meshes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        other = data["target_mesh"]
        mesh, target_mesh = Mesh(**data["mesh"]), None if other is None else Mesh(**other)
        texts = {name: data[name] for name in ("dtype", "source", "target", "where")}
        flags = {name: data[name] for name in ("traced", "fsdp")}
        if not all(isinstance(text, str) for text in texts.values()) or {*map(type, flags.values())} != {bool}:
            raise TypeError(f"{texts}, {flags}")
        check_dtype(data["dtype"])
        shape, layouts = tuple(map(_whole, data["shape"])), (data["source"], data["target"])
        for name, of in (("source", mesh), ("target", target_mesh or mesh)):
            check_layout(name, Layout.parse(data[name]), of, check_shape(shape), data["dtype"])
        if data["fsdp"] and not (layouts in FSDP_COLLECTIVES and len(shape) == 1 and target_mesh is None):
            raise TypeError(f"{' -> '.join(layouts)} of {list(shape)} is not a collective of FSDP2")
        return cls(mesh, target_mesh, shape, **texts, **flags)


@dataclass(frozen=True)
class Cost:
    """The number of calls of a redistribution on a rank, and the most bytes that any rank receives per call."""

    calls: int
    bytes_received: int

    @property
    def total_bytes(self) -> int:
        return self.calls * self.bytes_received


@dataclass(frozen=True)
class Trace:
    """The redistributions of some ranks of one program.

    Attributes:
        torch: the version of torch.
        world_size: the size of the program's default process group.
        ranks: the recorded ranks.
        redistributions: the distinct redistributions and their costs.
        left_out: the number of calls that the trace does not contain, by reason.
        alive: the start of the rank's process and the time of writing, in seconds since the epoch; zeros in a fake
            process group, whose ranks may be recorded one after the other.
        ended: type and text of the exception that ended the recorded block; None: it finished.
        sessions: names that ranks agree on when they first make a call together by shardweave, which no other run has.
    """

    torch: str
    world_size: int
    ranks: tuple[int, ...]
    redistributions: Mapping[Entry, Cost]
    left_out: Mapping[str, int] = field(default_factory=dict)
    alive: tuple[float, float] = (0.0, 0.0)
    ended: str | None = None
    sessions: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that were not recorded."""
        recorded = set(self.ranks)
        return tuple(rank for rank in range(self.world_size) if rank not in recorded)

    @property
    def why_empty(self) -> str:
        """The reason why a trace has no redistributions."""
        if self.ended is not None:
            return f"the program ended before the first one: {self.ended}"
        if self.left_out:
            return "; ".join(f"{calls} calls are left out: {why}" for why, calls in self.left_out.items())
        return "the program redistributed no DTensor, or only in processes that it started"

    def heaviest_first(self) -> list[tuple[Entry, Cost]]:
        """The redistributions by total bytes, then by calls, descending."""
        return sorted(
            self.redistributions.items(), key=lambda item: (-item[1].total_bytes, -item[1].calls, str(item[0]))
        )

    def to_json(self, most_bytes: int = MOST_BYTES) -> str:
        """The trace as ASCII JSON of at most `most_bytes`; redistributions that do not fit are counted in
        `left_out`."""
        left_out = _bounded_reasons(self.left_out)
        room = most_bytes - len(self._head(left_out)) - _LONGEST_REASON
        lines, beyond = [], 0
        for entry, cost in self.heaviest_first():
            line = json.dumps({**entry.to_dict(), **{f.name: getattr(cost, f.name) for f in fields(cost)}})
            room -= len(line) + len(",\n  ")
            if room < 0:
                beyond += cost.calls
            else:
                lines.append(line)
        if beyond:
            left_out[f"beyond the {most_bytes} bytes of a trace"] = beyond
        separated = ",\n  ".join(lines)
        return f'{self._head(left_out)[:-1]},\n "redistributions": [\n  {separated}\n ]}}\n'

    def _head(self, left_out: Mapping[str, int]) -> str:
        head = {
            "shardweave_trace": VERSION,
            "torch": self.torch,
            "world_size": self.world_size,
            "ranks": self.ranks,
            "alive": self.alive,
            "left_out": left_out,
        }
        optional = {"ended": self.ended, "sessions": self.sessions[:_MOST_SESSIONS]}
        return json.dumps(head | {name: value for name, value in optional.items() if value})

    def write(self, path: Path) -> Path:
        """Write to `path`; in a program of several ranks to this rank's file, with `.rank<n>` before the suffix.

        Removes files of ranks that the program does not have, which an earlier run of more ranks has left.

        Returns:
            The file that was written.
        """
        if self.world_size > 1:
            remove_larger(path, self.world_size)
        written = _file_of_rank(path, self.ranks[0], self.world_size)
        written.write_text(self.to_json(), encoding="utf-8")
        return written

    @classmethod
    def from_json(cls, text: str, name: str = "trace") -> Trace:
        """Parse a trace.

        Raises:
            ArgumentError: not a trace, a trace of another version, or a truncated one; the text begins with `name`.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{name}: not valid JSON ({error}); allowed: a trace written by `record`") from None
        if not isinstance(data, dict) or "shardweave_trace" not in data:
            raise ArgumentError(f"{name}: JSON, but not a trace; allowed: a trace written by `record`")
        if data["shardweave_trace"] != VERSION:
            raise ArgumentError(f"{name}: a trace of version {data['shardweave_trace']!r}; allowed: version {VERSION}")
        try:
            redistributions = {
                Entry.from_dict(entry): Cost(_whole(entry["calls"]), _whole(entry["bytes_received"]))
                for entry in data["redistributions"]
            }
            left_out = {str(why): _whole(calls) for why, calls in data["left_out"].items()}
            began, written = map(_seconds, data["alive"])
            ranks = tuple(map(_whole, data["ranks"]))
            world_size = _whole(data["world_size"])
            if world_size > MOST_RANKS:
                raise TypeError(f"world_size {world_size}; allowed: up to {MOST_RANKS}")
            if not ranks or max(ranks) >= world_size:
                raise TypeError(f"ranks {list(ranks)} of {world_size}")
            meshes = {mesh for entry in redistributions for mesh in (entry.mesh, entry.target_mesh) if mesh is not None}
            for mesh in meshes:
                if mesh.size > world_size or mesh.rank_array.max() >= world_size:
                    raise TypeError(f"{mesh} does not fit in {world_size} ranks")
            ended = data.get("ended")
            if not isinstance(ended, str | None):
                raise TypeError(f"ended: {ended!r}")
            sessions = data.get("sessions", [])
            if not isinstance(sessions, list) or not all(isinstance(name, str) for name in sessions):
                raise TypeError(f"sessions: {sessions!r}")
            alive = began, written
            return cls(str(data["torch"]), world_size, ranks, redistributions, left_out, alive, ended, tuple(sessions))
        except (KeyError, TypeError, ValueError, AttributeError, ShardweaveError) as error:
            raise ArgumentError(f"{name}: not a valid trace: {type(error).__name__}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a trace from a file.

        Raises:
            ArgumentError: as `from_json`, or the file cannot be read.
        """
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ArgumentError(f"{str(path)!r} cannot be read: {why}; allowed: a trace written by `record`") from None
        return cls.from_json(text, repr(str(path)))


def exception_text(error: BaseException) -> str | None:
    """Type and beginning of the text of an exception; None for `SystemExit` with status 0."""
    if isinstance(error, SystemExit) and not error.code:
        return None
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:_LONGEST_REASON]


def remove_own(path: Path, rank: int, world_size: int) -> None:
    """Remove an earlier trace of this rank."""
    own = _file_of_rank(path, rank, world_size)
    if _is_trace(own):
        own.unlink(missing_ok=True)


def remove_larger(path: Path, world_size: int) -> None:
    """Remove earlier traces of ranks that a program of this size does not have."""
    first = world_size if world_size > 1 else 0  # the file of a single rank has no number
    for file in path.parent.glob(f"{escape(path.stem)}.rank*{escape(path.suffix)}"):
        number = file.name[len(f"{path.stem}.rank") : len(file.name) - len(path.suffix)]
        if number.isdecimal() and int(number) >= first and _is_trace(file):
            file.unlink(missing_ok=True)  # another rank may have removed it


def _file_of_rank(path: Path, rank: int, world_size: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if world_size > 1 else path


def _bounded_reasons(left_out: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons, of bounded number and length."""
    ordered = sorted(left_out.items(), key=lambda item: -item[1])
    bounded: Counter[str] = Counter()
    for place, (why, calls) in enumerate(ordered):
        bounded[why[:_LONGEST_REASON] if place < _MOST_REASONS else "other reasons"] += calls
    return dict(bounded)


def _is_trace(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_HEAD)) == _HEAD.encode()
    return False


def _seconds(number: object) -> float:
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < 1e11:
        raise TypeError(f"{number!r} is not a number of seconds since the epoch")
    return float(number)


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _INT64_END:
        raise TypeError(f"{reprlib.repr(number)} is not a whole number from 0 to 2**63 - 1")
    return number
