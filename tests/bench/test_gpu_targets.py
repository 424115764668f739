"""The GPU's benchmark without a GPU: every line of it runs on tiny shapes, and reports no figure."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from warm_python import run_python

from shardweave.bench.baselines.token_kernels import Rival
from shardweave.bench.gpu import graph_timing, outcomes, targets
from shardweave.bench.gpu.kernel_cases import Made, cases
from shardweave.bench.gpu.measuring import Measuring, rotation
from shardweave.bench.gpu.targets import NO_FIGURE, Target
from shardweave.bench.gpu.token_cases import LARGE, Shape, VirtualRank, verified
from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.results import Results
from shardweave.errors import UnsupportedError

pytestmark = pytest.mark.plan
CPU = torch.device("cpu")
SMALL = Shape(tokens=40, hidden=16, top_k=3, experts=8, ranks=4)


@pytest.mark.interp
@pytest.mark.long
def test_dry_run_measures_every_row(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardweave.bench.gpu.targets", "--dry", "--out", str(tmp_path)]
    ran = run_python(command, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line for line in (tmp_path / "targets.md").read_text().splitlines() if line.startswith("- ")]
    # All that there is a target for; each was verified and timed, and no figure of it is shown.
    assert lines == [line for line in ran.stdout.splitlines() if line.startswith("- ")]
    assert all(NO_FIGURE in line for line in lines) and sum("(target" in line for line in lines) >= 21
    assert "met)" not in ran.stdout


def test_targets_without_gpu_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert targets.main(["--out", str(tmp_path)]) == 2
    assert "error: no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


class Bench:
    """Measures into memory; each call returns the seconds that it takes."""

    def __init__(self, dry: bool = False) -> None:
        self.measuring = Measuring(Sink("kernels", Results().put), CPU, 1, dry=True)
        self.measuring.dry = dry
        self.measuring.prepare = lambda calls: (calls[0](), calls[0])[1]  # type: ignore[assignment]  # as a capture calls

    def beside(self, ours: Made, rivals: list[Rival]) -> Target:
        def measure(case: str) -> None:
            self.measuring.time(case, {"ours": lambda: ours}, 1 << 20, 2, rivals)

        target = Target("x", "×", 1.2, True, measure)
        target.run(self.measuring)
        return target


def takes(seconds: float, right: bool = True) -> Made:
    return lambda: seconds, lambda: right


def test_wrong_results_are_not_timed() -> None:
    case = cases(CPU, 1 << 13, 64)[0]
    call, right = case.make()
    assert not right()  # before the call the target is poisoned
    call()
    assert right()
    wrong = Bench().beside(takes(1.0, False), [])
    assert wrong.value is None and wrong.shown(False) == "not measured: the result is wrong" and wrong.failed


def test_ratio_is_to_the_fastest_and_names_absent_rivals() -> None:
    def absent() -> Made:
        raise ModuleNotFoundError("No module named 'nothing'")

    others = [Rival("slow", lambda: takes(6e-6)), Rival("fast", lambda: takes(3e-6))]
    others += [Rival("wrong", lambda: takes(1e-6, False))]
    results = iter([1e-6] * 2)  # of two sets of buffers
    others += [Rival("uncaptured", lambda: (lambda: next(results), lambda: True)), Rival("nothing", absent)]
    line = Bench().beside(takes(2e-6), others)
    assert line.value == pytest.approx(1.5), line
    assert line.met and not line.failed
    text = line.shown(False)
    assert text.startswith("1.50 ×, ours 2 µs; slow 6 µs; fast 3 µs; ")
    assert set(text.split("; ")[3:]) == {
        "wrong: the result is wrong", "nothing: ModuleNotFoundError: No module named 'nothing'",
        "uncaptured: StopIteration: ",
    }  # fmt: skip
    assert set(line.missing) == {"wrong", "nothing", "uncaptured"}
    assert set(line.rows) == {"ours", "slow", "fast"}
    assert line.judged(False) == " (target ≥ 1.2 ×: met)" and line.judged(True) == " (target ≥ 1.2 ×)"
    # Where nothing is timed, a rival that fails is an error, except if it is not installed.
    failing = Bench(dry=True).beside(takes(2e-6), [Rival("fails", lambda: takes(1 / 0))])
    assert failing.value is None and "ZeroDivisionError" in failing.shown(True)
    alone = Bench().beside(takes(2e-6), [Rival("nothing", absent)])
    assert alone.value is None and "not measured: nothing to compare with; ours 2 µs; nothing: " in alone.shown(False)


Measure = Callable[[Measuring, str], object]


def lines(monkeypatch: pytest.MonkeyPatch, *measure: Measure) -> None:
    """Puts lines with these measurements in the place of all targets, on a device that stands for a GPU."""

    def few(measuring: Measuring) -> Iterator[Target]:
        for number, one in enumerate(measure):
            yield Target(f"line {number}", "µs", 9.0, False, partial(one, measuring))

    monkeypatch.setattr(targets, "targets", few)
    monkeypatch.setattr(targets, "described", lambda device: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(targets, "Measuring", lambda sink, *_, **__: SimpleNamespace(sink=sink, dry=False))


def has_a_figure(measuring: Measuring, case: str) -> None:
    measuring.sink.row(case, "ours", "µs", [1.0])


def raises(error: Exception) -> Measure:
    def measure(measuring: Measuring, case: str) -> None:
        raise error

    return measure


def test_lines_without_a_figure_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what the device does not support."""
    out = ["--out", str(tmp_path)]
    lines(monkeypatch, has_a_figure, raises(UnsupportedError("fp8 needs sm_89")))
    assert targets.main(out) == 0
    for error in (RuntimeError("out of memory"), AssertionError("the result is wrong"), ImportError("no kernel")):
        lines(monkeypatch, has_a_figure, raises(error), has_a_figure)
        assert targets.main(out) == 1


