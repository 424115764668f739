"""What a replay shows."""

from __future__ import annotations

import pytest
from rich.console import Console

from shardweave.bench import replay_report
from shardweave.bench.replay_cases import Case, distinct
from shardweave.bench.replay_report import Replayed, most_expensive, quartiles, show_replayed
from shardweave.planner import Mesh
from shardweave.runtime.trace import Cost, Entry, Trace

GRID = Mesh((2, 2), ("dp", "tp"))


def case(where: str, shape: tuple[int, ...], calls: int, nbytes: int = 100, fsdp: bool = False) -> Case:
    layouts = ("P S0", "R S0") if fsdp else ("S0 S1", "S1 S0")
    entry = Entry(GRID, None, shape, "float32", *layouts, where, fsdp=fsdp)
    (found,) = distinct(Trace("2.13.0", 4, (0,), {entry: Cost(calls, nbytes)}))
    return found


def replayed(of: Case, stock: float | None, ours: float, *notes: str) -> Replayed:
    return Replayed(of, () if stock is None else (stock,), (ours,), notes, (), True)


@pytest.mark.plan
def test_the_most_expensive_are_named_with_both_costs() -> None:
    found = [
        replayed(case("a.py:1 f", (8, 130), 5), 2e-3, 1e-3),
        replayed(case("a.py:2 f", (8, 12), 1), 3e-3, 1e-4),
        replayed(case("a.py:3 f", (8, 14), 1, 9), None, 0.5),
        replayed(case("a.py:4 f", (8, 16), 1, 6), 5e-3, 6e-3),
    ]
    heading, *lines = most_expensive(found, "", "torch refuses")
    assert heading == "\nThe 3 most expensive redistributions of a rank, all calls together:"
    # 5 calls of the first take longer than 1 of those that take longer each; what torch refuses counts by ours.
    assert lines == [
        " 1. S0 S1 → S1 S0 of float32[8, 14], a.py:3 f",
        "    1 call of 9 B: torch refuses, shardweave 500.00 ms",
        " 2. S0 S1 → S1 S0 of float32[8, 130], a.py:1 f",
        "    5 calls of 100 B: torch 10.00 ms, shardweave 5.00 ms",
        " 3. S0 S1 → S1 S0 of float32[8, 16], a.py:4 f",
        "    1 call of 6 B: torch 5.00 ms, shardweave 6.00 ms",
    ]
    assert most_expensive(found[:1], "", "")[0].startswith("\nThe most expensive redistribution of a rank")


@pytest.mark.plan
def test_names_with_brackets_are_shown_as_they_are() -> None:
    for width in (200, 60):
        console = Console(width=width, record=True)
        replay_report.show_cases(console, "[/a]", (), [(case("[v2].py:1 f[/b]", (8, 130), 5), ())])
        said = console.export_text()
        assert "[v2].py:1 f[/b]" in said and "[/a]" in said


@pytest.mark.plan
@pytest.mark.parametrize("width", [40, 80, 100, 120, 170, 240])
def test_every_width_shows_every_word(width: int) -> None:
    """As a table where its texts have room, else as lines; nothing is cut off, and no column is a few letters wide."""
    one = Replayed(case("some/program.py:123 forward", (8, 130), 5), (3e-3, 1e-3), (1e-3, 1e-3), (), (), False)
    console = Console(width=width, record=True)
    show_replayed(console, Trace("2.13.0", 4, (0,), {}), [one], False, "cpu")
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    table = any("┃" in line for line in lines)
    assert table if width >= 170 else not table or width > 100
    joined = " ".join(" ".join(lines).split())
    for word in ("some/program.py:123", "forward", "2×2", "float32[8,", "130]", "S0", "S1", "100", "warm"):
        assert word in joined, (word, lines)
    if not table:
        assert "some/program.py:123 forward; 2×2 (dp, tp); float32[8, 130]; S0 S1 → S1 S0" in joined
        assert "calls 5, received 100 B, torch 2.000 ms ±25%, shardweave 1.000 ms ±0%, ratio 2.0" in joined


