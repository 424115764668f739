"""The sections of `make gpu` without a GPU: stand-ins that fail, die and hang; all of them, dry."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shardweave.bench.gpu import run_sections, section_report
from shardweave.bench.gpu.run_sections import ROWS, main
from shardweave.bench.gpu.section_report import Found
from shardweave.bench.gpu.sections import SECTIONS, Section

pytestmark = pytest.mark.plan
ROOT = Path(__file__).parents[2]
EXTRAS = "rich matplotlib hypothesis pytest_benchmark xdist spmd_types torchtitan torchao grimp".split()

TESTS = """
import os, signal, subprocess, sys, time, types
import pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
@pytest.mark.parametrize("n", [0, 1])
def test_after(n): pass
def test_loses_cuda():
    def synchronize(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize))
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_is_skipped(): pytest.skip("no such GPU")
@pytest.fixture
def broken():
    yield
    raise KeyError("teardown")
def test_teardown(broken): pass
def test_hangs():
    child = subprocess.Popen(["sleep", "300"])
    open("child", "w").write(str(child.pid))
    time.sleep(300)
def test_last(): pass
"""
ALL = ("tests/test_all.py",)
STAND_INS = (
    Section("facts", 20, ("-c", "print('driver: 1')")),
    Section("first", 120, ALL + ("-k", "passes or after"), first=True, split=True),
    Section("everything", 240, ALL),
    Section("fails", 20, ("-c", "raise SystemExit('no compiler')")),
    Section("dies", 20, ("-c", "import os; print('begun', flush=True); os.kill(os.getpid(), 9)")),
    Section("sleeps", 0.5, ("-c", "import time; time.sleep(300)")),
    Section("broken", 120, ("tests/test_broken.py",)),
    Section("unreached", 240, ALL + ("-k", "not hangs")),
)


@pytest.fixture
def run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Found]]:
    """Runs stand-ins for the sections, with files in a folder; their reports."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: one\n")
    (tmp_path / "tests/test_all.py").write_text(TESTS)
    (tmp_path / "tests/test_broken.py").write_text("import no_such_module")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing hypothesis takes longer than the stand-ins
    monkeypatch.setattr(run_sections, "_PROCESSES", 2)
    monkeypatch.chdir(tmp_path)

    def run(out: str, *arguments: str, sections: tuple[Section, ...] = STAND_INS) -> dict[str, Found]:
        main(["--out", out, "--test-seconds", "5", *arguments], sections)
        return section_report.write(sections, Path(out, ROWS), False)

    return run


def gone(file: str) -> bool:
    """Whether the process whose id is in a file has ended."""
    status = Path("/proc", Path(file).read_text(), "stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_sections_that_die_and_hang_lose_nothing(run_in: Callable[..., dict[str, Found]]) -> None:
    found = run_in("out", "--only", ",".join(one.name for one in STAND_INS[:-1]))
    assert {name: one.outcome for name, one in found.items()} == {
        "facts": "passed", "first": "passed", "everything": "killed", "fails": "failed", "dies": "killed",
        "sleeps": "timed out", "broken": "failed", "unreached": "not reached",
    }  # fmt: skip
    assert found["first"].tests["passed"] == 2, "test_passes and the first case of test_after"
    counts = {"passed": 4, "failed": 2, "error": 1, "killed": 2, "skipped": 1, "not reached": 0}
    assert found["everything"].tests == Counter(counts)
    how = {what.rpartition("::")[2]: how for what, how, _ in found["everything"].failures}
    del how["everything"]
    assert how == {"test_fails": "failed", "test_dies": "killed", "test_loses_cuda": "failed",
                   "test_teardown": "error", "test_hangs": "killed"}  # fmt: skip
    assert gone("child") and found["facts"].output == "driver: 1\n" and "begun" in found["dies"].output
    page = Path("out/gpu.md").read_text()
    for text in ("one is not two", "illegal memory access", "no compiler", "no_such_module",
                 "1 skipped: no such GPU", "hung: no test ended in 5 s", "killed by signal 9"):  # fmt: skip
        assert text in page, text
    positions = [page.index(f"- **{one.name}: ") for one in STAND_INS]
    assert positions == sorted(positions)
    assert {path.name for path in Path("out").iterdir()} == {"gpu.md", ROWS}


def test_named_sections(run_in: Callable[..., dict[str, Found]], capsys: pytest.CaptureFixture[str]) -> None:
    sections = Section("one", 60, ("-c", "pass")), Section("other", 60, ("-c", "raise SystemExit(3)"))
    assert main(["--out", "out", "--only", "one"], sections) == 0
    assert main(["--out", "out", "--only", "other"], sections) == 1
    assert "| other | failed |" in Path("out/gpu.md").read_text()
    with pytest.raises(SystemExit):
        run_in("out", "--only", "facts,nothing")
    assert "--only: nothing; allowed: facts, first, everything" in capsys.readouterr().err


def test_terminated_run_ends_its_sections_and_writes_a_report(run_in: Callable[..., dict[str, Found]]) -> None:
    code = "import os, time; open('child', 'w').write(str(os.getpid())); os.kill(os.getppid(), 15); time.sleep(300)"
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_in("out", sections=(Section("sleeps", 60, ("-c", code)),))
    assert gone("child") and "sleeps: killed" in Path("out/gpu.md").read_text()


def test_every_gpu_test_is_in_a_section() -> None:
    named = {ROOT / word for one in SECTIONS for word in one.arguments if word.startswith("tests")}
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(multi)?gpu", file.read_text())]
    assert len(marked) > 10 and all(path.exists() for path in named)
    assert [file for file in marked if not {file, *file.parents} & named] == [Path(__file__)]


def blocked(folder: Path) -> dict[str, str]:
    """An environment in which the extras cannot be imported."""
    lines = [f"sys.modules[{name!r}] = None" for name in EXTRAS]
    (folder / "sitecustomize.py").write_text("\n".join(["import sys", *lines]) + "\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.long
def test_dry_run_without_extras(tmp_path: Path) -> None:
    """Every section's command, with pytest, torch, triton and numpy alone."""
    ran = subprocess.run(
        [sys.executable, "-m", "shardweave.bench.gpu.run_sections", "--dry", "--out", str(tmp_path / "out"),
         "--seconds", "2400"],
        cwd=ROOT, env=blocked(tmp_path), capture_output=True, text=True, timeout=2500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    found = section_report.write(SECTIONS, tmp_path / "out" / ROWS, True)
    assert all(found[one.name].tests or one.is_python for one in SECTIONS), found
    for name in ("environment", "signal", "one-of-each-kernel", "programs", "timings", "profile"):
        assert found[name].outcome == "passed", found[name]
