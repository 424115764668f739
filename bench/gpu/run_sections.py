"""`make gpu`, from the repository's root: runs the sections in processes of their own, each with a time limit.

Files in `--out`: `gpu.jsonl` (a row for each test when it starts and when it ends), `gpu.json` and `gpu.md` (the
report, written again after each section), the files of `targets`, and `triton_cache.tar`. A later run with `--from`
that folder skips what passed, and compiles nothing again. After a test that kills its process, leaves CUDA unusable, or
hangs, the section goes on in another process; so do the targets after a line that does one of the first two.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.bench.gpu import outcomes, section_report
from shardweave.bench.gpu.sections import SECTIONS, Section
from shardweave.errors import ArgumentError

ROWS, CACHE = "gpu.jsonl", "triton_cache.tar"
_LONGEST_END = 5.0  # seconds that killed processes get to go
_MOST_RESTARTS = 5  # of a program that goes on
_SHOWN = 12_000  # characters of a process's output
_PROCESSES = min(8, max(1, (os.cpu_count() or 1) // 2))  # of a section that is split


@dataclass(frozen=True)
class Settings:
    """Of a run: the folder of its files, one of the plugin and of logs, whether there is no GPU, the seconds in which a
    test has to end."""

    out: Path
    scratch: Path
    dry: bool
    test_seconds: float

    @property
    def rows(self) -> Path:
        return self.out / ROWS

    def started(self) -> int:
        return sum(row.get("outcome") == "started" for row in outcomes.read(self.rows))


class Running:
    """A process of a section."""

    def __init__(self, section: Section, part: int, parts: int, settings: Settings, restarts: int = 0) -> None:
        self.section, self.part, self.settings, self.began = section, part, settings, time.time()
        self.restarts = restarts
        self.tests_before, self.log = settings.started(), settings.scratch / f"{section.name}-{part}.log"
        if section.is_python:
            command = [word.format(out=settings.out) for word in section.arguments] + ["--dry"] * settings.dry
            command += ["--go-on"] * (restarts > 0)
        else:
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes", *section.arguments]
            command += ["--continue-on-collection-errors", "-m", section.marker, *section.dry * settings.dry]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | os.environ  # there may be no network
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(settings.scratch), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": str(cache_folder()),
            outcomes.SHARD: f"{part}/{parts}",
            outcomes.FILE: str(settings.rows),
            outcomes.SECTION: section.name,
        }
        environment |= {outcomes.FIRST: "1"} if section.first else {}
        environment |= {"SHARDWEAVE_TIMEOUT": section.timeout} if section.timeout else {}
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if settings.dry else {}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def hangs(self) -> bool:
        """Whether no test of the section has begun or ended for longer than a test may take, since the first one."""
        last = self.settings.rows.stat().st_mtime if self.settings.rows.exists() else 0.0
        seconds = self.section.test_seconds or self.settings.test_seconds
        return not self.section.is_python and self.began < last < time.time() - seconds

    def leaves_work(self, code: int | None) -> bool:
        """Whether another process may do the rest: this one was stopped, by a test or a line that it had begun."""
        stopped = code is None or code < 0 or code == outcomes.LOST
        if self.section.is_python:
            return stopped and self.section.goes_on and self.restarts < _MOST_RESTARTS
        return stopped and self.settings.started() > self.tests_before

    def finish(self, why: str) -> None:
        """End the process with all that it has started, and write how it ended."""
        end(self.process)
        text, seconds = self.log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:], time.time() - self.began
        self.log.unlink()
        row = {"section": self.section.name, "ended": why, "seconds": round(seconds, 1), "text": text}
        outcomes.write(self.settings.rows, **row)


def run_section(section: Section, settings: Settings, seconds: float) -> None:
    """Run a section in at most so many seconds; how its tests and processes ended is in the rows."""
    until, parts = time.monotonic() + seconds, _PROCESSES if section.split else 1
    running: list[Running] = []
    try:
        for part in range(parts):
            with termination_deferred():
                running.append(Running(section, part, parts, settings))
        while running:
            time.sleep(0.05)
            late = time.monotonic() > until
            for one in list(running):
                code = one.process.poll()
                if code is None and not late and not one.hangs():
                    continue
                why = f"exit {code}"
                if code is None:
                    why = (
                        "timed out"
                        if late
                        else f"hung: no test ended in {section.test_seconds or settings.test_seconds:g} s"
                    )
                elif code < 0:
                    why = f"killed by signal {-code}"
                one.finish(why)
                running.remove(one)
                if not late and one.leaves_work(code):
                    with termination_deferred():
                        running.append(Running(section, one.part, parts, settings, one.restarts + 1))
    finally:
        for one in running:
            one.finish("killed with the run")


@contextmanager
def termination_deferred() -> Iterator[None]:
    """A context in which SIGTERM waits until its end, so that a process that starts in it is known and can be ended."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in received:
            signal.raise_signal(number)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all of it, as far as it has not ended."""
    deadline = time.monotonic() + _LONGEST_END
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # what it had started is not this process's to wait for
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def run(sections: Sequence[Section], settings: Settings, seconds: float, only: Sequence[str]) -> dict[str, Any]:
    """Run the sections named in `only`, or all that have not passed, while time is left; the report."""
    until = time.monotonic() + seconds
    report = section_report.write(sections, settings.rows, settings.dry)
    for section in sections:
        left = until - time.monotonic()
        passed = report[section.name]["outcome"] in ("passed", "skipped")
        if left < 3 or (section.name not in only if only else passed):
            continue
        print(f"{section.name}: begun, {left:.0f} s left", flush=True)
        try:
            run_section(section, settings, min(section.seconds * (3 if settings.dry else 1), left))
        finally:
            report = section_report.write(sections, settings.rows, settings.dry)
        print("\n".join(section_report.lines_of(section.name, report[section.name])), flush=True)
        if cache_folder().is_dir():
            part = settings.out / f"{CACHE}.part"  # a run may be killed as it writes
            with tarfile.open(part, "w:xz", preset=0) as file:  # about 15 KB a kernel, half of gzip's
                file.add(cache_folder(), arcname=".")
            part.replace(settings.out / CACHE)
    return report


def cache_folder() -> Path:
    """Triton's cache. Its entries name each other by absolute path: it serves a clone at the same place."""
    return Path(os.environ.get("TRITON_CACHE_DIR", ".triton")).absolute()


