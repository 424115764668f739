"""The command line itself: what its commands have in common."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shardweave import __main__ as command_line
from shardweave.bench.harness.writable import check_writable
from shardweave.cli import demo
from shardweave.cli.bench import PROGRAMS
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("name", command_line._COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main([name, "--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: shardweave {name}" in printed
    assert " ".join(command_line._COMMANDS[name].split())[1:] in " ".join(printed.split())
    listed = re.findall(r"^  (\S.*)\n(?=(.*))", printed[printed.index("options:") :], re.MULTILINE)
    assert listed and all("  " in option or after.startswith("    ") for option, after in listed), "without a help text"
    assert " ".join(command_line._COMMANDS[name].split()) in " ".join(command_line._parser().format_help().split())


def test_bench_help_lists_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """All runnable modules of bench, except those that other programs start."""
    folder = Path(command_line.__file__).parent / "bench"
    files = [
        file.relative_to(folder) for file in folder.rglob("*.py") if '__name__ == "__main__"' in file.read_text("utf-8")
    ]
    programs = {".".join(file.with_suffix("").parts) for file in files}
    assert programs - {"gpu.environment", "gpu.run_sections"} == set(PROGRAMS)
    with pytest.raises(SystemExit):
        command_line.main(["bench", "--help"])
    assert ", ".join(PROGRAMS) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["demo", "doctor", "calibrate", "replay"])
def test_commands_require_rich(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command_line.main([command]) == 2
    assert capsys.readouterr().err == f"error: {command} needs rich: pip install 'shardweave[cli]'\n"


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert command_line.main(["demo"]) == 130


TRACE = Path(__file__).parent / "traces/solver.json"


@pytest.mark.parametrize(
    ("redirection", "status", "error"),
    [
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
        ("> /dev/full", 2, "error: standard output: No space left on device\n"),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    ["plan --mesh 64 --shape 8192,64 S0 S1 --json", f"replay {TRACE}", "dispatch --help"],
    ids=lambda text: text.split()[0],
)
def test_output_that_cannot_be_written(arguments: str, redirection: str, status: int, error: str) -> None:
    """Whether a command prints text or tables, or its help."""
    program = f"{shlex.quote(sys.executable)} -m shardweave {arguments}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", f"{program} {redirection}"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stderr) == (status, error)


def test_output_files_are_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.json"
    there.write_text("as it was")
    for path in (None, there, tmp_path / "new.json", Path("/dev/null")):
        check_writable("--json", path)
    assert there.read_text() == "as it was" and [file.name for file in tmp_path.iterdir()] == ["there.json"]
    for path in (tmp_path, there / "under.json", tmp_path / "no" / "where.json"):
        with pytest.raises(ArgumentError, match=f"^--json: '{path}' cannot be written; allowed: a file in a folder"):
            check_writable("--json", path)
    for command in ("demo", "bench", "doctor", "calibrate"):
        option = "--out" if command in ("bench", "calibrate") else "--json"
        assert command_line.main([command, option, str(tmp_path)]) == 2
        assert f"error: {option}: '{tmp_path}' cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_plan_on_a_terminal_of_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that the encoding lacks are spelled in ASCII, in help and errors too."""
    request = ["--mesh", "2,2", "--shape", "8,6", "--topology", "nvlink", "S0 P"]
    printed = []
    for arguments in ([*request, "R S1"], [*request, "R éééé"], ["--help"]):
        streams = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        with suppress(SystemExit):
            assert command_line.main(["plan", *arguments]) == (2 if "éééé" in arguments[-1] else 0)
        for stream in streams.values():
            assert stream.errors == "strict"
            stream.flush()
        printed.append("".join(stream.buffer.getvalue().decode(encoding) for stream in streams.values()))  # type: ignore[attr-defined]
    if encoding == "utf-8":
        assert printed[0].startswith("S0 P → R S1   float32[8, 6] on 2×2\n") and " µs on " in printed[0]
    else:
        times, micro = ("x", "u") if encoding == "ascii" else ("×", "µ")
        assert printed[0].startswith(f"S0 P -> R S1   float32[8, 6] on 2{times}2\n") and f" {micro}s on " in printed[0]
        assert "Shard(dim=0), ..." in printed[2]
    assert ("????" if encoding == "ascii" else "éééé") in printed[1]


