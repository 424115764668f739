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
from shardweave.bench.baselines.stock_plans import count_stock, stock

pytestmark = pytest.mark.plan
RESULTS = ROOT / "bench/results"


def data(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def text(name: str) -> str:
    """The file without line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rows_of(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a suite's table by case and contender, each by the heads of its columns."""
    lines = (RESULTS / name).read_text(encoding="utf-8").split("\n")
    heads, _, *cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {(row["case"], row["contender"]): row for row in (dict(zip(heads, of, strict=True)) for of in cells)}


def microseconds_of(row: Mapping[str, str]) -> float:
    return float(row["median"].removesuffix(" µs").replace(",", ""))


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


def test_demo_figures_in_benchmarking() -> None:
    found = data("demo.json")
    pattern = (
        r"median ratio of ([\d.]+) and a least of ([\d.]+) over (\d+) cases .* and ([\d.]+) and ([\d.]+) with gloo"
    )
    counted = [*rounded(found), found["counted"], *rounded(found["process_group"])]
    hold("docs/benchmarking.md", pattern, "demo.json", counted)


def test_bytes_of_both_plans_in_the_readme() -> None:
    mesh, shape = Mesh((2, 2)), (8, 6)
    program = shardweave.plan(mesh, shape, "float32", "S0 S1", "S1 S0")
    layouts = stock(mesh.shape, False).layouts(shape, program.source, program.target)
    nccl, gloo = (count_stock(mesh, shape, layouts, gloo=gloo).received for gloo in (False, True))
    pattern = r"DTensor receives (\d+) bytes a rank \((\d+) on CPUs.* shardweave receives at most (\d+),"
    hold("README.md", pattern, "(none)", [nccl, gloo, max(program.bytes_received)])


def test_replay_figures_in_getting_started() -> None:
    """The page shows the end of the results page."""
    page = parse_page("", (ROOT / "docs/getting-started.md").read_text(encoding="utf-8"))
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
    assert f"losses equal to the bit, a step in {ours} ms where stock takes {theirs} ms" in text("docs/benchmarking.md")


def test_host_cost_figures() -> None:
    page = (RESULTS / "host_cost.md").read_text(encoding="utf-8")
    found = {case: float(ratio) for case, ratio in re.findall(r"^\| (.+) \| stock \| .+ \| ([\d.]+) \|$", page, re.M)}
    nothing = found.pop("nothing to do")
    assert len(found) == 7
    least, most = min(found.values()), max(found.values())
    times = (
        f"takes {least:.1f} to {most:.1f} times the host time of shardweave's, {nothing:.1f} times where nothing is to"
    )
    assert times in text("docs/dtensor.md")


def test_figures_of_hosts() -> None:
    """Of tensors of 16 MiB, in which at least 1 MB enters a host, and of small ones on hosts a round trip apart."""
    rows = rows_of("hosts.md")
    large = [case for case, who in rows if who == "isend, irecv" and "2048×2048" in case and rows[case, who]["of link"]]
    slow, fast = ([case for case in large if (": 10 Gbit/s" in f": {case}") is at_10] for at_10 in (False, True))
    assert len(slow) == 15 and len(fast) == 4  # and one case in which nothing crosses

    def spread(cases: list[str], who: str, column: str) -> str:
        shares = [int(rows[case, who][column].rstrip("%")) for case in cases]
        return f"{min(shares)} to {max(shares)}%"

    def microseconds(case: str, who: str) -> float:
        return microseconds_of(rows[case, who])

    plain = "isend, irecv"
    longer = max(microseconds(case, "ours") / microseconds(case, plain) for case in slow)
    page = " ".join(text("docs/several-machines.md").split())
    assert (
        f"fill {spread(slow, 'ours', 'of link')} of the rate of the busiest link at 1 Gbit/s; plain `isend` and "
        f"`irecv` of as many bytes, after which the ranks of a machine wait for each other, "
        f"{spread(slow, plain, 'of link')}, in up to {100 * (longer - 1):.0f}% less time"
    ) in page
    assert (
        f"At 10 Gbit/s shardweave fills {spread(fast, 'ours', 'of link')}, with the two cores busy for "
        f"{spread(fast, 'ours', 'cores busy')} of the time, and plain messages {spread(fast, plain, 'of link')} with "
        f"{spread(fast, plain, 'cores busy')}"
    ) in page
    apart = [case for case, who in rows if who == "ours" and case.startswith("20 ms apart: ")]
    *moves, tokens = [rows[case, "ours"]["round trips"].split(" for ") for case in apart]
    assert len(moves) == 4 and all(steps == "1" for _, steps in moves)
    most = max(float(trips) for trips, _ in moves)
    theirs = rows[apart[-1], "torch.distributed"]["round trips"]
    assert (
        f"a small tensor is redistributed in one exchange, within {most:.2f} round trips, and few tokens are "
        f"dispatched and combined in {tokens[0]}, where torch's all-to-alls take {theirs}"
    ) in page
    (few,) = {case for case, _ in rows if case.startswith("10 Gbit/s: T 64, ")}
    by_torch = "torch.distributed", "torch.distributed, SCHED_BATCH"
    ours, theirs, as_ours = (f"{microseconds(few, who) / 1e3:.1f} ms" for who in ("ours", *by_torch))
    costs = " ".join(text("docs/token-dispatch.md").split())
    assert (
        f"64 tokens of 4 KiB at 10 Gbit/s take {ours}, and torch's all-to-alls {as_ours} with gloo's threads "
        f"[scheduled as shardweave does](several-machines.md#busy-cores), {theirs} without"
    ) in costs


def test_figures_of_dispatch() -> None:
    """Beside a bare copy of all rows where there are many tokens, and beside torchtitan's dispatcher."""
    rows = rows_of("dispatch.md")
    cases = list(dict.fromkeys(case for case, _ in rows))
    both = "forward and backward"
    forward, trained = ([case for case in cases if case.endswith(both) is also] for also in (False, True))
    assert (len(forward), len(trained)) == (5, 4)

    def ratios(of: Sequence[str], who: str, to: str) -> list[float]:
        return [microseconds_of(rows[case, who]) / microseconds_of(rows[case, to]) for case in of]

    def many(of: Sequence[str], who: str, digits: int) -> str:
        copies = ratios([case for case in of if int(case.split()[1].rstrip(",")) >= 1024], who, "copy")
        return f"{min(copies):.{digits}f} to {max(copies):.{digits}f}"

    def times(of: Sequence[str]) -> str:
        *first, last = [f"{ratio:.1f}" for ratio in ratios(of, "torchtitan", "ours")]
        return f"{', '.join(first)} and {last}"

    page = text("docs/token-dispatch.md")
    assert (
        f"From T 1024 on forward takes {many(forward, 'ours', 1)} times as long as that copy, and torchtitan's "
        f"dispatcher {many(forward, 'torchtitan', 0)} times."
    ) in page
    assert (
        f"Beside torchtitan's, forward is {times(forward)} times as fast for T 16, 128, 512, 1024 and 4096, and "
        f"forward with backward {times(trained)} times for the last four."
    ) in page


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
