"""The one form of measured results: what was measured, by what command, on what machine; JSON with a version.

A row is one contender on one case of a suite. Its samples are rounds: of several ranks each is the slowest rank's. Less
is better in every unit.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeGuard

from ..errors import ArgumentError

VERSION = 2
UNITS = ("s", "ms", "µs", "ns", "×")
SCALES = ("full", "quick", "dry")


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Attributes:
        contender: "ours", or "ours, …" in one of several ways; anyone else beside it, measured in the same run.
        unit: of the samples, one of `UNITS`; "×" is a ratio, of something counted.
        samples: one or more, of which `median`, `low` and `high` (the quartiles) are.
        bytes: by formula, what the rank moves that moves most; `detail["bytes are"]` says which. None: not known.
        bound_bytes: the least that it has to be. None: no bound is known.
        share_of_ceiling: what a bare copy of the bytes takes in the same run, as a part of what this takes.
        paired: samples with the same index are of the same request in every run, not rounds of one.
        detail: what else is to be said, of JSON's types.
    """

    suite: str
    case: str
    contender: str
    unit: str
    samples: tuple[float, ...]
    bytes: int | None = None
    bound_bytes: int | None = None
    share_of_ceiling: float | None = None
    paired: bool = False
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def is_ours(self) -> bool:
        return is_ours(self.contender)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.contender

    def to_dict(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "suite": self.suite,
            "case": self.case,
            "contender": self.contender,
            "unit": self.unit,
            "median": self.median,
            "low": low,
            "high": high,
            "samples": list(self.samples),
            "bytes": self.bytes,
            "bound_bytes": self.bound_bytes,
            "share_of_ceiling": self.share_of_ceiling,
            "paired": self.paired,
            "note": self.note,
            "detail": dict(self.detail),
        }

    @classmethod
    def from_dict(cls, given: Any) -> Row:
        """
        Raises:
            ArgumentError: something is missing, or not as `to_dict` has it.
        """
        if not isinstance(given, dict):
            raise ArgumentError(f"row: {_short(given)}; allowed: an object")
        for name in ("suite", "case", "contender", "unit"):
            if not isinstance(given.get(name), str):
                raise ArgumentError(f"row: {name} is {_short(given.get(name))}; allowed: text")
        where = f"row {given['suite']}, {given['case']}, {given['contender']}"
        if given["unit"] not in UNITS:
            raise ArgumentError(f"{where}: unit {_short(given['unit'])}; allowed: {', '.join(UNITS)}")
        samples = given.get("samples")
        if not isinstance(samples, list) or not samples or not all(is_number(one) and one > 0 for one in samples):
            raise ArgumentError(f"{where}: samples {_short(samples)}; allowed: one or more finite numbers above 0")
        for name in ("bytes", "bound_bytes", "share_of_ceiling"):
            if given.get(name) is not None and not (is_number(given[name]) and given[name] >= 0):
                raise ArgumentError(f"{where}: {name} {_short(given[name])}; allowed: a number from 0 on, or null")
        detail = given.get("detail", {})
        if not isinstance(detail, dict):
            raise ArgumentError(f"{where}: detail {_short(detail)}; allowed: an object")
        _check_shown(detail, where)
        row = cls(
            given["suite"], given["case"], given["contender"], given["unit"], tuple(samples), given.get("bytes"),
            given.get("bound_bytes"), given.get("share_of_ceiling"), bool(given.get("paired", False)),
            str(given.get("note", "")), detail,
        )  # fmt: skip
        for name, value in zip(("median", "low", "high"), (row.median, *row.quartiles), strict=True):
            if not is_number(given.get(name)) or not math.isclose(given[name], value):
                raise ArgumentError(
                    f"{where}: {name} {_short(given.get(name))}; allowed: that of the samples, {value:g}"
                )
        return row


def _check_shown(detail: Mapping[str, Any], where: str) -> None:
    """Of what tables and pictures show."""
    kinds: dict[str, type] = {"rotation": dict} if "rotation" in detail else {}
    if detail.get("sweep"):
        kinds |= {"sweep": str, "source": str, "target": str, "tensor_bytes": int}
    for name, kind in kinds.items():
        if not isinstance(detail.get(name), kind):
            raise ArgumentError(f"{where}: {name} of detail is {_short(detail.get(name))}; allowed: {kind.__name__}")


def is_ours(contender: str) -> bool:
    return contender == "ours" or contender.startswith("ours, ")


@dataclass(frozen=True)
class Absent:
    """A contender that is not here, or that refuses the case."""

    suite: str
    case: str
    contender: str
    why: str


@dataclass(frozen=True)
class Fault:
    """A wrong result, or none at all; of a suite whose process ended badly, with no case and no contender."""

    suite: str
    case: str
    contender: str
    why: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.suite, self.case, self.contender, " ".join(self.why.split()))))


