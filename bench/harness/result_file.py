"""Measured results, in pytest-benchmark's JSON: what it does not know of a row is in `extra_info`.

A row is one contender on one case of a suite. Its samples are rounds: of several ranks each is the slowest rank's. Less
is better in every unit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...errors import ArgumentError, shown
from ...runtime.text_files import read_text

# Of a sample in pytest-benchmark's seconds.
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_HEAD = ("datetime", "command", "scale", "match", "machine_info", "absent", "faults")


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Attributes:
        contender: "ours", "ours, …" for a variant of it, or another library measured in the same run.
        unit: of the samples, one of `UNITS`.
        samples: one or more, of which `median` and `quartiles` are.
        bytes: by formula, what the rank moves that moves most; `detail["bytes are"]` says which. None: not known.
        bound_bytes: the least that it has to be. None: no bound is known.
        share_of_ceiling: what a bare copy of the bytes takes in the same run, as a part of what this takes.
        paired: samples with the same index are of the same request in every run, not rounds of one.
        detail: further information, of JSON's types.
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
        low, high = np.quantile(self.samples, (0.25, 0.75)).tolist()
        return low, high

    @property
    def is_ours(self) -> bool:
        return is_ours(self.contender)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.contender

    @property
    def name(self) -> str:
        return ": ".join(self.key)

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
        extra = benchmark["extra_info"]
        return cls(samples=tuple(one / UNITS[extra["unit"]] for one in benchmark["stats"]["data"]), **extra)


def is_ours(contender: str) -> bool:
    return contender == "ours" or contender.startswith("ours, ")


def contenders(rows: Sequence[Row]) -> list[str]:
    """Ours first, the others in the order of the rows."""
    return sorted(dict.fromkeys(row.contender for row in rows), key=lambda name: not is_ours(name))


@dataclass(frozen=True)
class Missing:
    """A contender without a row: it is not installed, it refuses the case, or its result was wrong. Without a case and
    contender: a suite whose process failed."""

    suite: str
    case: str
    contender: str
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.contender

    def __str__(self) -> str:
        return ": ".join(filter(None, (*self.key, " ".join(self.why.split()))))


@dataclass
class Results:
    """What one command measured.

    Attributes:
        scale: only results of one scale have the same cases.
        absent: what could not be measured, and why.
        faults: what went wrong, and so has no row.
        match: only cases with this in their name were measured.
    """

    date: str
    command: str
    scale: str
    machine: Mapping[str, Any]
    rows: Sequence[Row] = field(default_factory=list)
    absent: Sequence[Missing] = field(default_factory=list)
    faults: Sequence[Missing] = field(default_factory=list)
    match: str = ""

    def put(self, kind: str, one: Row | Missing) -> None:
        """Append to the list "rows", "absent" or "faults"."""
        getattr(self, kind).append(one)

    def head(self) -> dict[str, Any]:
        """What the file has besides the benchmarks."""
        lists = ([asdict(one) for one in some] for some in (self.absent, self.faults))
        return dict(
            zip(_HEAD, (self.date, self.command, self.scale, self.match, dict(self.machine), *lists), strict=True)
        )

    def to_json(self) -> str:
        """For programs that do not run under pytest-benchmark."""
        benchmarks = [{"stats": {"data": row.seconds}, "extra_info": row.extra_info} for row in self.rows]
        return json.dumps({**self.head(), "benchmarks": benchmarks}, indent=1, ensure_ascii=False) + "\n"


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("suite", "case", "contender", "unit", "note", "why", "date", "command", "scale", "match"), (str,)),
    **dict.fromkeys(("cpu", "system", "python", "torch", "triton", "commit", "uncommitted_changes", "driver"), (str,)),
    **dict.fromkeys(("bytes", "bound_bytes"), (int, type(None))), "share_of_ceiling": (int, float, type(None)),
    **dict.fromkeys(("last_level_cache_mib", "memory_gib", "cores"), (int, float)), "paired": (bool,), "gpus": (list,),
    **dict.fromkeys(("detail", "machine", "rotation"), (dict,)), "bytes are": (str,),
}  # fmt: skip


def _check(values: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a value of another type than `_TYPES` has for its name, or a list that is not of texts.
    """
    for name, value in values.items():
        types = _TYPES.get(name)
        if types and type(value) not in types or types == (list,) and not all(isinstance(one, str) for one in value):
            raise ValueError(f"{name}: {shown(value)}")


def read(path: Path, argument: str) -> Results:
    """Read a result file.

    Raises:
        ArgumentError: the file is missing, cut short or something else; the text names `argument`.
    """
    try:
        content = json.loads(read_text(path))
        date, command, scale, match, machine, absent, faults = (content[name] for name in _HEAD)
        rows = [Row.of(one) for one in content["benchmarks"]]
        absent, faults = ([Missing(**one) for one in some] for some in (absent, faults))
        _check({"date": date, "command": command, "scale": scale, "match": match, "machine": machine})
        _check({name: machine[name] for name in ("cpu", "cores", "gpus")} | machine)
        for one in (*rows, *absent, *faults):
            _check(vars(one))
        for row in rows:
            _check(row.detail)
        if len({row.key for row in rows}) < len(rows) or not (rows or absent or faults):
            raise ValueError("no rows, or one of them twice")
        return Results(date, command, scale, machine, rows, absent, faults, match)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        allowed = "what `python -m shardweave bench --json` writes"
        match error:
            case OSError():
                why = error.strerror
            case json.JSONDecodeError() | UnicodeDecodeError():
                why = "it is not JSON"
            case _:
                why = f"JSON, but not results ({error})" if isinstance(error, ValueError) else "JSON, but not results"
        raise ArgumentError(f"{argument}: {shown(str(path))} cannot be read: {why}; allowed: {allowed}") from None
