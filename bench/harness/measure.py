"""Measures suites, each in a process of its own: one patches transports, one forks ranks, one holds a GPU."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from shardweave.bench.harness.ranks import end_with_parent
from shardweave.bench.harness.results import Missing, Results, Row

Put = Callable[[str, Row | Missing], None]  # with "rows", "absent" or "faults"


INSTALL = {
    "autoparallel": "pip install git+https://github.com/meta-pytorch/autoparallel@a54c252",
    "torchao": "pip install torchao==0.18.0",
    "torchtitan": "pip install torchtitan==0.3.0",
}


class Sink:
    """Receives the results of a suite."""

    def __init__(self, suite: str, put: Put) -> None:
        self.suite, self._put = suite, put

    def begin(self, case: str) -> None:
        """Show progress."""
        print(f"{self.suite}: {case}", file=sys.stderr, flush=True)

    def row(self, case: str, contender: str, unit: str, samples: Sequence[float], **rest: Any) -> None:
        self._put("rows", Row(self.suite, case, contender, unit, tuple(samples), **rest))

    def absent(self, case: str, contender: str, why: str) -> None:
        """Record that the contender is not installed, or refuses the case."""
        self._put("absent", Missing(self.suite, case, contender, why))

    def fault(self, case: str, contender: str, why: str) -> None:
        """Record a wrong result, which is not timed."""
        self._put("faults", Missing(self.suite, case, contender, why))


def why_absent(contender: str, error: Exception) -> str:
    """The reason why a contender could not be made; for a library that is not installed, how to install it."""
    if isinstance(error, ImportError) and contender in INSTALL:
        return f"not installed ({error}); to measure it too: {INSTALL[contender]}"
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]


def suite(name: str) -> ModuleType:
    """The module of a suite, with `cases(scale)`, the contenders of each case, and `measure(cases, scale, sink)`."""
    return import_module(f"shardweave.bench.suites.suite_{name}")


def measure(cases: Mapping[str, Sequence[str]], scale: str) -> Results:
    """Measure the cases of each suite in a new process.

    Returns:
        The results. A contender without a result is a fault, and so is a process that failed; what it had measured
        before is kept.
    """
    results = Results(scale)
    for name, selected in cases.items():
        status = run_process(name, selected, scale, results.put) if selected else 0
        if status:
            why = f"the process that measured ended with {status}; its output is above"
            results.put("faults", Missing(name, "", "", why))
            continue
        known = {row.key for row in results.rows} | {one.key for one in (*results.absent, *results.faults)}
        for case, contenders in suite(name).cases(scale).items():
            for contender in contenders:
                if case in selected and (name, case, contender) not in known:
                    results.put("faults", Missing(name, case, contender, "nothing was measured"))
    return results


def run_process(name: str, cases: Sequence[str], scale: str, put: Put) -> int:
    """Measure cases of a suite in a new process. Returns its exit status."""
    spawn = get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run_suite, args=(name, list(cases), scale, sender))
    process.start()
    sender.close()
    try:
        while True:
            put(*receiver.recv())
    except (EOFError, OSError):  # the process has ended
        pass
    except BaseException:  # Ctrl-C
        process.kill()
        raise
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run_suite(name: str, cases: Sequence[str], scale: str, sender: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    suite(name).measure(cases, scale, Sink(name, lambda kind, one: sender.send((kind, one))))