def test_lines_go_on_after_one_that_loses_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = ["--out", str(tmp_path)], list[str]()

    def measure(measuring: Measuring, case: str) -> None:
        measured.append(case)
        if case == "line 1":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        has_a_figure(measuring, case)

    lines(monkeypatch, measure, measure, measure)
    monkeypatch.setattr(targets, "cuda_is_lost", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        targets.main(out)
    assert ended.value.code == outcomes.LOST
    assert targets.main([*out, "--go-on"]) == 0
    assert measured == ["line 0", "line 1", "line 2"]
    found = [line for line in (tmp_path / "targets.md").read_text().splitlines() if line.startswith("- ")]
    assert [line.split(": ")[:2] for line in found] == [
        ["- line 0", "1.00 µs, ours 1 µs (target ≤ 9 µs"], ["- line 1", "not measured"],
        ["- line 2", "1.00 µs, ours 1 µs (target ≤ 9 µs"],
    ]  # fmt: skip
    assert "illegal memory access" in found[1]


def test_every_case_counts_the_bytes_that_it_moves() -> None:
    for case in cases(CPU):
        assert 48 << 20 <= case.moved <= 513 << 20, case.name
        # Nothing of a set of buffers is left in the cache when its turn comes again.
        assert rotation(case.moved, 50 << 20) * case.moved >= 4 * (50 << 20)
    assert LARGE.moved == 9 * 4096 * 7168 * 2
    # Of a packed row: elements, and 56 scales of 4 bytes or 224 of 1 byte.
    assert LARGE.moved_quantized == 9 * 4096 * (7168 + 224)
    assert LARGE.returned_quantized == 4096 * (8 * (7168 + 224) + 2 * 7168)


def test_calls_are_timed_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much of torch.cuda as timing asks for: a graph takes a microsecond for each call that it captured."""
    clock, calls = [0.0], [0]
    cuda = mock.MagicMock()

    @contextmanager
    def graph(into: Any) -> Iterator[None]:
        before = calls[0]
        yield
        captured = calls[0] - before
        into.replay = lambda: clock.__setitem__(0, clock[0] + 1e-3 * captured)

    def event(enable_timing: bool) -> Any:
        one = mock.Mock()
        one.record = lambda: setattr(one, "at", clock[0])
        one.elapsed_time = lambda other: other.at - one.at
        return one

    cuda.graph, cuda.Event, cuda.CUDAGraph = graph, event, SimpleNamespace
    monkeypatch.setattr(graph_timing.torch, "cuda", cuda)
    run = graph_timing.in_graph([lambda: calls.__setitem__(0, calls[0] + 1)] * 2)
    assert calls[0] == 2 + 2 + 2 + 2 * 50, "both outside of either graph, then one and fifty of each"
    assert run() == pytest.approx(1e-6)


@pytest.fixture(scope="module")
def rank() -> VirtualRank:
    return VirtualRank(SMALL, CPU)


def test_rows_of_a_virtual_rank(rank: VirtualRank) -> None:
    """Of every slot the rows of lower ranks come first, then its own by token and k."""
    matrix = rank.matrices.tensors[rank.me]
    assert (matrix >= 0).all() and matrix[:, -1].sum() == 0
    seen: dict[int, int] = {}
    for t in range(SMALL.tokens):
        for k in range(SMALL.top_k):
            slot = int(rank.ids[t, k])
            owner, first = slot // 2, slot - slot % 2
            begin = int(matrix[:, first:slot].sum() + matrix[: rank.me, slot].sum())
            assert rank.at[t, k] == owner * rank.rows + begin + seen.get(slot, 0)
            seen[slot] = seen.get(slot, 0) + 1


MADE: dict[str, Callable[[VirtualRank], Made]] = {
    "push": lambda rank: rank.push(routing=False),
    "route + push": lambda rank: rank.push(routing=True),
    "combine": lambda rank: rank.combine(),
    "both": lambda rank: rank.both(),
    "push of quantized rows": lambda rank: rank.push_quantized(),
    "combine of quantized rows": lambda rank: rank.combine_quantized(),
    "beside a matmul": lambda rank: rank.beside_matmul(8, True),
    "batched": lambda rank: VirtualRank(replace(SMALL, batched=True), CPU).both(),
}


@pytest.mark.parametrize("name", MADE)
def test_results_are_wrong_before_a_call_and_right_after(rank: VirtualRank, name: str) -> None:
    call, right = MADE[name](rank)
    assert not right()
    call()
    assert right()
    call()
    assert right()
    with pytest.raises(AssertionError, match="wrong"):
        verified([(lambda: None, MADE[name](rank)[1])])
