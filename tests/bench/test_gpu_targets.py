"""The GPU's benchmark, without a GPU: every line of it runs on tiny shapes, and says no figure that it has not got."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm_python import run_python

from shardweave.__main__ import main
from shardweave.bench.gpu import graph_timing, outcomes, run_tests, targets
from shardweave.bench.gpu.kernel_cases import Case, cases, rotation
from shardweave.bench.gpu.target_bench import Bench
from shardweave.bench.gpu.target_rows import NO_FIGURE, Row, as_markdown, as_results
from shardweave.bench.harness import markdown
from shardweave.bench.harness.result_file import read

pytestmark = pytest.mark.plan
CPU = torch.device("cpu")


@pytest.mark.interp
def test_dry_run_measures_every_row(tmp_path: Path) -> None:
    report = tmp_path / "tests.json"
    report.write_text('{"tests": 3, "failed": ["a.b"]}')
    command = [
        sys.executable,
        "-m",
        "shardweave.bench.gpu.targets",
        "--dry",
        "--out",
        str(tmp_path),
        "--tests",
        str(report),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = run_python(command, env=environment, timeout=500)
    assert ran.returncode == 0, ran.stderr
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_targets.json", "gpu_targets.md"]
    found = read(folder / "gpu_targets.json", "A")
    assert found.scale == "dry" and found.machine["tests"]["failed"] == ["a.b"] and not found.faults
    # All that there is a target for; each was verified and timed, and the page has no figure of it.
    ours = [row for row in found.rows if row.is_ours]
    assert len([row for row in ours if row.detail["target"] is not None]) >= 21
    assert {one.contender for one in found.absent} <= {"torchao", "torchtitan"}
    page = (folder / "gpu_targets.md").read_text()
    assert page.count(f"| {NO_FIGURE} |") == len(ours) and "| yes |" not in page
    # Others read it as they read the suites'.
    assert {row.unit for row in found.rows} == {"µs", "ns"} and "kernels" in markdown.as_markdown(found)
    assert main(["compare", str(folder / "gpu_targets.json"), str(folder / "gpu_targets.json")]) == 0


def test_targets_without_gpu_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert targets.main(["--out", str(tmp_path)]) == 2
    assert "error: no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_wrong_results_are_not_timed() -> None:
    bench = Bench(CPU, True, 100.0)
    case = cases(CPU, True)[0]
    call, right = case.make()
    assert not right()  # before the call the target is poisoned
    call()
    assert right()
    wrong = Case(case.name, 0.9, case.moved, lambda: (lambda: None, lambda: False))
    row = Row(case.name, "of the ceiling", 0.9, True)
    bench.measure(row, lambda row: bench.kernel(wrong, row))
    assert row.value is None and row.note == "not measured: AssertionError: the result is wrong" and row.met is None
    notes: list[str] = []
    late = Bench(CPU, True, -1.0, lambda: notes.append(row.note))
    late.measure(row, lambda row: pytest.fail("begun too late"))
    assert notes == ["not measured: no time was left"]


def test_every_case_counts_the_bytes_that_it_moves() -> None:
    for case in cases(CPU, False):
        assert 48 << 20 <= case.moved <= 513 << 20, case.name
        # Nothing of a set of buffers is left in the cache when its turn comes again.
        assert rotation(case.moved, 50 << 20) * case.moved >= 4 * (50 << 20)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of torch.cuda as timing asks for; a graph is what was called while it was captured."""
    state = SimpleNamespace(clock=0.0, capturing=None, synchronized=0)

    class Graph:
        def __init__(self) -> None:
            self.calls = 0

        def replay(self) -> None:
            state.clock += 1e-3 * self.calls  # a microsecond each

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = state.clock

        def synchronize(self) -> None:
            state.synchronized += 1

        def elapsed_time(self, other: Any) -> float:
            return other.at - self.at

    @contextmanager
    def graph(into: Graph) -> Iterator[None]:
        state.capturing = into
        yield
        state.capturing = None

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    side = SimpleNamespace(wait_stream=lambda other: None)
    names = {"CUDAGraph": Graph, "Event": Event, "graph": graph, "stream": stream, "Stream": lambda: side,
             "current_stream": lambda: side, "synchronize": lambda: None}  # fmt: skip
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