def test_meshes_shapes_layouts_and_bytes_in_other_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for mesh, shape, limit, source, target in (
        ("2,2", "8,6", "1024", "S0 P", "R S1"),
        ("2x2", "8x6", "1K", "s0 p", "r s1"),
        ("2×2", "8X6", "1KiB", "s0 psum", "(Replicate(), Shard(1))"),
    ):
        arguments = ["--mesh", mesh, "--shape", shape, "--max-bytes", limit, source, target]
        assert command_line.main(["plan", *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert command_line.main(["plan", "--mesh", "2x2", "--shape", "8,6", "--max-bytes", "1", "S0 R", "R R"]) == 2
    assert "max_bytes: 1" in capsys.readouterr().err


PLAN = ["plan", "--mesh", "2,2", "--shape", "8,6", "S0 S1", "S1 S0"]
DISPATCH = ["dispatch", "--ranks", "4", "--experts", "8", "--top-k", "2", "--hidden", "16", "--tokens", "8"]
NINES = "9" * 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*PLAN, "--svg", "x.png"], "--svg: 'x.png': not a name that ends with .svg"),
        ([*PLAN, "--svg", f"{NINES}.svg"], "cannot be written; allowed: a file in a folder that is there"),
        ([*PLAN, "--target-mesh", f"4@{NINES}"], "not a rank after @"),
        ([*PLAN, "--mesh", NINES], "not sizes separated by commas"),
        ([*PLAN, "--mesh", "2x0"], "argument --mesh: '2x0': a mesh dim of size 0; allowed: sizes of 1 or more"),
        ([*PLAN, "--mesh", "64,32"], "--mesh: 2048 ranks, and no --rank; allowed: up to 1024, or one with --rank"),
        (
            [*PLAN, "--max-bytes", "1.5M"],
            "--max-bytes: '1.5M': not a whole number below 2**63, of bytes or with a unit",
        ),
        ([*PLAN, "--dtype", NINES], "is not known; allowed: bool, uint8"),
        ([*PLAN, "--topology", "a\0b"], "cannot be read: "),
        ([*PLAN[:-1], f"S{NINES} R"], "a number of 5000 digits; allowed: up to 2**58"),
        ([*PLAN[:-1], "s0 q"], "unknown token 'q'; allowed: R, S<dim>, S<dim>/<split>, P<op>"),
        ([*DISPATCH, "--top-k", "9"], "top_k: 9 of 8 experts; allowed: up to 8"),
        ([*DISPATCH, "--ranks", NINES], "not a number of ranks, 1 or more"),
        ([*DISPATCH, "--capacity", "much"], "capacity: 'much'; allowed: rows, such as 4096, or a factor"),
        ([*DISPATCH, "--layout", "ragged"], "layout: 'ragged'"),
        ([*DISPATCH, "--dtype", "int8"], "dtype: 'int8'; allowed: torch.float32"),
        (["demo", "--ranks", "5000"], "--ranks: 5000; allowed: up to 64 processes"),
        (["record"], "error: the following arguments are required: script\n"),
        (["record", NINES], "is not a file; allowed: a Python file"),
        (
            ["record", "-m", "no.such.module"],
            "is not a module that can be run; allowed with -m: a module, or a package",
        ),
        (["record", "--adapt-fsdp", __file__], "--adapt-fsdp: given without --install; allowed: with it"),
        (["record", "--install", "--topology", "no/file", __file__], "--topology: 'no/file' cannot be read: "),
        ([NINES], "invalid choice"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_invalid_arguments_print_short_errors(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which `record` adds the folder of the program
    try:
        assert command_line.main(arguments) == 2
    except SystemExit as end:
        assert end.code == 2
    out, error = capsys.readouterr()
    message = error[error.rindex("error: ") :]
    assert out == "" and text in message and len(message) < 1400
