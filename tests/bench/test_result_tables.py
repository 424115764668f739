"""Results as Markdown, and where they come from."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from shardweave.bench.harness import machine
from shardweave.bench.harness.markdown import as_markdown, provenance_lines, table_cells
from shardweave.bench.harness.results import Missing, Results, Row

pytestmark = pytest.mark.plan
ROWS = [
    Row("redistribute", "a | b", "ours", (1e-6, 2.5e-6, 4e-6), 100, 100, 0.5, detail={"cold": True}),
    Row("redistribute", "a | b", "stock", (1e-5, 3e-5, 2e-5), 300, 100, 0.05, note="its result is wrong: x"),
    Row("dispatch", "T 16", "ours", (1e-3,)),
]
ABSENT = [Missing("kernels", "a", "torchao", "none")]
FAULTS = [Missing("redistribute", "a | b", "ours, windows", "3 elements\ndiffer"), Missing("host", "", "", "status -9")]
RESULTS = Results("quick", ROWS, ABSENT, FAULTS)


@pytest.mark.parametrize("samples", [(), (-1.0,), (float("nan"),), (float("inf"),)])
def test_rows_refuse_samples_that_are_no_times(samples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        replace(ROWS[0], samples=samples)


def test_as_markdown() -> None:
    text = as_markdown(RESULTS, machine.provenance())
    for part in (
        "| a | b | ours | 2.5 µs | 1.75 to 3.25 |  | 100 | 100 | 50% | cold |",
        "| a | b | stock | 20 µs | 15 to 25 | 8.00 | 300 | 100 | 5% |  |",
        "its result is wrong: x",
        "- kernels: torchao (1 case): none",
        "- redistribute: a | b: ours, windows: 3 elements differ\n- host: status -9\n",
    ):
        assert part in text
    assert "no figure" not in text and "no figure" in as_markdown(replace(RESULTS, scale="dry"), machine.provenance())


@pytest.mark.parametrize(("nbytes", "shown"), [(8_388_608, "89%"), (8_388, "")])
def test_share_of_link(nbytes: int, shown: str) -> None:
    """Of 1 Gbit/s, by 8,388,608 bytes in 75 ms."""
    row = Row("hosts", "a", "ours", (0.075,), bytes=nbytes, detail={"gigabits": 1.0})
    heads, (cells,) = table_cells([row])
    assert dict(zip(heads, cells, strict=True)).get("of link", "") == shown


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/a/python3", "-m", "shardweave", "demo", "--only", "a b"])
    about = machine.provenance()
    assert json.loads(json.dumps(about)) == about and datetime.fromisoformat(about["date"]).tzinfo is not None
    command, _, hardware, versions = provenance_lines(about)
    assert command == f"`python -m shardweave demo --only 'a b'`, {about['date']}."
    assert about["machine"]["cpu"] in hardware and about["machine"]["commit"][:12] in versions
    monkeypatch.setattr(sys, "orig_argv", ["/a/python3", "/a/bin/shardweave", "demo", "-m"])
    monkeypatch.setattr(sys, "argv", ["/a/bin/shardweave", "demo", "-m"])
    assert machine.command_line() == "shardweave demo -m"


def test_last_level_cache_adds_up_caches(tmp_path: Path) -> None:
    for cpu, index, level, size, shared in ((0, 0, 1, 32, "0"), (0, 1, 3, 16384, "0-1"), (2, 0, 1, 32, "2"),
                                            (2, 1, 3, 16384, "2-3"), (3, 1, 3, 16384, "2-3")):  # fmt: skip
        folder = tmp_path / f"cpu{cpu}/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", f"{size}K"), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")
    assert machine.last_level_cache(tmp_path) == 32 << 20
    assert machine.last_level_cache(tmp_path / "none") == 64 << 20


def test_available_memory(tmp_path: Path) -> None:
    meminfo, limits = tmp_path / "meminfo", tmp_path / "cgroup"
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.available_memory(tmp_path / "none", limits) == whole
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:   700 kB\n")
    limits.mkdir()
    for limit, expected in (("max", 700 << 10), (str(300 << 10), 300 << 10)):
        (limits / "memory.max").write_text(f"{limit}\n")
        assert machine.available_memory(meminfo, limits) == expected
