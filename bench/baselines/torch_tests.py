"""torch's own tests of DTensor with shardweave installed, beside the same tests without it.

`python -m shardweave.bench.baselines.torch_tests FOLDER` runs every `test_*.py` of a folder twice: as it is, and with
shardweave installed in every process that the tests start. The files are torch's (`test/distributed/tensor` of the
version that is installed) and are no part of this package. It fails where a test passes without shardweave and does not
with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ArgumentError, ShardweaveError
from ..gpu import outcomes as plugin
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines
from ..harness.writable import check_writable
from .torch_tests_site import FOLDER

DEFAULT_TIMEOUT = 1800.0
_LINES = 12  # of what a test said when it failed


@dataclass
class Column:
    """A file's tests, run in one way.

    Attributes:
        outcomes: passed, skipped, failed, or started where the test never ended, by test.
        texts: what failed tests said.
        counts: calls and delegations of shardweave, over all processes.
        errors: what kept processes from installing shardweave.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    timed_out: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    delegations: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    processes: int = 0

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}

    def how(self, test: str) -> str:
        """How a test ended, if it did not pass."""
        outcome = self.outcomes.get(test, "absent")
        late = "in the time that the file has" if self.timed_out else "before its process did"
        return {"started": f"did not end {late}", "absent": "did not run"}.get(outcome, outcome)

    def note(self, test: str, outcome: str, text: str) -> None:
        """Of several words about a test, its phases and subtests, a failure counts; else the last."""
        if outcome == "finished":
            return
        outcome = "failed" if outcome == "error" else outcome
        if self.outcomes.get(test) != "failed" and not (outcome == "passed" and self.outcomes.get(test) == "skipped"):
            self.outcomes[test] = outcome
        if text:
            self.texts[test] = text


def run(file: Path, folder: Path, installed: bool, only: str | None, timeout: float) -> Column:
    """Runs a file's tests in processes of their own, with shardweave installed in all of them or in none."""
    column = Column()
    with tempfile.TemporaryDirectory(prefix="shardweave-torch-tests-") as name:
        work = Path(name)
        site = work / "site"
        site.mkdir()
        shutil.copy(plugin.__file__, site / "shardweave_outcomes.py")
        if installed:
            shutil.copy(Path(__file__).with_name("torch_tests_site.py"), site / "sitecustomize.py")
        counts, outcomes, settings = work / "counts", work / "outcomes", work / "pytest.ini"
        counts.mkdir()
        outcomes.touch()
        settings.write_text("[pytest]\n", encoding="utf-8")  # not those of whoever calls
        paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(site), *paths]),
            plugin.FILE: str(outcomes),
            plugin.FORK: "1",
            FOLDER: str(counts),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "shardweave_outcomes", "-p", "no:cacheprovider"]
        command += ["-c", str(settings), "--rootdir", str(folder), "--confcutdir", str(folder)]
        command += [str(file), *(["-k", only] if only else [])]
        start = time.monotonic()
        with open(work / "log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                column.timed_out = True
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks
                process.wait()
        column.seconds = time.monotonic() - start
        for test, outcome, text in plugin.read(outcomes):
            column.note(test, outcome, text)
        for path in counts.iterdir():
            report = json.loads(path.read_text(encoding="utf-8"))
            column.processes += 1
            column.calls.update(report["calls"])
            column.delegations.update(report["delegations"])
            column.errors += [report["error"]] if report["error"] else []
    return column


def compare(
    folder: Path,
    only: str | None = None,
    jobs: int = 1,
    timeout: float = DEFAULT_TIMEOUT,
    out: Path | None = None,
) -> int:
    """Run a folder's tests both ways and print both columns; 1 where a test is lost, or nothing was proven.

    Args:
        folder: of test files, at any depth.
        only: pytest's `-k`.
        jobs: files at once.
        timeout: seconds that a file may take each way.
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
    lines = ["# torch's own tests, with shardweave installed", "", *provenance_lines(provenance()), ""]
    lines += _passed([str(file.relative_to(folder)) for file in files], columns)
    for test, ours in lost:
        lines += ["", f"lost: {test}: {ours.how(test)}", *ours.texts.get(test, "").splitlines()[-_LINES:]]
    proven, said = _account([ours for _, ours in columns])
    text = "\n".join([*lines, "", *said]) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return int(bool(lost) or not proven)


def _passed(files: Sequence[str], columns: Sequence[tuple[Column, Column]]) -> list[str]:
    """The table of files."""
    heads = ["file", "tests", "with", "without", "lost", "with, s", "without, s"]
    rows: list[tuple[float, ...]] = [
        (
            len(stock.outcomes.keys() | ours.outcomes.keys()), len(ours.passed), len(stock.passed),
            len(stock.passed - ours.passed), ours.seconds, stock.seconds,
        )
        for stock, ours in columns
    ]  # fmt: skip
    rows.append(tuple(map(sum, zip(*rows, strict=True))))
    lines = ["Tests that pass with shardweave and without it, and how long they take. *Lost* pass without it alone."]
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, row in zip([*files, "all"], rows, strict=True):
        lines.append(f"| {name} | {' | '.join(f'{number:.0f}' for number in row)} |")
    return lines


def _account(columns: Sequence[Column]) -> tuple[bool, list[str]]:
    """What shardweave did in all processes, and whether that proves anything: it was installed, and called."""
    calls: Counter[str] = sum((column.calls for column in columns), Counter())
    delegations: Counter[str] = sum((column.delegations for column in columns), Counter())
    errors = sorted({error for column in columns for error in column.errors})
    lines = [f"| shardweave, in {sum(column.processes for column in columns)} processes | calls |", "|---|---|"]
    lines += [f"| carried out on {transport} | {count} |" for transport, count in calls.most_common()]
    lines += [f"| left to torch: {reason.replace('|', '¦')} | {count} |" for reason, count in delegations.most_common()]
    lines += ["", *(f"not installed: {error}" for error in errors)] if errors else []
    called = bool(calls or delegations)
    lines += [] if called else ["", "shardweave was not called at all: nothing is proven"]
    return called and not errors, lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="torch's test files")
    parser.add_argument("-k", dest="only", metavar="TEXT", help="only tests that pytest's -k selects")
    parser.add_argument("--jobs", type=int, default=1, help="files at once")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT, help="seconds that a file may take each way")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the page there")
    try:
        return compare(**vars(parser.parse_args(arguments)))
    except ShardweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
