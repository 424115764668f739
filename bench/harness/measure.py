"""A suite measured in a process of its own: `python -m shardweave.bench.harness.measure SUITE SCALE --out FILE`.

The cases come on standard input, as JSON. Each result is written to the file at once, as one JSON object a line, so
that a failure loses none of the earlier ones. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

import shardweave
from shardweave.bench.harness.result_file import Row
from shardweave.bench.suites import SCALES, SUITES

Key = tuple[str, str]  # case and contender
_PR_SET_PDEATHSIG = 1


class Sink:
    """Receives the results of a suite."""

    def __init__(self, suite: str, out: TextIO, progress: TextIO | None = None) -> None:
        self.suite, self._out, self._progress = suite, out, progress

    def begin(self, case: str) -> None:
        if self._progress is not None:
            print(f"{self.suite}: {case}", file=self._progress, flush=True)

    def row(self, case: str, contender: str, unit: str, samples: Sequence[float], **rest: Any) -> None:
        self._put({"row": asdict(Row(self.suite, case, contender, unit, tuple(samples), **rest))})

    def absent(self, case: str, contender: str, why: str) -> None:
        """Record that the contender is not installed, or refuses the case."""
        self._put({"absent": [case, contender], "why": why})

    def fault(self, case: str, contender: str, text: str) -> None:
        """Record a wrong result, which is not timed."""
        self._put({"fault": [case, contender], "why": text})

    def _put(self, found: dict[str, Any]) -> None:
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()


class Suite(Protocol):
    def cases(self, scale: str) -> Mapping[str, Sequence[str]]:
        """The contenders of each case."""

    def measure(self, cases: Sequence[str], scale: str, sink: Sink) -> None: ...


def suite(name: str) -> Suite:
    return import_module(f"shardweave.bench.suites.suite_{name}")  # type: ignore[return-value]


@dataclass
class Found:
    """What a suite put into its sink; `failed`: how its process ended, where that was not well."""

    rows: dict[Key, Row] = field(default_factory=dict)
    absent: dict[Key, str] = field(default_factory=dict)
    faults: dict[Key, str] = field(default_factory=dict)
    failed: str | None = None

    @classmethod
    def of(cls, lines: Sequence[str]) -> Found:
        found = cls()
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # the last one, of a process that was ended
            if "row" in message:
                row = Row(**{**message["row"], "samples": tuple(message["row"]["samples"])})
                found.rows[row.case, row.contender] = row
            elif "absent" in message:
                found.absent[tuple(message["absent"])] = message["why"]  # type: ignore[index]
            else:
                found.faults[tuple(message["fault"])] = message["why"]  # type: ignore[index]
        return found

    def note_unmeasured(self, cases: Mapping[str, Sequence[str]]) -> None:
        """Add a fault for each contender of these cases that has neither a row nor a reason for having none."""
        for key in ((case, contender) for case, contenders in cases.items() for contender in contenders):
            if not any(key in known for known in (self.rows, self.absent, self.faults)):
                self.faults[key] = "nothing was measured"

    def all_faults(self) -> dict[Key, str]:
        """`faults`, and `failed` under a key with no case and no contender."""
        return self.faults | ({("", ""): self.failed} if self.failed else {})


def measured(name: str, cases: Sequence[str], scale: str) -> Found:
    """The suite's cases, measured in a new process."""
    above = str(Path(shardweave.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found")
        out.touch()
        command = [sys.executable, "-m", "shardweave.bench.harness.measure", name, scale, "--out", str(out)]
        done = subprocess.run(command, input=json.dumps(list(cases)), text=True, env={**os.environ, "PYTHONPATH": path})
        found = Found.of(out.read_text(encoding="utf-8").splitlines())
    if done.returncode:
        found.failed = f"the process that measured ended with {done.returncode}; its output is above"
    else:
        found.note_unmeasured(
            {case: contenders for case, contenders in suite(name).cases(scale).items() if case in cases}
        )
    return found


def _end_with_parent() -> None:
    """Nobody reads what is measured for a parent that has been killed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.harness.measure", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    _end_with_parent()
    cases = json.load(sys.stdin)
    with arguments.out.open("a", encoding="utf-8") as out:
        suite(arguments.suite).measure(cases, arguments.scale, Sink(arguments.suite, out, sys.stderr))
    return 0


if __name__ == "__main__":
    sys.exit(main())
