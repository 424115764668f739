"""`make gpu`, from the repository's root: runs the sections in processes of their own, each with a time limit.

Files in `--out`: `gpu.md`, the report, written again after each section; `gpu.jsonl`, a row for each test when it
starts and when it ends; `timings.jsonl`. After a test that kills its process, leaves CUDA unusable, or hangs, the
section goes on in another process. Kernels that are in Triton's cache (`TRITON_CACHE_DIR`) are not compiled again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardweave.bench.gpu import outcomes, section_report
from shardweave.bench.gpu.section_report import Found
from shardweave.bench.gpu.sections import SECTIONS, Section

ROWS = "gpu.jsonl"
_LONGEST_END = 5.0  # seconds that killed processes get to go
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

    def __init__(self, section: Section, part: int, parts: int, settings: Settings) -> None:
        self.section, self.part, self.settings, self.began = section, part, settings, time.time()
        self.test_seconds = section.test_seconds or settings.test_seconds
        self.tests_before, self.log = settings.started(), settings.scratch / f"{section.name}-{part}.log"
        if section.is_python:
            command = [word.format(out=settings.out) for word in section.arguments] + ["--dry"] * settings.dry
        else:
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes", *section.arguments]
            command += ["--continue-on-collection-errors", "-m", section.marker, *section.dry * settings.dry]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | os.environ  # there may be no network
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(settings.scratch), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path(".triton").absolute())),
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
        return not self.section.is_python and self.began < last < time.time() - self.test_seconds

    def leaves_work(self, code: int | None) -> bool:
        """Whether another process may run the other tests: this one was stopped, by a test that it had begun."""
        stopped = code is None or code < 0 or code == outcomes.LOST
        return not self.section.is_python and stopped and self.settings.started() > self.tests_before

    def finish(self, why: str) -> None:
        """End the process with all that it has started, and write how it ended."""
        end(self.process)
        text, seconds = self.log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:], time.time() - self.began
        row = {"section": self.section.name, "ended": why, "seconds": round(seconds, 1), "text": text}
        outcomes.write(self.settings.rows, **row)


def run_section(section: Section, settings: Settings, seconds: float) -> None:
    """Run a section in at most so many seconds; how its tests and processes ended is in the rows."""
    until, parts = time.monotonic() + seconds, _PROCESSES if section.split else 1
    running: list[Running] = []
    try:
        for part in range(parts):
            running.append(Running(section, part, parts, settings))
        while running:
            time.sleep(0.05)
            late = time.monotonic() > until
            for one in list(running):
                code = one.process.poll()
                if code is None and not late and not one.hangs():
                    continue
                if code is None:
                    why = "timed out" if late else f"hung: no test ended in {one.test_seconds:g} s"
                else:
                    why = f"exit {code}" if code >= 0 else f"killed by signal {-code}"
                one.finish(why)
                running.remove(one)
                if not late and one.leaves_work(code):
                    running.append(Running(section, one.part, parts, settings))
    finally:
        for one in running:
            one.finish("killed with the run")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all of it, as far as it has not ended."""
    deadline = time.monotonic() + _LONGEST_END
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # what it had started is not this process's to wait for
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def run(sections: Sequence[Section], settings: Settings, seconds: float) -> dict[str, Found]:
    """Run sections while time is left; what each has come to."""
    until = time.monotonic() + seconds
    found = section_report.write(sections, settings.rows, settings.dry)
    for section in sections:
        left = until - time.monotonic()
        if left < 3:
            break
        print(f"{section.name}: begun, {left:.0f} s left", flush=True)
        try:
            run_section(section, settings, min(section.seconds * (3 if settings.dry else 1), left))
        finally:
            found = section_report.write(sections, settings.rows, settings.dry)
        print("\n".join(section_report.lines_of(section.name, found[section.name])), flush=True)
    return found


def main(argv: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    names = ", ".join(one.name for one in sections)
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.run_sections", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help=f"run these alone: {names}")
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
            settings.rows.unlink(missing_ok=True)
            found = run([one for one in sections if not only or one.name in only], settings, given.seconds)
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(not all(one.outcome in ("passed", "skipped") for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
