"""torch's own tests of DTensor with shardweave installed, beside the same tests without it.

`python -m shardweave.bench.baselines.torch_tests FOLDER` runs every `test_*.py` of a folder twice: as it is, and with
shardweave installed in pytest's process and in the ranks that the tests spawn. The files are torch's
(`test/distributed/tensor` of the version that is installed) and are no part of this package. It fails where a test
passes without shardweave and does not with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, ShardweaveError
from ..gpu import outcomes as plugin
from ..gpu.run_sections import end
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
from ..harness.writable import check_writable
from . import installed_in_tests

DEFAULT_TIMEOUT = 1800.0
_PRELOADED = ["torch.testing._internal.distributed._tensor.common_dtensor"]
_LINES = 12  # shown of the error of a test
_RANKS_END = 5.0


@dataclass
class Column:
    """A file's tests, with shardweave or without it.

    Attributes:
        outcomes: passed, skipped, failed, or started where the test never ended, by test.
        texts: errors of failed tests.
        processes: what each process reports: "calls" and "delegations" of shardweave, and the "error" that kept it from
            being installed.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    processes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def run(file: Path, folder: Path, installed: bool, only: str | None, timeout: float) -> Column:
    """Run a file's tests in processes of their own, with shardweave installed in all of them or in none."""
    column = Column()
    with tempfile.TemporaryDirectory(prefix="shardweave-torch-tests-") as name:
        site, counts, outcomes, settings = (Path(name, part) for part in ("site", "counts", "outcomes", "pytest.ini"))
        site.mkdir()
        counts.mkdir()
        settings.write_text("[pytest]\n", encoding="utf-8")  # not those of the caller
        shutil.copy(plugin.__file__, site / "shardweave_outcomes.py")
        shutil.copy(installed_in_tests.__file__, site / "shardweave_installed.py")
        paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(site), *paths]),
            plugin.FILE: str(outcomes),
            plugin.FORK: ",".join(["shardweave_installed"] * installed + _PRELOADED),
            installed_in_tests.FOLDER: str(counts),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "shardweave_outcomes", "-p", "no:cacheprovider"]
        command += ["-c", str(settings), "--rootdir", str(folder), "--confcutdir", str(folder)]
        command += [str(file), *(["-k", only] if only else [])]
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
            _wait_for_ranks(process)
        end(process)
        column.seconds = time.monotonic() - start
        for test, (outcome, text) in plugin.ends(plugin.read(outcomes)).items():
            column.outcomes[test] = "failed" if outcome == "error" else outcome
            column.texts[test] = text
        column.processes = [json.loads(path.read_text(encoding="utf-8")) for path in counts.glob("*.json")]
    return column


def _wait_for_ranks(process: subprocess.Popen[bytes]) -> None:
    """Wait briefly for the ranks that a process has left behind, which write their counts when they end."""
    deadline = time.monotonic() + _RANKS_END
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def compare(
    folder: Path,
    only: str | None = None,
    jobs: int = 1,
    timeout: float = DEFAULT_TIMEOUT,
    out: Path | None = None,
) -> int:
    """Run a folder's tests with and without shardweave and print both columns; 1 where a test is lost, or shardweave
    was not installed or not called.

    Args:
        folder: of test files, at any depth.
        only: pytest's `-k`.
        jobs: files at once.
        timeout: seconds that a file may take each time.
        out: the page that is printed, Markdown, is also written there.

    Raises:
        ArgumentError: no test files, a number that does not fit, a file that cannot be written.
    """
    folder = folder.absolute()
    files = sorted(folder.rglob("test_*.py"))
    if not files:
        raise ArgumentError(f"FOLDER: {str(folder)!r} has no test_*.py; allowed: a folder of torch's tests")
    if jobs < 1 or timeout <= 0:
        raise ArgumentError(f"--jobs, --timeout: {jobs}, {timeout:g}; allowed: 1 or more, and seconds above 0")
    check_writable("--out", out)

    def both(file: Path) -> tuple[Column, Column]:
        ours = run(file, folder, True, only, timeout)
        stock = run(file, folder, False, only, timeout)
        print(f"{file.relative_to(folder)}: {stock.seconds:.0f} s, {ours.seconds:.0f} s", file=sys.stderr)
        return stock, ours

    with ThreadPoolExecutor(jobs) as pool:
        columns = list(pool.map(both, files))
    lost = [(test, ours) for stock, ours in columns for test in sorted(stock.passed - ours.passed)]
    processes = [process for _, ours in columns for process in ours.processes]
    calls, delegations = (sum((Counter(p[name]) for p in processes), Counter()) for name in ("calls", "delegations"))
    errors = sorted({process["error"] for process in processes if process["error"]})
    lines = ["# torch's own tests, with shardweave installed", "", *provenance_lines(provenance()), ""]
    lines += [
        "Tests that pass with shardweave and without it, and how long they take. *Lost* pass without it alone.",
        "",
    ]
    rows: list[tuple[float, ...]] = [
        (len(stock.outcomes.keys() | ours.outcomes.keys()), len(ours.passed), len(stock.passed),
         len(stock.passed - ours.passed), ours.seconds, stock.seconds)
        for stock, ours in columns
    ]  # fmt: skip
    named = zip([*(str(file.relative_to(folder)) for file in files), "all"], [*rows, map(sum, zip(*rows))])  # noqa: B905
    heads = ("file", "tests", "with", "without", "lost", "with, s", "without, s")
    lines += table(heads, [[name, *(f"{number:.0f}" for number in row)] for name, row in named])
    for test, ours in lost:
        outcome = {None: "did not run", "started": "did not end"}.get(how := ours.outcomes.get(test), how)
        lines += ["", f"lost: {test}: {outcome}", *ours.texts.get(test, "").splitlines()[-_LINES:]]
    carried = [(f"carried out on {transport}", count) for transport, count in calls.most_common()]
    left = [(f"left to torch: {reason.replace('|', '¦')}", count) for reason, count in delegations.most_common()]
    lines += ["", *table((f"shardweave, in {len(processes)} processes", "calls"), [*carried, *left])]
    lines += ["", *(f"not installed: {error}" for error in errors)] if errors else []
    called = bool(calls or delegations)
    lines += [] if called else ["", "shardweave was not called at all: nothing is proven"]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return int(bool(lost) or not called or bool(errors))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="torch's test files")
    parser.add_argument("-k", dest="only", metavar="TEXT", help="only tests that pytest's -k selects")
    parser.add_argument("--jobs", type=int, default=1, help="files at once")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT, help="seconds that a file may take each time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the page there")
    try:
        return compare(**vars(parser.parse_args(arguments)))
    except ShardweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
