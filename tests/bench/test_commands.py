"""The command line itself: what its commands have in common."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardweave import __main__ as command_line
from shardweave.bench import demo
from shardweave.bench.commands.bench import PROGRAMS

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("name", command_line._COMMANDS)
def test_every_command_says_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main([name, "--help"])
    assert end.value.code == 0 and f"usage: shardweave {name}" in capsys.readouterr().out
    assert " ".join(command_line._COMMANDS[name].HELP.split()) in " ".join(command_line._parser().format_help().split())


def test_programs_outside_the_command_line_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """All that can be run, but for what runs inside others."""
    folder = Path(demo.__file__).parent
    programs = {file.stem for file in folder.glob("*.py") if '__name__ == "__main__"' in file.read_text("utf-8")}
    assert programs - {"gpu_tests", "measuring"} == set(PROGRAMS)
    with pytest.raises(SystemExit):
        command_line.main(["bench", "--help"])
    assert ", ".join(PROGRAMS) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "called"), [("demo", "the demo"), ("doctor", "the doctor"), ("calibrate", "calibrate")]
)
def test_rich_is_asked_for_where_it_is_missing(
    command: str, called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command_line.main([command]) == 2
    assert capsys.readouterr().err == f"error: {called} needs rich: pip install 'shardweave[cli]'\n"


def test_an_interrupt_ends_a_measurement_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert command_line.main(["demo"]) == 130


def test_a_topology_that_is_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"rows": [' + "0, " * 10_000 + "0]}")
    assert command_line.main(["plan", "--mesh", "2", "--shape", "4", "--topology", str(file), "R", "S0"]) == 2
    said = capsys.readouterr().err
    assert f"error: --topology: '{file}': topology: " in said and "allowed: an object of name" in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--mesh", "2,x", "--shape", "4", "R", "S0"], "'2,x': sizes separated by commas are wanted"),
        (["plan", "--mesh", "2@x", "--shape", "4", "R", "S0"], "'2@x': after @ a rank is wanted, such as 2,2@8"),
        (["demo", "--ranks", "0"], "'0': a number of ranks, 1 or more, is wanted"),
        (["replay", "t.json", "--most", "0"], "'0': a number of redistributions, 1 or more, is wanted"),
    ],
)
def test_a_bad_argument_says_what_is_wanted(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err