def test_a_call_is_timed_in_a_graph(cuda: SimpleNamespace) -> None:
    outside = []

    def call() -> None:
        if cuda.capturing is None:
            outside.append(1)
        else:
            cuda.capturing.calls += 1

    times = graph_timing.GraphTimer(rounds=5).time([call, call])
    assert len(times.rounds) == 5 and times.seconds == pytest.approx(1e-6) and times.spread < 1e-6
    assert len(outside) == 4 and cuda.synchronized == 7  # two sets, before either graph; a short one, then the rounds


def test_sides_are_timed_in_turns(cuda: SimpleNamespace) -> None:
    order: list[str] = []

    def call(name: str, calls: int) -> Callable[[], None]:
        def one() -> None:
            order.append(name)
            if cuda.capturing is not None:
                cuda.capturing.calls += calls

        return one

    sides = {"one": [call("one", 1)], "three": [call("three", 3)] * 2}
    times = graph_timing.GraphTimer(rounds=5).time_in_turns(sides)
    assert times["one"].seconds == pytest.approx(1e-6) and times["three"].seconds == pytest.approx(3e-6)
    assert all(len(found.rounds) == 5 for found in times.values())
    order.clear()
    host = graph_timing.HostTimer(rounds=2).time_in_turns(sides)
    assert order == ["one", "three", "three", "three", "three", "one"] and len(host["one"].rounds) == 2
    order.clear()
    graph_timing.HostTimer(rounds=1, least_seconds=1e-3).time_in_turns({"one": sides["one"]})
    assert len(order) > 10  # a round is as long as it has to be


def test_markdown_shows_met_targets() -> None:
    detail = {"microseconds": 123.4, "gigabytes_per_s": 4000.0, "ceiling_gigabytes_per_s": 4300.0}
    kind = {
        "kind": "S0 → R",
        "stock": 80,
        "ours": 40,
        "inner_stock": 50,
        "windows": 9,
        "windows_launched": 14,
        "boxes": 2,
        "signals": 3,
        "messages": 30,
    }
    rows = [
        Row("copy", "of the ceiling", 0.92, True, 0.93, "", detail),
        Row("narrow", "of the ceiling", 0.8, True, 0.5, "", detail),
        Row("graph", "×", 1.15, False, 1.1, "", {"microseconds": 5.0}),
        Row("absent", "×", 2.0, True, None, "not measured: RuntimeError: no profiler"),
        Row("host", "µs", 15.0, False, 9.0, "", {"kinds": [kind]}),
    ]
    text = as_markdown(rows, {"device": "NVIDIA H200", "driver": "580.1"})
    assert "| copy | 93.0% | ≥ 92% | yes | 123.4 | 4000.0 | 4300.0 |" in text
    assert "| narrow | 50.0% | ≥ 80% | **no** |" in text and "| graph | 1.10 × | ≤ 1.15 × | yes | 5.0 | - | - |" in text
    assert "| absent | not measured: RuntimeError: no profiler | ≥ 2 × | - | - | - | - |" in text
    assert "| S0 → R | 80.0 | 40.0 | 50.0 | 9.0 | 14.0 | 2 + 3 | 30.0 |" in text


