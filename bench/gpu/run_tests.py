"""The tests that need a GPU, in limited time: the kernels' in several processes, since compiling takes most of it.

A test's outcome is kept when the test ends; when the time is up, pytest is killed with all that it has started, so that
no rank holds the GPU afterwards.

`make gpu` runs `python -m shardweave.bench.gpu.run_tests --root . --report FILE`; the report is JSON, for
`shardweave.bench.gpu.targets --tests FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardweave.bench.gpu import outcomes

_NOTHING_SELECTED = 5  # of pytest's exit codes
_LONGEST_END = 5.0  # seconds that killed processes get to go


def run(command: Sequence[str], root: Path, parts: int, reports: Path, until: float) -> list[str]:
    """Run pytest in several processes at once, each with its part of the tests; the errors of processes that ended
    badly. The outcomes of tests go to files `*.jsonl` in `reports`."""
    started, errors = [], []
    for part in range(parts):
        outcome, log = (reports / f"{time.monotonic_ns()}-{part}.{kind}" for kind in ("jsonl", "log"))
        environment = {**os.environ, "SHARDWEAVE_TEST_SHARD": f"{part}/{parts}", outcomes.FILE: str(outcome)}
        with log.open("w") as file:
            plugins = ["-p", "no:cacheprovider", "-p", outcomes.__name__]
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", *plugins, *command],
                cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append((process, outcome, log))
    try:
        for process, outcome, log in started:
            ended = "out of time"
            with suppress(subprocess.TimeoutExpired):
                ended = f"pytest ended with {process.wait(max(until - time.monotonic(), 1.0))}"
            end(process)
            if process.returncode not in (0, _NOTHING_SELECTED):
                print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr, flush=True)
                within = ", ".join(outcomes.summary([outcome])["running"]) or "no test"
                errors.append(f"{ended}, within {within}: {' '.join(command)}")
    finally:
        for process, *_ in started:
            end(process)
    return errors


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all of it, as far as it has not ended."""
    deadline = time.monotonic() + _LONGEST_END
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # what it had started is not this process's to wait for
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.run_tests", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the repository")
    parser.add_argument("--report", type=Path, required=True, metavar="FILE", help="JSON goes there")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of them (default: %(default)s)")
    parser.add_argument("--parts", type=int, default=min(8, max(1, (os.cpu_count() or 1) // 2)),
                        help="processes for the kernels' tests (default: %(default)s)")  # fmt: skip
    parser.add_argument("arguments", nargs="*", help="of pytest, for all")
    given = parser.parse_args(argv)
    began = time.monotonic()
    marked = ["-m", "gpu or multigpu", *given.arguments]
    with tempfile.TemporaryDirectory() as folder:
        reports, until = Path(folder), began + given.seconds
        errors = run([*marked, "tests/kernels"], given.root, given.parts, reports, began + 0.6 * given.seconds)
        # Ranks that wait for each other have the GPU for themselves.
        others = [name for name in ("tests/runtime", "tests/bench", "tests/cli") if (given.root / name).is_dir()]
        errors += run([*marked, *others], given.root, 1, reports, until)
        total = outcomes.summary(sorted(reports.glob("*.jsonl")))
    total |= {"went_wrong": errors, "seconds": round(time.monotonic() - began, 1)}
    given.report.write_text(json.dumps(total), encoding="utf-8")
    print(f"GPU tests: {json.dumps(total)}", file=sys.stderr, flush=True)
    return int(bool(total["failed"] or errors))


if __name__ == "__main__":
    sys.exit(main())
