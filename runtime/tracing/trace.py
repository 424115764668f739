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

VERSION = 2
MOST_ENTRIES = 4096
"""Distinct redistributions that a rank counts."""
MOST_BYTES = 4 << 20
"""Of a trace as it is written; of what does not fit, what moves least bytes is left out."""
_MOST_REASONS = 64  # for which calls are left out
_LONGEST_REASON = 200
_BEYOND = 1 << 63  # what an int64 holds
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
"""By source and target, what FSDP2 calls on its flat tensors. The last mesh dim has the shards."""


@dataclass(frozen=True)
class Entry:
    """One distinct redistribution.

    Attributes:
        mesh, target_mesh: sizes, names and ranks; the target's is None where it is the same.
        source, target: layouts in text form.
        where: file, line and function that asked for it, and whether a backward did.
        traced: while torch.compile traced: how often it runs then is not known.
        fsdp: issued by FSDP2 as one of `FSDP_COLLECTIVES` on a flat tensor, with no `redistribute`.
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
            raise TypeError(f"{' -> '.join(layouts)} of {list(shape)} is no collective of FSDP2's")
        return cls(mesh, target_mesh, shape, **texts, **flags)


@dataclass(frozen=True)
class Cost:
    """How often a rank asked for a redistribution, and the bytes that the rank that gets most receives in each."""

    calls: int
    bytes_received: int

    @property
    def bytes_in_all(self) -> int:
        return self.calls * self.bytes_received


@dataclass(frozen=True)
class Trace:
    """What ranks of one program redistributed.

    Attributes:
        torch: the version that ran.
        world_size: of the program's default process group.
        ranks: whose trace it is.
        left_out: calls that it does not hold, by why.
        alive: seconds since the epoch at which the rank's process began, and at which this was written; zeros in a
            process group that moves nothing, whose ranks may be recorded one after the other.
        ended: the exception that ended what was recorded, type and text; None: it came to its end.
    """

    torch: str
    world_size: int
    ranks: tuple[int, ...]
    found: Mapping[Entry, Cost]
    left_out: Mapping[str, int] = field(default_factory=dict)
    alive: tuple[float, float] = (0.0, 0.0)
    ended: str | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose trace it is not."""
        there = set(self.ranks)
        return tuple(rank for rank in range(self.world_size) if rank not in there)

    @property
    def why_empty(self) -> str:
        """What a trace without redistributions says of itself."""
        if self.ended is not None:
            return f"the program ended before: {self.ended}"
        if self.left_out:
            return "; ".join(f"{calls} calls are left out: {why}" for why, calls in self.left_out.items())
        return "the program asked DTensor for none, or processes that it started did"

    def heaviest_first(self) -> list[tuple[Entry, Cost]]:
        """By bytes in all calls; what moves none by calls."""
        return sorted(self.found.items(), key=lambda item: (-item[1].bytes_in_all, -item[1].calls, str(item[0])))

    def to_json(self, most_bytes: int = MOST_BYTES) -> str:
        """At most so many bytes of ASCII: what no longer fits is counted in `left_out`."""
        left_out = _most_often(self.left_out)
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
        return json.dumps(head if self.ended is None else {**head, "ended": self.ended})

    def write(self, path: Path) -> Path:
        """To `path`; where the program has several ranks, to this one's file, with `.rank<n>` before the suffix.

        Files there of ranks that the program does not have are removed: an earlier run of more ranks has left them.

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
        """
        Raises:
            ArgumentError: no trace, one of another version, or one that is cut short; the text begins with `name`.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{name}: no whole JSON ({error}); allowed: what `record` wrote") from None
        if not isinstance(data, dict) or "shardweave_trace" not in data:
            raise ArgumentError(f"{name}: JSON, but no trace; allowed: what `record` wrote")
        if data["shardweave_trace"] != VERSION:
            raise ArgumentError(
                f"{name}: a trace of version {data['shardweave_trace']!r}; allowed: {VERSION}, which `record` writes"
            )
        try:
            found = {
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
            for mesh in {mesh for entry in found for mesh in (entry.mesh, entry.target_mesh) if mesh is not None}:
                if mesh.size > world_size or mesh.rank_array.max() >= world_size:
                    raise TypeError(f"{mesh} is no mesh of {world_size} ranks")
            ended = data.get("ended")
            if not isinstance(ended, str | None):
                raise TypeError(f"ended: {ended!r}")
            return cls(str(data["torch"]), world_size, ranks, found, left_out, (began, written), ended)
        except (KeyError, TypeError, ValueError, AttributeError, ShardweaveError) as error:
            raise ArgumentError(f"{name}: not as `record` writes it: {type(error).__name__}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Trace:
        """
        Raises:
            ArgumentError: as `from_json`, or the file cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"{str(path)!r} cannot be read: {error}; allowed: a trace that `record` wrote"
            ) from None
        return cls.from_json(text, repr(str(path)))


def exception_text(error: BaseException) -> str | None:
    """Type and first words; None of a script's own end with status 0."""
    if isinstance(error, SystemExit) and not error.code:
        return None
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:_LONGEST_REASON]


def remove_own(path: Path, rank: int, world_size: int) -> None:
    """The trace that an earlier run left of this rank."""
    own = _file_of_rank(path, rank, world_size)
    if _is_trace(own):
        own.unlink(missing_ok=True)


def remove_larger(path: Path, world_size: int) -> None:
    """The traces that an earlier run left of ranks that a program of this size does not have."""
    first = world_size if world_size > 1 else 0  # the file of one rank alone has no number
    for file in path.parent.glob(f"{escape(path.stem)}.rank*{escape(path.suffix)}"):
        number = file.name[len(f"{path.stem}.rank") : len(file.name) - len(path.suffix)]
        if number.isdecimal() and int(number) >= first and _is_trace(file):
            file.unlink(missing_ok=True)  # every rank may do it, some of them on another machine


def _file_of_rank(path: Path, rank: int, world_size: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if world_size > 1 else path


def _most_often(left_out: Mapping[str, int]) -> dict[str, int]:
    """Reasons of a bounded length, and as many."""
    ordered = sorted(left_out.items(), key=lambda item: -item[1])
    kept: Counter[str] = Counter()
    for place, (why, calls) in enumerate(ordered):
        kept[why[:_LONGEST_REASON] if place < _MOST_REASONS else "other reasons"] += calls
    return dict(kept)


def _is_trace(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_HEAD)) == _HEAD.encode()
    return False


def _seconds(number: object) -> float:
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < 1e11:
        raise TypeError(f"{number!r} is no number of seconds since the epoch")
    return float(number)


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _BEYOND:
        raise TypeError(f"{reprlib.repr(number)} is no number of 0 or more, below 2**63")
    return number
