"""Result files: what is written is what is read, and what cannot be is refused by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardweave.bench import machine
from shardweave.bench.markdown import as_markdown, provenance_lines
from shardweave.bench.result_file import VERSION, Absent, Fault, Results, Row, read
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.plan
ABOUT = {"cpu": "AMD EPYC", "cores": 2, "gpus": [], "memory_gib": 24.0, "torch": "2.13.0", "commit": "abc"}
ROWS = (
    Row("redistribute", "a | b", "ours", "µs", (1.0, 2.5, 4.0), 100, 100, 0.5, detail={"rotation": {"cold": True}}),
    Row("redistribute", "a | b", "stock", "µs", (10.0, 30.0, 20.0), 300, 100, 0.05, note="its result is wrong: x"),
    Row("plan", "bytes ÷ bound", "ours", "×", (1.0,), paired=True),
)
RESULTS = Results(
    "2026-01-02T03:04:05+00:00",
    "python -m shardweave bench",
    "quick",
    ABOUT,
    ROWS,
    (Absent("kernels", "a", "torchao", "none"),),
    (Fault("redistribute", "a | b", "ours, windows", "3 elements\ndiffer"), Fault("host", "", "", "ended with -9")),
    "a |",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    RESULTS.write(tmp_path / "r.json", "--json")
    assert read(tmp_path / "r.json", "A") == RESULTS
    written = json.loads((tmp_path / "r.json").read_text())["rows"][0]
    assert (written["median"], written["low"], written["high"]) == (2.5, 1.75, 3.25)
    assert ROWS[2].quartiles == (1.0, 1.0)
    with pytest.raises(ArgumentError, match="--json: .*no/where.json' cannot be written"):
        RESULTS.write(tmp_path / "no/where.json", "--json")


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "r.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError) as caught:
        read(file, "A")
    assert str(caught.value).startswith("A: ") and str(file) in str(caught.value) and "allowed: " in str(caught.value)
    return str(caught.value)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    text = RESULTS.to_json()
    for end in (0, 1, 40, len(text) // 2, len(text) - 3):
        assert "is cut short" in refused(tmp_path, text[:end]), end
    assert "is no JSON" in refused(tmp_path, "a report\nof something")
    assert "is no JSON" in refused(tmp_path, "[" * 100_000)
    assert "is something else" in refused(tmp_path, "[]") and "is something else" in refused(tmp_path, '{"rows": []}')
    assert "is of version 1; allowed: 2" in refused(tmp_path, text.replace(f'"version": {VERSION}', '"version": 1', 1))
    assert "no list of rows" in refused(tmp_path, '{"version": 2}')
    for name, value, said in (
        ("faults", [{"suite": "host"}], "absent or faults lack"),
        ("match", None, "match of"),
        ("scale", "large", "scale of"),
        ("machine", {**ABOUT, "gpus": [80]}, "a list of names"),
    ):
        assert said in refused(tmp_path, json.dumps({**json.loads(text), name: value}))
    nothing = {"rows": [], "absent": [], "faults": []}
    assert "has no rows" in refused(tmp_path, json.dumps({**json.loads(text), **nothing}))
    (tmp_path / "r.json").write_text(json.dumps({**json.loads(text), "rows": []}), encoding="utf-8")
    assert read(tmp_path / "r.json", "A").faults == RESULTS.faults
    without = {name: value for name, value in json.loads(text).items() if name != "faults"}
    assert "absent or faults lack" in refused(tmp_path, json.dumps(without))
    with pytest.raises(ArgumentError, match="A: .*none.json' cannot be read: No such file"):
        read(tmp_path / "none.json", "A")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("samples", [], "samples"),
        ("samples", [1.0, "2"], "samples"),
        ("samples", [-1.0], "samples"),
        ("samples", [0.0], "samples"),
        ("median", None, "median None; allowed: that of the samples, 20"),
        ("median", 0, "median 0"),
        ("high", 21.0, "high 21.0; allowed: that of the samples, 25"),
        ("unit", "GB/s", "unit 'GB/s'"),
        ("case", None, "case is None"),
        ("bytes", "many", "bytes 'many'"),
        ("detail", 3, "detail 3"),
        ("bytes", -1, "bytes -1; allowed: a number from 0 on"),
        ("bytes", 10**400, "bytes 1000"),
        ("samples", [10**400], "samples"),
        ("detail", {"rotation": "warm"}, "rotation of detail is 'warm'"),
        ("detail", {"sweep": "order", "source": "S0", "target": "R"}, "tensor_bytes of detail is None"),
    ],
)
def test_rows_that_are_not_as_they_have_to_be(tmp_path: Path, name: str, value: Any, said: str) -> None:
    given = json.loads(RESULTS.to_json())
    given["rows"][1][name] = value
    assert said in refused(tmp_path, json.dumps(given))


def test_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(RESULTS, rows=(replace(ROWS[0], samples=(float("nan"),)),)).to_json()
    assert "NaN is no number" in refused(tmp_path, RESULTS.to_json().replace("2.5", "NaN"))
    assert "more than once" in refused(tmp_path, replace(RESULTS, rows=(ROWS[0], ROWS[0])).to_json())


def test_results_as_markdown() -> None:
    text = as_markdown(RESULTS)
    assert "| a | b | ours | 2.5 µs | 1.75 to 3.25 |  | 100 | 100 | 50% | cold |" in text
    assert "| a | b | stock | 20 µs | 15 to 25 | 8.00 | 300 | 100 | 5% |  |" in text
    assert (
        "its result is wrong: x" in text and "- kernels: torchao (1 case): none" in text and "AMD EPYC, 2 cores" in text
    )
    wrong = "- redistribute: a | b: ours, windows: 3 elements differ\n- host: ended with -9\n"
    assert f"**Wrong results, and what has none because it failed:**\n\n{wrong}" in text
    assert "Wrong" not in as_markdown(replace(RESULTS, faults=()))
    assert "no figure" not in text and "no figure" in as_markdown(replace(RESULTS, scale="dry"))


def test_machines_of_one_kind(tmp_path: Path) -> None:
    assert machine.kind(ABOUT) == "amd-epyc-2-cores"
    assert machine.kind({**ABOUT, "gpus": ["NVIDIA H200"]}) == "nvidia-h200"
    assert machine.kind({**ABOUT, "gpus": ["NVIDIA H100"] * 8}) == "nvidia-h100-x8"
    here = machine.machine()
    assert json.loads(json.dumps(here)) == here and here["cores"] >= 1 and here["memory_gib"] > 0
    assert here["system"] in as_markdown(replace(RESULTS, machine=here))
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A CPU\nmodel name\t: A CPU\n")
    assert machine.cpu_model(tmp_path / "cpuinfo") == "A CPU" and machine.cpu_model(tmp_path / "none")


def test_results_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/a/python3", "-m", "shardweave", "demo", "--only", "a b"])
    about = machine.provenance()
    assert json.loads(json.dumps(about)) == about and about["machine"] == machine.machine()
    assert datetime.fromisoformat(about["date"]).tzinfo is not None
    command, _, hardware, versions = provenance_lines(about)
    assert command == f"`python -m shardweave demo --only 'a b'`, {about['date']}."
    assert about["machine"]["cpu"] in hardware and about["machine"]["commit"][:12] in versions
    monkeypatch.setattr(sys, "orig_argv", ["/a/python3", "/a/bin/shardweave", "demo", "-m"])
    monkeypatch.setattr(sys, "argv", ["/a/bin/shardweave", "demo", "-m"])
    assert machine.command_line() == "shardweave demo -m"


def test_caches_of_the_last_level_are_added_up(tmp_path: Path) -> None:
    for cpu, caches in {0: ((1, "32K", "0"), (3, "16384K", "0-1")), 2: ((1, "32K", "2"), (3, "16M", "2-3"))}.items():
        for i, (level, size, shared) in enumerate(caches):
            folder = tmp_path / f"cpu{cpu}/cache/index{i}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert machine.last_level_cache(tmp_path) == 32 << 20
    assert machine.last_level_cache(tmp_path / "none") == 64 << 20
