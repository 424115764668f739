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
from random import Random

import pytest
import torch

from shardweave import __main__ as command_line
from shardweave.bench.harness.writable import check_writable
from shardweave.cli import demo, parsing
from shardweave.cli.bench import PROGRAMS
from shardweave.errors import ArgumentError
from shardweave.planner import ITEMSIZE, NVLINK_NODE

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
    assert programs - {"gpu.environment", "gpu.run_sections", "gpu.host_work", "gpu.profile_calls"} == set(PROGRAMS)
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


def test_plan_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--mesh", "4096,4"], ["--mesh", "2,4", "--transport", "process_group"]):
        assert command_line.main(["plan", *arguments, "--rank", "5", "--shape", "8192,64", "S0 R", "R S1"]) == 0
        assert ", rank 5\n" in capsys.readouterr().out


TRACE = Path(command_line.__file__).parent / "bench/workloads/recorded/solver.json"


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


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_text_is_wrapped_to_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (DISPATCH, [*PLAN, "--transport", "process_group"]):
        printed = []
        for stream in (Terminal(), io.StringIO()):
            monkeypatch.setattr(sys, "stdout", stream)
            assert command_line.main(arguments) == 0
            printed.append(stream.getvalue())
        wrapped, plain = printed
        assert wrapped.split() == plain.split() and max(map(len, wrapped.splitlines())) <= columns
        assert (wrapped == plain) is (max(map(len, plain.splitlines())) <= columns)


def test_version_lists_dependencies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--version"])
    output = " ".join(capsys.readouterr().out.split())
    assert re.fullmatch(r"shardweave \S+, torch \S+, triton .+, numpy \S+, Python \S+", output)


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


def test_short_dtype_names() -> None:
    """Includes torch's own spellings and abbreviations."""
    for name in ITEMSIZE:
        assert parsing.dtype(name) == parsing.dtype(f"torch.{name}") == name
    spelled = {name: getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    for name, dtype in spelled.items():
        canonical = str(dtype).removeprefix("torch.")
        if canonical in ITEMSIZE:
            assert parsing.dtype(name) == parsing.dtype(dtype.abbr) == canonical, name
    for short, name in (("bf16", "bfloat16"), ("FP16", "float16"), ("fp32", "float32"), ("fp8", "float8_e4m3fn")):
        assert parsing.dtype(short) == name
    assert set(parsing._SHORT_DTYPES.values()) <= set(ITEMSIZE) and parsing.dtype("fp99") == "fp99"


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


def test_plan_without_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a shell has closed it (`>&-`), Python has no `sys.stdout`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert command_line.main(PLAN) == 2
    error = "error: standard output is closed; allowed: a file or a pipe, or /dev/null\n"
    assert capsys.readouterr().err == error
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert command_line.main(PLAN) == 2


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


@pytest.mark.parametrize("text", ["1k", "1KB", "1 K", "1.5M", "-1", "", "K", "9999999999T", "9223372036854775808"])
def test_bytes_in_unknown_spellings_name_those_allowed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([*PLAN, f"--max-bytes={text}"])
    error = capsys.readouterr().err
    assert f"--max-bytes: {text!r}: not a whole number below 2**63, of bytes or with a unit: K or KiB (1024" in error


def test_files_without_an_end_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that never ends, and a named pipe that nobody writes to; a pipe with a topology is read."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments, path, text in (
        ([*PLAN, "--topology", "/dev/zero"], "/dev/zero", "cannot be read: File too large; allowed: nvlink"),
        (["replay", "/dev/zero"], "/dev/zero", "cannot be read: File too large; allowed: a trace"),
        ([*PLAN, "--topology", str(pipe)], pipe, "cannot be read: an empty pipe that no process has open for writing"),
        (["replay", str(pipe)], pipe, "cannot be read: an empty pipe that no process has open for writing; allowed"),
    ):
        assert command_line.main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert str(path) in error and text in error
    reader, writer = os.pipe()
    os.write(writer, NVLINK_NODE.to_json().encode())
    os.close(writer)
    assert command_line.main([*PLAN, "--topology", f"/dev/fd/{reader}"]) == 0
    os.close(reader)


