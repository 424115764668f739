"""The tests that need a GPU, in time: those of the kernels in several processes, since compiling takes most of it.

`make gpu` runs `python -m shardweave.bench.gpu_tests --root . --report FILE`; the report is JSON, for
`shardweave.bench.kernels --tests FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardweave.bench.gpu_machine import test_summary

_NOTHING_SELECTED = 5  # of pytest's exit codes


def run(command: Sequence[str], root: Path, parts: int, reports: Path, until: float) -> list[dict[str, Any]]:
    """Run pytest in so many processes at once, each with its part of the tests; what each found."""
    started = []
    for part in range(parts):
        report, log = reports / f"{len(list(reports.iterdir()))}-{part}.xml", reports / f"{time.monotonic_ns()}.log"
        environment = {**os.environ, "SHARDWEAVE_TEST_SHARD": f"{part}/{parts}"}
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *command],
                cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        started.append((process, report, log))
    found = []
    for process, report, log in started:
        try:
            code: int | str = process.wait(max(until - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = "out of time"
        summary = test_summary(report) if code != "out of time" else {"error": f"out of time: {' '.join(command)}"}
        if code not in (0, _NOTHING_SELECTED):
            print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr, flush=True)
            summary.setdefault("error", f"pytest ended with {code}")
        found.append(summary)
    return found


def merged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers added up, failures and errors in one list."""
    names = ("tests", "failures", "errors", "skipped")
    total: dict[str, Any] = {name: sum(s.get(name, 0) for s in summaries) for name in names}
    total["failed"] = [name for s in summaries for name in s.get("failed", [])]
    total["went_wrong"] = [s["error"] for s in summaries if "error" in s]
    return total


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu_tests", description=__doc__)
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
        found = run([*marked, "tests/kernels"], given.root, given.parts, reports, began + 0.6 * given.seconds)
        # Ranks that wait for each other have the GPU for themselves.
        found += run([*marked, "tests/runtime"], given.root, 1, reports, until)
    total = {**merged(found), "seconds": round(time.monotonic() - began, 1)}
    given.report.write_text(json.dumps(total), encoding="utf-8")
    print(f"GPU tests: {json.dumps(total)}", file=sys.stderr, flush=True)
    return int(bool(total["failed"] or total["went_wrong"]))


if __name__ == "__main__":
    sys.exit(main())
