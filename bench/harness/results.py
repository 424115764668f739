"""Measured results: rows, and what has none.

A row is one contender on one case of a suite. Its samples are the seconds of rounds: of several ranks each is the
slowest rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Attributes:
        contender: "ours", "ours, …" for a variant of it, or another library measured in the same run.
        samples: seconds, one or more, of which `median` and `quartiles` are.
        bytes: by formula, what the rank moves that moves most; `detail["bytes are"]` says which. None: not known.
        bound_bytes: the least that it has to be. None: no bound is known.
        share_of_ceiling: what a bare copy of the bytes takes in the same run, as a part of what this takes.
        detail: further information, of JSON's types.
    """

    suite: str
    case: str
    contender: str
    samples: tuple[float, ...]
    bytes: int | None = None
    bound_bytes: int | None = None
    share_of_ceiling: float | None = None
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples or not all(0 <= one < float("inf") for one in self.samples):
            raise ValueError(f"{self.key}: {self.samples}; allowed: finite numbers")

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.samples, (0.25, 0.75)).tolist()
        return low, high

    @property
    def is_ours(self) -> bool:
        return self.contender == "ours" or self.contender.startswith("ours, ")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.contender


@dataclass(frozen=True)
class Missing:
    """A contender without a row: it is not installed, it refuses the case, or its result was wrong. Without a case and
    contender: a suite whose ranks failed."""

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
        absent: what could not be measured, and why.
        faults: what went wrong, and so has no row.
    """

    scale: str = ""
    rows: list[Row] = field(default_factory=list)
    absent: list[Missing] = field(default_factory=list)
    faults: list[Missing] = field(default_factory=list)