def test_plan_accepts_torch_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for source, target, dtype in (("S0 P", "R S1", "bfloat16"), ("(Shard(dim=0), Partial(sum))", "RS(1)", "bf16")):
        assert command_line.main(["plan", "--mesh", "2,2", "--shape", "8,6", "--dtype", dtype, source, target]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


PLAN = ["plan", "--mesh", "2,2", "--shape", "8,6", "S0 S1", "S1 S0"]
DISPATCH = ["dispatch", "--ranks", "4", "--experts", "8", "--top-k", "2", "--hidden", "16", "--tokens", "8"]
NINES = "9" * 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*PLAN, "--svg", "x.png"], "--svg: 'x.png': not a name that ends with .svg"),
        ([*PLAN, "--svg", "/no/where.svg"], "--svg: '/no/where.svg' cannot be written; allowed: a file in a folder"),
        ([*PLAN, "--svg", f"{NINES}.svg"], "cannot be written; allowed: a file in a folder that is there"),
        ([*PLAN, "--target-mesh", f"4@{NINES}"], "not a rank after @"),
        ([*PLAN, "--target-mesh", "4@999999999999"], "mesh: ranks (999999999999, 1000000000000, 1000000000001, "),
        ([*PLAN, "--mesh", NINES], "not sizes separated by commas"),
        ([*PLAN, "--mesh", "2x0"], "argument --mesh: '2x0': a mesh dim of size 0; allowed: sizes of 1 or more"),
        ([*PLAN, "--mesh", "99999999,99999999"], "allowed: up to 16777216"),
        ([*PLAN, "--mesh", "64,32"], "--mesh: 2048 ranks, and no --rank; allowed: up to 1024, or one with --rank"),
        ([*PLAN, "--rank", "4"], "position 4 is outside the mesh (2, 2); allowed: 0..3"),
        ([*PLAN, "--shape", NINES], "not sizes separated by commas"),
        ([*PLAN, "--max-bytes", NINES], "not a whole number below 2**63"),
        ([*PLAN, "--dtype", NINES], "is not known; allowed: bool, uint8"),
        ([*PLAN, "--topology", NINES], "cannot be read: File name too long; allowed: nvlink"),
        ([*PLAN, "--topology", "a\0b"], "cannot be read: "),
        ([*PLAN, "--transport", NINES], "invalid choice"),
        ([*PLAN[:-1], f"S{NINES} R"], "a number of 5000 digits; allowed: up to 2**58"),
        ([*PLAN[:-1], "R " * 3000], "3000 placements; allowed: up to 24"),
        ([*DISPATCH, "--top-k", "9"], "top_k: 9 of 8 experts; allowed: up to 8"),
        ([*DISPATCH, "--ranks", "9" * 15], "ranks: 999999999999999; allowed: a whole number, 1 to 1048576"),
        ([*DISPATCH, "--ranks", NINES], "not a number of ranks, 1 or more"),
        ([*DISPATCH, "--tokens", NINES], "not a whole number below 2**63"),
        ([*DISPATCH, "--capacity", "9" * 4000], "capacity: about 2**13287; allowed: a whole number"),
        ([*DISPATCH, "--capacity", NINES], "capacity: '999"),
        ([*PLAN, "--mesh", "2,x"], "'2,x': not sizes separated by commas"),
        ([*PLAN, "--mesh", "2x"], "'2x': not sizes separated by commas or x, such as 2,2"),
        ([*PLAN[:-1], "s0 q"], "unknown token 'q'; allowed: R, S<dim>, S<dim>/<split>, P<op>"),
        ([*PLAN[:-1], "rr"], "unknown token 'Rr'; allowed: R, S<dim>"),
        (["demo", "--ranks", "0"], "'0': not a number of ranks, 1 or more"),
        (["replay", "t.json", "--most", "0"], "'0': not a number of redistributions, 1 or more"),
        (["demo", "--ranks", "5000"], "--ranks: 5000; allowed: up to 64 processes"),
        (["record", "-o", "/no/where.json", __file__], "--out: '/no/where.json' cannot be written"),
        (["record"], "error: the following arguments are required: script\n"),
        (["record", NINES], "is not a file; allowed: a Python file"),
        (["record", "a\0b"], "is not a file; allowed: a Python file"),
        *(
            (["record", "-m", name], "is not a module that can be run; allowed with -m: a module, or a package with")
            for name in ("no.such.module", "collections", "", ".a", "a..b", "a\0b", "/a", NINES)
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


HOSTILE = ["", " ", "S0 S0 @ 0:1,0", "R R", "9" * 30, NINES, "é\0"]
HOSTILE += "0 -1 1 2 3 1,1 2,2 2, , 1.5 nan 1e400 २ @ 2@ 2@1 S0 S9 ( () S(0)R Spec( S0//3 bf16 x.svg /".split()


def test_random_arguments_raise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    worked = 0
    for seed in range(120):
        random = Random(seed)
        arguments = list(random.choice((PLAN, DISPATCH)))
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(1, len(arguments))
            arguments[place] = random.choice(HOSTILE)
        if random.random() < 0.5:
            arguments += [
                random.choice(("--dtype", "--topology", "--svg", "--max-bytes", "--capacity", "--target-mesh"))
            ]
            arguments += [random.choice(HOSTILE)]
        try:
            status = command_line.main(arguments)
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
        assert status in (0, 2), arguments
        worked += status == 0
        assert len(capsys.readouterr().err) < 3000, arguments
    assert worked
