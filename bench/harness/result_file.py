"""Measured results, in pytest-benchmark's JSON: what it does not know of a row is in `extra_info`.

A row is one contender on one case of a suite. Its samples are rounds: of several ranks each is the slowest rank's. Less
is better in every unit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ...errors import ArgumentError

# Of a sample in pytest-benchmark's seconds; what is counted ("×") stands there as it is.
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "×": 1.0}
_HEAD = ("datetime", "command", "scale", "match", "machine_info", "benchmarks", "absent", "faults")


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Attributes:
        contender: "ours", "ours, …" for a variant of it, or another library measured in the same run.
        unit: of the samples, one of `UNITS`; "×" is a ratio, of something counted.
        samples: one or more, of which `median` and `quartiles` are.
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

    def __post_init__(self) -> None:
        if self.unit not in UNITS or not self.samples or not all(0 <= one < float("inf") for one in self.samples):
            raise ValueError(f"{self.key}: {self.samples} {self.unit}; allowed: finite numbers in {', '.join(UNITS)}")

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, *_, high = quantiles(self.samples * (1 + (len(self.samples) == 1)), n=4, method="inclusive")
        return low, high

    @property
    def is_ours(self) -> bool:
        return is_ours(self.contender)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.contender

    @property
    def seconds(self) -> list[float]:
        """The samples, as pytest-benchmark has them."""
        return [one * UNITS[self.unit] for one in self.samples]

    @property
    def extra_info(self) -> dict[str, Any]:
        """All but the samples."""
        return {name: value for name, value in asdict(self).items() if name != "samples"}

    @classmethod
    def of(cls, benchmark: Mapping[str, Any]) -> Row:
        about = benchmark["extra_info"]
        return cls(samples=tuple(one / UNITS[about["unit"]] for one in benchmark["stats"]["data"]), **about)


def is_ours(contender: str) -> bool:
    return contender == "ours" or contender.startswith("ours, ")


@dataclass(frozen=True)
class Missing:
    """A contender without a row: it is not here, it refuses the case, or its result was wrong. Of a suite whose process
    ended badly, with no case and no contender."""

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
        scale: only results of one scale have the same cases.
        absent: what could not be measured, and why.
        faults: what went wrong, and so has no row.
        match: only cases with this in their name were asked for.
    """

    date: str
    command: str
    scale: str
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    absent: tuple[Missing, ...] = ()
    faults: tuple[Missing, ...] = ()
    match: str = ""

    def head(self) -> dict[str, Any]:
        """What the file has besides the benchmarks."""
        return {
            "datetime": self.date,
            "command": self.command,
            "scale": self.scale,
            "match": self.match,
            "machine_info": dict(self.machine),
            "absent": [asdict(one) for one in self.absent],
            "faults": [asdict(one) for one in self.faults],
        }

    def to_json(self) -> str:
        """For programs that do not run under pytest-benchmark."""
        benchmarks = [{"stats": {"data": row.seconds}, "extra_info": row.extra_info} for row in self.rows]
        return json.dumps({**self.head(), "benchmarks": benchmarks}, indent=1, ensure_ascii=False) + "\n"


def read(path: Path, argument: str) -> Results:
    """
    Raises:
        ArgumentError: the file is not there, cut short or something else; named by `argument`.
    """
    what = "what `python -m shardweave bench --json` writes"
    given = load(path, argument, what, *_HEAD)
    try:
        rows = tuple(map(Row.of, given["benchmarks"]))
        absent, faults = (tuple(Missing(**one) for one in given[name]) for name in ("absent", "faults"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{argument}: {str(path)!r} is something else: {error!r}; allowed: {what}") from None
    if len({row.key for row in rows}) < len(rows) or not (rows or absent or faults):
        raise ArgumentError(f"{argument}: {str(path)!r} has no rows, or one of them twice; allowed: {what}")
    machine = given["machine_info"]
    return Results(given["datetime"], given["command"], given["scale"], machine, rows, absent, faults, given["match"])


def load(path: Path, argument: str, what: str, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys.

    Raises:
        ArgumentError: it is something else, or cannot be read.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a folder, no text, cut short
        raise ArgumentError(f"{argument}: {str(path)!r} cannot be read: {error}; allowed: {what}") from None
    if not isinstance(given, dict) or not given.keys() >= set(keys):
        raise ArgumentError(f"{argument}: {str(path)!r} is something else; allowed: {what}")
    return given


def contenders(rows: Sequence[Row]) -> list[str]:
    """Ours first, the others in the order in which they come."""
    return sorted(dict.fromkeys(row.contender for row in rows), key=lambda name: not is_ours(name))
