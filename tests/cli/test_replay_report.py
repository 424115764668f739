"""The report of a replay."""

from __future__ import annotations

import pytest
from rich.console import Console

from shardweave.bench.workloads.trace_cases import Case, distinct
from shardweave.cli.replay_report import Replayed, most_expensive, quartiles, show_replayed
from shardweave.planner import Mesh
from shardweave.runtime.tracing.trace_file import Cost, Entry, Trace

pytestmark = pytest.mark.plan
GRID = Mesh((2, 2), ("dp", "tp"))


def case(where: str, shape: tuple[int, ...], calls: int, nbytes: int = 100, fsdp: bool = False) -> Case:
    layouts = ("P S0", "R S0") if fsdp else ("S0 S1", "S1 S0")
    entry = Entry(GRID, None, shape, "float32", *layouts, where, fsdp=fsdp)
    (one,) = distinct(Trace("2.13.0", 4, (0,), {entry: Cost(calls, nbytes)}))
    return one


def replayed(of: Case, stock: float | None, ours: float, *notes: str) -> Replayed:
    return Replayed.of(of, () if stock is None else (stock,), (ours,), notes, (), True)


def report(cases: list[Replayed], trace: Trace, scaled: bool = False, left_out: str = "", width: int = 240) -> str:
    console = Console(width=width, record=True)
    show_replayed(console, trace, cases, scaled, "cpu", left_out)
    return console.export_text()


def test_most_expensive_lines_have_both_costs() -> None:
    cases = [
        replayed(case("a.py:1 f", (8, 130), 5), 2e-3, 1e-3),
        replayed(case("a.py:2 f", (8, 12), 1), 3e-3, 1e-4),
        replayed(case("a.py:3 f", (8, 14), 1, 9), None, 0.5),
        replayed(case("a.py:4 f", (8, 16), 1, 6), 5e-3, 6e-3),
    ]
    # Sorted by the time of all calls: 5 calls of the first. Where torch refuses, shardweave's time counts.
    assert most_expensive(cases, "", "torch refuses") == [
        "\nThe 3 most expensive redistributions of a rank, all calls together:",
        " 1. S0 S1 → S1 S0 of float32[8, 14], a.py:3 f",
        "    1 call of 9 B: torch refuses, shardweave 500.00 ms",
        " 2. S0 S1 → S1 S0 of float32[8, 130], a.py:1 f",
        "    5 calls of 100 B: torch 10.00 ms, shardweave 5.00 ms",
        " 3. S0 S1 → S1 S0 of float32[8, 16], a.py:4 f",
        "    1 call of 6 B: torch 5.00 ms, shardweave 6.00 ms",
    ]


def test_times_are_shown_with_their_spread() -> None:
    trace = Trace("2.13.0", 4, (0, 2, 3), {}, ended="rank 1: ValueError: [no]")
    rounds = (3e-3, 1e-3, 2e-3, 5e-3, 4e-3)
    one = Replayed.of(case("[v2].py:1 f[/b]", (8, 130), 2), rounds, (1e-3,), (), (), False)
    entry = one.to_dict()
    assert (entry["torch_s"], entry["torch_quartiles_s"]) == (3e-3, [2e-3, 4e-3])
    assert (entry["shardweave_s"], entry["shardweave_quartiles_s"]) == (1e-3, [1e-3, 1e-3])
    assert (entry["cold"], entry["torch_is"]) == (False, "DTensor") and quartiles(()) is None
    text = report([one], trace)
    assert "3.000 ± 33% │" in text and "1.000 ±  0% │" in text and "│  warm" in text and "[v2].py:1 f[/b]" in text
    assert "Recorded by ranks 0, 2-3 of 4: redistributions of rank 1 alone are missing" in text and "FSDP2" not in text
    assert "incomplete: rank 1: ValueError: [no]\n" in text
    fsdp = replayed(case("FSDP sums x", (64,), 1, fsdp=True), None, 1e-3)
    assert fsdp.to_dict()["torch_is"] == "torch.distributed's all_reduce"
    text = report([fsdp], Trace("2.13.0", 4, (0, 1, 2, 3), {}))
    assert "│  cold" in text and "as FSDP2 issues them: all_gather" in text
    assert "Recorded" not in text and "incomplete" not in text


def test_scaled_and_left_out_cases_are_stated() -> None:
    trace, whole = Trace("2.13.0", 4, (0,), {}), case("a.py:1 f", (800, 48), 3, 38400)
    # Ranks off the diagonal receive everything: a half of 100 rows, of the 48 columns that remain.
    scaled = replayed(whole.scaled(), 2e-3, 1e-3, "a note")
    entry = scaled.to_dict()
    assert (entry["shape"], entry["bytes_received"]) == ((800, 48), 38400)
    assert (entry["replayed_shape"], entry["replayed_bytes_received"]) == ([100, 48], 50 * 24 * 4)
    text = report([scaled], trace, True, ", 3 left out by --only '[tp]'")
    of = " (sizes an eighth), of 1 replayed, 3 left out by --only '[tp]'"
    assert text.startswith("1 redistribution (sizes an eighth), 3 left out by --only '[tp]'")
    assert f"{of}: torch 6.0 ms, shardweave 3.0 ms" in text and f"of a rank, all calls together{of}:\n" in text
    assert "3 calls of 4.688 KiB" in text and text.count("[100, 48]") == 3 and "800" not in text
    text = report([replayed(whole, 2e-3, 1e-3)], trace)
    assert "eighth" not in text and "3 calls of 37.5 KiB" in text and text.count("[800, 48]") == 2


@pytest.mark.parametrize("width", [80, 100, 120, 149, 150, 170])
def test_cases_fit_into_the_terminal(width: int) -> None:
    """A table, or under 150 columns a block of a few lines for each case."""
    mesh = Mesh((2, 2), ("data_parallel_replicas", "tensor_parallel_inside_node"))
    entry = Entry(mesh, None, (4, 8, 16, 32, 4), "float8_e4m3fn", "S0 S0 @ 0:1,0", "S4 S3", "decoder_layer.py:1017 f")
    trace = Trace("2.13.0", 4, (0,), {entry: Cost(12, 4096)})
    (one,) = distinct(trace)
    text = report([replayed(one, 2e-3, 1e-3), replayed(one, 3e-3, 1e-3)], trace, width=width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    shown = lines[: next(number for number, line in enumerate(lines) if line.startswith("A time is"))]
    if width >= 150:
        assert any("│  cold" in line for line in shown)
    else:
        assert "│" not in text and len(shown) <= 18
        for line in ("where    decoder_layer.py:1017 f", "layouts  S0 S0 @ 0:1,0 → S4 S3"):
            assert shown.count(line) == 2
        assert "mesh     2×2 (data_parallel_replicas, tensor_parallel_inside_node)" in shown
        assert "torch ms 3.000 ±  0%" in text and "received 4 KiB" in text
