"""Traces: the distinct redistributions of a program, as JSON that ranks merge and `replay` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, ShardweaveError
from ..planner import Layout, Mesh
from ..planner.serialisation import mesh_to_dict

VERSION = 1
MOST_ENTRIES = 4096
"""Distinct redistributions that a trace holds, some 400 bytes each."""


@dataclass(frozen=True)
class Entry:
    """One distinct redistribution.

    Attributes:
        mesh, target_mesh: sizes, names and ranks; the target's is None where it is the same.
        source, target: layouts in text form.
        where: file, line and function that asked for it, and whether a backward did.
        traced: while torch.compile traced: how often it runs then is not known.
    """

    mesh: Mesh
    target_mesh: Mesh | None
    shape: tuple[int, ...]
    dtype: str
    source: str
    target: str
    where: str
    traced: bool = False

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
        if not all(isinstance(text, str) for text in texts.values()) or not isinstance(data["traced"], bool):
            raise TypeError(f"{texts}, traced {data['traced']!r}")
        for text in (data["source"], data["target"]):
            Layout.parse(text)
        return cls(mesh, target_mesh, tuple(map(_whole, data["shape"])), traced=data["traced"], **texts)


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
    """

    torch: str
    world_size: int
    ranks: tuple[int, ...]
    found: Mapping[Entry, Cost]
    left_out: Mapping[str, int] = field(default_factory=dict)

    def heaviest_first(self) -> list[tuple[Entry, Cost]]:
        """By bytes in all calls; what moves none by calls."""
        return sorted(self.found.items(), key=lambda item: (-item[1].bytes_in_all, -item[1].calls, str(item[0])))

    def to_json(self) -> str:
        head = {
            "shardweave_trace": VERSION,
            "torch": self.torch,
            "world_size": self.world_size,
            "ranks": self.ranks,
            "left_out": dict(self.left_out),
        }
        entries = [
            {**entry.to_dict(), **{f.name: getattr(cost, f.name) for f in fields(cost)}}
            for entry, cost in self.heaviest_first()
        ]
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        return f'{json.dumps(head)[:-1]},\n "redistributions": [\n  {lines}\n ]}}\n'

    @classmethod
    def from_json(cls, text: str, name: str = "trace") -> Trace:
        """
        Raises:
            ArgumentError: no trace, one of another version, or one that is cut short; the text begins with `name`.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"{name}: no whole JSON ({error}); allowed: what `record` wrote") from None
        if not isinstance(data, dict) or "shardweave_trace" not in data:
            raise ArgumentError(f"{name}: JSON, but no trace; allowed: what `record` wrote")
        if data["shardweave_trace"] != VERSION:
            raise ArgumentError(f"{name}: a trace of version {data['shardweave_trace']!r}; allowed: {VERSION}")
        try:
            found = {
                Entry.from_dict(entry): Cost(_whole(entry["calls"]), _whole(entry["bytes_received"]))
                for entry in data["redistributions"]
            }
            left_out = {str(why): _whole(calls) for why, calls in data["left_out"].items()}
            return cls(
                str(data["torch"]), _whole(data["world_size"]), tuple(map(_whole, data["ranks"])), found, left_out
            )
        except (KeyError, TypeError, AttributeError, ShardweaveError) as error:
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


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of the ranks of several: of what more than one asked for, the most calls that one of them made.

    Raises:
        ArgumentError: none, or traces of programs of different sizes.
    """
    if not traces or len({trace.world_size for trace in traces}) > 1:
        sizes = sorted({trace.world_size for trace in traces})
        raise ArgumentError(f"traces: of programs of {sizes} ranks; allowed: one or more of one program")
    found: dict[Entry, Cost] = {}
    left_out: dict[str, int] = {}
    for trace in traces:
        for entry, cost in trace.found.items():
            before = found.get(entry, cost)
            found[entry] = Cost(max(before.calls, cost.calls), max(before.bytes_received, cost.bytes_received))
        for why, calls in trace.left_out.items():
            left_out[why] = max(calls, left_out.get(why, 0))
    ranks = tuple(sorted({rank for trace in traces for rank in trace.ranks}))
    return Trace(traces[0].torch, traces[0].world_size, ranks, found, left_out)


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"{number!r} is no number of 0 or more")
    return number