def test_a_result_file_has_the_rounds_of_every_contender() -> None:
    times, copied = graph_timing.Times((2e-6, 3e-6, 4e-6)), graph_timing.Times((1.5e-6,))
    rows = [
        Row("copy (no target)", "of the ceiling", None, True, 0.5, "", {"spread": 0.1},
            {"ours": times, "copy": copied}, 64, {"torchao": "not installed"}),
        Row("host", "µs", 15.0, False, 9.0),
        Row("late", "µs", 15.0, False, None, "not measured: no time was left"),
        Row("wrong", "µs", 15.0, False, None, "not measured: AssertionError: the result is wrong"),
    ]  # fmt: skip
    found = as_results(rows, {"gpus": []}, False, "x")
    assert [(row.case, row.contender, row.median) for row in found.rows] == [
        ("copy", "ours", pytest.approx(3)), ("copy", "copy", pytest.approx(1.5)), ("host", "ours", 9.0),
    ]  # fmt: skip
    assert (found.rows[0].bytes, found.rows[0].share_of_ceiling) == (64, pytest.approx(0.5))
    assert found.rows[2].detail == {"target": 15.0, "at least": False, "reached": 9.0, "of": "µs", "met": True}
    assert [(one.case, one.contender) for one in found.absent] == [("copy", "torchao"), ("late", "ours")]
    assert [one.case for one in found.faults] == ["wrong"]


def folder_of_tests(folder: Path, bodies: dict[str, tuple[str, ...]]) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: one\n  multigpu: several\n")
    for name, tests in bodies.items():
        file = folder / f"tests/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        said = [f"@pytest.mark.gpu\ndef test_{i}():\n    {body}\n" for i, body in enumerate(tests)]
        file.write_text("import pytest\n" + "".join(said))
    shutil.copy(Path(__file__).parents[1] / "conftest.py", folder / "tests")


@pytest.mark.long
def test_gpu_tests_run_in_parts_and_failures_are_kept(tmp_path: Path) -> None:
    bodies = {"kernels/test_a": ("assert False", "pass"), "runtime/test_b": ("raise KeyError(1)", "pytest.skip('no')")}
    folder_of_tests(tmp_path, bodies)
    report = tmp_path / "report.json"
    assert run_tests.main(["--root", str(tmp_path), "--report", str(report), "--parts", "2"]) == 1
    found = json.loads(report.read_text())
    # Each of the kernels' tests ran once, in a process of its own.
    assert found["failed"] == ["tests/kernels/test_a.py::test_0", "tests/runtime/test_b.py::test_0"]
    assert (found["tests"], found["failures"], found["errors"], found["skipped"]) == (4, 2, 0, 1)
    assert [text[:36] for text in found["went_wrong"]] == ["pytest ended with 1, within no test:"] * 2


@pytest.mark.long
def test_run_that_times_out_is_killed_with_its_children(tmp_path: Path) -> None:
    stays = "import subprocess, time; child = subprocess.Popen(['sleep', '300'])"
    stays += f"; open('{tmp_path}/child', 'w').write(str(child.pid)); time.sleep(300)"
    folder_of_tests(tmp_path, {"runtime/test_b": ("pass", stays)})
    (tmp_path / "reports").mkdir()
    until = time.monotonic() + 30
    (found,) = run_tests.run(["tests/runtime"], tmp_path, 1, tmp_path / "reports", until)
    assert found["tests"] == 1 and not found["failed"] and found["running"] == ["tests/runtime/test_b.py::test_1"]
    assert found["error"] == "out of time, within tests/runtime/test_b.py::test_1: tests/runtime"
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_summary_of_truncated_outcomes(tmp_path: Path) -> None:
    lines = [["a", "started"], ["a", "passed"], ["a", "error"], ["a", "finished"], ["b", "started"], ["c.py", "error"]]
    file = tmp_path / "outcomes"
    file.write_text("\n".join(json.dumps([*line, ""]) for line in lines) + '\n["b", "pas')
    want = {"tests": 1, "failures": 0, "errors": 2, "skipped": 0, "failed": ["a", "c.py"], "running": ["b"]}
    assert outcomes.summary(file) == want
    assert not any(outcomes.summary(tmp_path / "nothing").values())