@dataclass(frozen=True)
class Results:
    """What one command measured.

    Attributes:
        scale: one of `SCALES`: only results of one scale have the same cases.
        absent: what could not be measured, and why.
        faults: what went wrong, and so has no row.
        match: only cases with this in their name were asked for.
    """

    date: str
    command: str
    scale: str
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...] = ()
    faults: tuple[Fault, ...] = ()
    match: str = ""

    def of(self, suite: str) -> list[Row]:
        return [row for row in self.rows if row.suite == suite]

    def to_json(self) -> str:
        return (
            json.dumps(
                {
                    "version": VERSION,
                    "date": self.date,
                    "command": self.command,
                    "scale": self.scale,
                    "match": self.match,
                    "machine": dict(self.machine),
                    "faults": [asdict(one) for one in self.faults],
                    "absent": [asdict(one) for one in self.absent],
                    "rows": [row.to_dict() for row in self.rows],
                },
                indent=1,
                ensure_ascii=False,
                allow_nan=False,
            )
            + "\n"
        )

    def write(self, path: Path, argument: str) -> None:
        """
        Raises:
            ArgumentError: it cannot be written; `argument` is the one that named the file.
        """
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{argument}: {str(path)!r} cannot be written: {error}; allowed: a file") from None


def read(path: Path, argument: str) -> Results:
    """
    Raises:
        ArgumentError: the file is not there, cut short, of another version or something else; named by `argument`.
    """
    given = read_versioned(path, argument, VERSION, "results of `python -m shardweave bench`", "rows")
    for name in ("date", "command", "scale", "match"):
        if not isinstance(given.get(name), str):
            raise ArgumentError(f"{argument}: {name} of {str(path)!r} is {_short(given.get(name))}; allowed: text")
    if given["scale"] not in SCALES:
        allowed = ", ".join(SCALES)
        raise ArgumentError(f"{argument}: scale of {str(path)!r} is {_short(given['scale'])}; allowed: {allowed}")
    about = given.get("machine")
    if not _is_machine(about):
        allowed = "an object with cpu, a name; cores, a number; and gpus, a list of names"
        raise ArgumentError(f"{argument}: machine of {str(path)!r} is {_short(about)}; allowed: {allowed}")
    try:
        rows = tuple(map(Row.from_dict, given["rows"]))
        absent = tuple(Absent(*_of_contender(one)) for one in given["absent"])
        faults = tuple(Fault(*_of_contender(one)) for one in given["faults"])
    except ArgumentError as error:
        raise ArgumentError(f"{argument}: {str(path)!r}: {error}") from None
    except (KeyError, TypeError):
        raise ArgumentError(
            f"{argument}: {str(path)!r}: absent or faults lack suite, case, contender or why; allowed: all"
        ) from None
    if not (rows or absent or faults):
        raise ArgumentError(f"{argument}: {str(path)!r} has no rows, nothing absent and no faults; allowed: some")
    twice = sorted({row.key for row in rows if sum(other.key == row.key for other in rows) > 1})
    if twice:
        raise ArgumentError(f"{argument}: {str(path)!r} has {', '.join(twice[0])} more than once; allowed: once")
    return Results(given["date"], given["command"], given["scale"], about, rows, absent, faults, given["match"])


def _is_machine(given: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(given, dict) or not isinstance(given.get("gpus"), list):
        return False
    names = (given.get("cpu"), *given["gpus"])
    numbers = (given.get("cores"), given.get("last_level_cache_mib", 0))
    return all(isinstance(name, str) for name in names) and all(map(is_number, numbers))


def _of_contender(given: Any) -> list[str]:
    return [str(given[name]) for name in ("suite", "case", "contender", "why")]


def read_versioned(path: Path, argument: str, version: int, what: str, listed: str) -> dict[str, Any]:
    """A JSON object with that version and a list of that name.

    Raises:
        ArgumentError: it is something else, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no text"
        raise ArgumentError(f"{argument}: {str(path)!r} cannot be read: {why}; allowed: {what}") from None
    try:
        given = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        how = "is cut short" if _ends_early(text, error) else "is no JSON"
        raise ArgumentError(f"{argument}: {str(path)!r} {how}: {error}; allowed: {what}") from None
    if not isinstance(given, dict) or "version" not in given:
        raise ArgumentError(f"{argument}: {str(path)!r} is something else; allowed: {what}")
    if given["version"] != version:
        raise ArgumentError(
            f"{argument}: {str(path)!r} is of version {_short(given['version'])}; allowed: {version}, measured anew"
        )
    if not isinstance(given.get(listed), list):
        raise ArgumentError(f"{argument}: {str(path)!r} has no list of {listed}; allowed: {what}")
    return given


def _ends_early(text: str, error: Exception) -> bool:
    """Whether it is the end of the text that could not be read; a word that is cut is seen where it begins."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= len(text.rstrip()) - len("-Infinity") or error.msg.startswith("Unterminated string")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")


def is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= sys.float_info.max


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."


def contenders(rows: Sequence[Row]) -> list[str]:
    """Ours first, the others in the order in which they come."""
    return sorted(dict.fromkeys(row.contender for row in rows), key=lambda name: not is_ours(name))