@pytest.mark.plan
def test_rounds_are_shown_with_their_spread(capsys: pytest.CaptureFixture) -> None:
    trace = Trace("2.13.0", 4, (0, 2, 3), {})
    one = Replayed(case("a.py:1 f", (8, 130), 2), (3e-3, 1e-3, 2e-3, 5e-3, 4e-3), (1e-3,), (), (), False)
    assert (one.stock, one.ours) == (3e-3, 1e-3)
    found = one.to_dict()
    assert (found["torch_s"], found["torch_quartiles_s"]) == (3e-3, [2e-3, 4e-3])
    assert (found["shardweave_s"], found["shardweave_quartiles_s"]) == (1e-3, [1e-3, 1e-3])
    assert (found["cold"], found["torch_is"]) == (False, "DTensor") and quartiles(()) is None
    fsdp = replayed(case("FSDP sums x", (64,), 1, fsdp=True), None, 1e-3)
    assert fsdp.to_dict()["torch_is"] == "torch.distributed's all_reduce"
    show_replayed(Console(width=170), trace, [one], False, "cpu")
    said = capsys.readouterr().out
    assert "3.000 ± 33% │" in said and "1.000 ±  0% │" in said and "│  warm" in said and "cold │" not in said
    assert "Recorded by ranks 0, 2-3 of 4: what rank 1 alone redistribute" in said and "FSDP2" not in said
    show_replayed(Console(width=170), Trace("2.13.0", 4, (0, 1, 2, 3), {}), [fsdp], False, "cpu")
    said = capsys.readouterr().out
    assert (
        "│  cold" in said and "as FSDP2 does it: by torch.distributed's all_gather" in said and "Recorded" not in said
    )


@pytest.mark.plan
def test_a_program_that_did_not_end_well_is_told(capsys: pytest.CaptureFixture) -> None:
    one = replayed(case("a.py:1 f", (8, 130), 2), 2e-3, 1e-3)
    for ended in (None, "rank 1: ValueError: [no]"):
        show_replayed(Console(width=170), Trace("2.13.0", 1, (0,), {}, ended=ended), [one], False, "cpu")
        said = capsys.readouterr().out
        assert ("lacks what was to come: rank 1: ValueError: [no]\n" in said) == (ended is not None)
        assert ("did not end well" in said) == (ended is not None)


@pytest.mark.plan
def test_headings_say_what_is_left_out(capsys: pytest.CaptureFixture) -> None:
    found = [replayed(case(f"a.py:{n} f", (8, 130 + n), 1), 2e-3, 1e-3) for n in range(2)]
    for scaled, size in ((False, ""), (True, " (sizes an eighth)")):
        show_replayed(
            Console(width=300), Trace("2.13.0", 4, (0,), {}), found, scaled, "cuda", ", 3 left out by --only '[tp]'"
        )
        said = capsys.readouterr().out
        assert said.partition("\n")[0].rstrip() == f"2 redistributions{size}, 3 left out by --only '[tp]'"
        of = f"{size}, of 2 replayed, 3 left out by --only '[tp]': torch 4.0 ms"
        assert f"All calls of a rank, on 4 ranks of this machine (cuda){of}, shardweave 2.0 ms" in said
        assert f"of a rank, all calls together{size}, of 2 replayed, 3 left out by --only '[tp]':\n" in said


@pytest.mark.plan
def test_what_is_scaled_is_shown_so(capsys: pytest.CaptureFixture) -> None:
    trace, whole = Trace("2.13.0", 4, (0,), {}), case("a.py:1 f", (800, 48), 3, 38400)
    assert (whole.shape, whole.bytes_received) == ((800, 48), 38400)
    # Of the ranks off the diagonal all is new: a half of 100 rows, and of the 48 columns that stay.
    scaled = replayed(whole.scaled(), 2e-3, 1e-3, "a note")
    found = scaled.to_dict()
    assert (found["shape"], found["bytes_received"]) == ((800, 48), 38400)
    assert (found["replayed_shape"], found["replayed_bytes_received"]) == ([100, 48], 50 * 24 * 4)
    show_replayed(Console(width=170), trace, [scaled], True, "cpu")
    said = capsys.readouterr().out
    assert "1 redistribution (sizes an eighth)" in said and "all calls together (sizes an eighth):" in said
    assert "3 calls of 4.688 KiB" in said and said.count("[100, 48]") == 3 and "800" not in said
    show_replayed(Console(width=170), trace, [replayed(whole, 2e-3, 1e-3)], False, "cpu")
    said = capsys.readouterr().out
    assert "eighth" not in said and "3 calls of 37.5 KiB" in said and said.count("[800, 48]") == 2
