"""Figures on pages equal those of the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pages import ROOT, parse_page

import shardweave
from shardweave import Mesh
from shardweave.bench.baselines.stock_plans import count_stock, planned

pytestmark = pytest.mark.plan
RESULTS = ROOT / "bench/results"


def data(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def text(name: str) -> str:
    """The file without line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def hold(page: str, sentence: str, source: str, want: Sequence[float]) -> None:
    """Assert that the page has one sentence of this pattern, and that its groups are the figures of a results file."""
    found = re.findall(sentence, text(page))
    assert len(found) == 1, f"{page} has {len(found)} sentences like {sentence!r}; if it was reworded, adapt this test"
    figures = [float(one.replace(",", "")) for one in found[0]]
    assert figures == list(want), f"{page} says {figures}, bench/results/{source} has {list(want)}: change the page"


def rounded(given: Mapping[str, Any]) -> list[float]:
    return [round(given["median_ratio"], 1), round(given["min_ratio"], 1)]


def test_demo_table_in_the_readme() -> None:
    found = data("demo.json")
    number = r"([\d.]+)"
    sides = " ".join([rf"\| {number} → {number} \| \*\*{number}×\*\*"] * 2)
    rows = re.findall(rf"^\| [^|]+ \| `(.+) → (.+)` \| ([\d×]+), (\w+) {sides} \|$", readme(), re.M)
    assert len(rows) == 7
    shown: list[list[float]] = []
    for source, target, shape, dtype, *figures in rows:
        request = source, target, [int(n) for n in shape.split("×")], dtype
        want = []
        for cases in (found["process_group_cases"], found["cases"]):
            (case,) = (c for c in cases if (c["source"], c["target"], c["shape"], c["dtype"]) == request)
            want += [f"{case['torch_ms']:.2f}", f"{case['shardweave_ms']:.2f}", f"{case['ratio']:.1f}"]
        assert figures == want, f"README.md, {request}: {figures}; demo.json: {want}"
        shown.append([float(figure) for figure in figures])
    pattern = r"all (\d+) cases .*?\*\*([\d.]+)×, ([\d.]+)×\*\* .*?\*\*([\d.]+)×, ([\d.]+)×\*\*"
    hold("README.md", pattern, "demo.json", [found["counted"], *rounded(found["process_group"]), *rounded(found)])
    least = [min(row[side] for row in shown) for side in (2, 5)]
    assert least == [rounded(found["process_group"])[1], rounded(found)[1]], "the table has the least ratios"


def test_bytes_of_both_plans_in_the_readme() -> None:
    mesh, shape = Mesh((2, 2)), (8, 6)
    program = shardweave.plan(mesh, shape, "float32", "S0 S1", "S1 S0")
    layouts = planned(mesh.shape, shape, program.source, program.target)
    nccl, gloo = (count_stock(mesh, shape, layouts, gloo=gloo).received for gloo in (False, True))
    pattern = r"DTensor receives (\d+) bytes a rank \((\d+) on CPUs.* shardweave receives at most (\d+),"
    hold("README.md", pattern, "(none)", [nccl, gloo, max(program.bytes_received)])


def test_replay_figures_in_benchmarking() -> None:
    """The page shows the end of the results page."""
    page = parse_page("", (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8"))
    (shown,) = [block.shown for block in page.blocks if block.shown and "most expensive" in block.shown]
    assert shown.removeprefix("…\n") in (RESULTS / "replay.md").read_text(encoding="utf-8")
    each = sorted(
        ([one["calls"] * one[f"{side}_s"] * 1e3 for side in ("torch", "shardweave")]
         for one in data("replay.json")["redistributions"]), reverse=True,
    )  # fmt: skip
    figures = re.findall(r": torch ([\d.]+) ms, shardweave ([\d.]+) ms", shown)
    assert figures == [(f"{theirs:.2f}", f"{ours:.2f}") for theirs, ours in each[:3]]


def test_training_figures() -> None:
    (theirs,), (ours,) = (re.findall(rf" {side} +(\d+) ms", text("bench/results/training.md"))
                          for side in ("torch", "shardweave"))  # fmt: skip
    assert "are equal to the bit" in text("bench/results/training.md")
    pattern = r"takes (\d+) ms in place of (\d+), a ratio of \*\*([\d.]+)\*\*"
    hold("README.md", pattern, "training.md", [int(ours), int(theirs), round(int(theirs) / int(ours), 1)])


def test_no_kernel_spills() -> None:
    """As the limits page says: everything was compiled, and nothing spilled."""
    row = r"^\| (\w+) \| \d+ \| \d+ \| (\d+) of (\d+) \| (\d+) \|"
    found = re.findall(row, (RESULTS / "aot.md").read_text(encoding="utf-8"), re.M)
    assert found and all(compiled == asked and spilled == "0" for _, compiled, asked, spilled in found), found
    text = " ".join((ROOT / "docs/limits.md").read_text(encoding="utf-8").split())
    assert "([aot.md](../bench/results/aot.md)), without spills." in text


def test_plan_figures() -> None:
    page = (RESULTS / "plans.md").read_text(encoding="utf-8")
    number = r"([\d.]+)"
    counted = {
        name: [
            [float(one) for one in row]
            for row in re.findall(rf"^\| {name} \| (\d+)" + rf" \| {number}" * 4, page, re.M)
        ]
        for name in ("torch greedy", "torch graph", "shardweave")
    }
    assert all(len(rows) == 2 for rows in counted.values())  # even shapes, uneven ones
    greedy, graph, ours = counted.values()
    assert {x for row in ours for x in row[1:]} == {1.0}
    pattern = (
        r"over ([\d,]+) pairs of layouts on four .* receives ([\d.]+) times the bound on average and up to ([\d.]+) "
        r"times, its graph planner ([\d.]+) times on even shapes and ([\d.]+) times on "
    )
    (mean,) = {round(row[2], 1) for row in greedy}  # of even shapes and of uneven ones
    pairs = sum(row[0] for row in ours)
    want = [pairs, mean, max(row[4] for row in greedy), *(round(row[2], 1) for row in graph)]
    hold("docs/benchmarking.md", pattern, "plans.md", want)