def take_former(former: Path | None, settings: Settings, only: Sequence[str]) -> None:
    """Take over a former run's cache, and the rows of what passed or was skipped. None: begin without rows.

    A cache that cannot be read is left out.

    Raises:
        ArgumentError: there is no former run in the folder, or just one of the two is dry.
    """
    kept = []
    if former:
        try:
            report = json.loads((former / "gpu.json").read_text(encoding="utf-8"))
            dry, found = report["dry"], report["sections"]
            passed = {name for name, one in found.items() if one["outcome"] in ("passed", "skipped")}
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--from: {error}; allowed: the folder of a former run") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise ArgumentError(f"--from: {former / 'gpu.json'} is no report; allowed: that of a former run") from error
        if dry != settings.dry:
            raise ArgumentError(f"--from: a run with{'' if dry else 'out'} --dry; allowed: one as this")
        rows = list(outcomes.read(former / ROWS))
        done = {row["test"] for row in rows if row.get("outcome") in ("passed", "skipped")}
        done -= {row["test"] for row in rows if row.get("outcome") in ("failed", "error")}
        kept = [row for row in rows if row["section"] not in only
                and (row["test"] in done if "test" in row else row["section"] in passed)]  # fmt: skip
    settings.rows.unlink(missing_ok=True)
    for row in kept:
        outcomes.write(settings.rows, **row)
    if former and (former / CACHE).exists():
        try:
            with tarfile.open(former / CACHE) as file:
                file.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                file.extractall(cache_folder())
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            print(f"{former / CACHE}: {error}; kernels are compiled again", flush=True)


def main(argv: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    names = ", ".join(one.name for one in sections)
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.run_sections", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--from", type=Path, dest="former", metavar="FOLDER", help="of a former run: go on from there")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"run these, passed or not: {names}")
    parser.add_argument("--dry", action="store_true", help="no GPU: skip what needs one, interpret kernels")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all (default: %(default)s)")
    parser.add_argument("--test-seconds", type=float, default=90.0, help="for one test (default: %(default)s)")
    given = parser.parse_args(argv)
    only = [name for name in given.only.split(",") if name]
    if unknown := set(only) - {one.name for one in sections}:
        parser.error(f"--only: {', '.join(sorted(unknown))}; allowed: {names}")
    # Through `finally`, which ends the processes.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(outcomes.__file__, scratch)
            settings = Settings(given.out.absolute(), Path(scratch), given.dry, given.test_seconds)
            settings.out.mkdir(parents=True, exist_ok=True)
            take_former(given.former, settings, only)
            report = run(sections, settings, given.seconds, only)
    except ArgumentError as error:
        parser.error(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    outcomes_of = [one["outcome"] for name, one in report.items() if not only or name in only]
    return int(not all(outcome in ("passed", "skipped") for outcome in outcomes_of))


if __name__ == "__main__":
    sys.exit(main())
