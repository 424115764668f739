"""What cannot be written is told before anything is measured, by every command that writes a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from warm_python import run_python

from shardweave.__main__ import main
from shardweave.bench import moe, training
from shardweave.bench.writable import check_writable
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.json"
    there.write_text("as it was")
    for path in (None, there, tmp_path / "new.json", Path("new.json"), Path("/dev/null")):
        check_writable("--json", path)
    assert there.read_text() == "as it was" and [file.name for file in tmp_path.iterdir()] == ["there.json"]
    for path in (tmp_path, there / "under.json", tmp_path / "no" / "where.json"):
        with pytest.raises(ArgumentError, match=f"^--json: '{path}' cannot be written; allowed: a file in a folder"):
            check_writable("--json", path)


@pytest.mark.parametrize("command", ["demo", "bench", "doctor", "calibrate"])
def test_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--out" if command == "calibrate" else "--json"
    assert main([command, option, str(tmp_path)]) == 2
    assert f"error: {option}: '{tmp_path}' cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("program", [moe, training])
def test_programs(program: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--json", str(tmp_path)]) == 2  # type: ignore[attr-defined]
    assert f"--json: '{tmp_path}' cannot be written" in capsys.readouterr().err


def test_plans(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardweave.bench.plans", "--out", str(tmp_path)]
    done = run_python(command, timeout=200)
    assert done.returncode == 2 and f"--out: '{tmp_path}' cannot be written" in done.stderr
