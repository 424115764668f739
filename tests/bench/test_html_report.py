"""The report: one well-formed page that loads nothing, with a picture for each thing that was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardweave.__main__ import main
from shardweave.bench.harness import html_report
from shardweave.bench.harness.result_file import Missing, Results, read
from shardweave.errors import ArgumentError

pytest.importorskip("matplotlib", reason="the report's pictures are drawn by matplotlib")
from shardweave.bench.harness import charts

pytestmark = pytest.mark.plan
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def committed() -> Results:
    """Committed results, with texts that have to be escaped."""
    results = read(sorted(RESULTS.glob("*/quick.json"))[0], "RESULTS")
    rows = [replace(row, case=row.case.replace("runs of", "<runs>")) for row in results.rows]
    absent, fault = Missing("kernels", "a", "torchao", "no <GPU>"), Missing("host", "a <b>", "ours", "3 differ")
    machine = {**results.machine, "cpu": "A <CPU> & more"}
    return replace(results, machine=machine, rows=rows, absent=[absent], faults=[fault])


def test_page_is_well_formed_and_self_contained() -> None:
    text = html_report.page([committed(), committed()])
    elements = list(ElementTree.fromstring(text).iter())
    assert [element.tag for element in elements].count("svg") == 2 * 2
    ids = [element.attrib["id"] for element in elements if "id" in element.attrib]
    assert len(set(ids)) == len(ids), "two pictures share an id"
    attributes = [item for element in elements for item in element.items()]
    links = [value for name, value in attributes if name in ("href", "src", "srcset", "data", "action")]
    links += [link for _, value in attributes for link in re.findall(r"url\(([^)]*)\)", value)]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    assert "http:" not in text and "https:" not in text and "@import" not in text and "<script" not in text
    assert (
        "A &lt;CPU&gt; &amp; more" in text and "4-byte aligned, &lt;runs&gt; 4 KiB" in text and "no &lt;GPU&gt;" in text
    )
    assert "<ul><li>host: a &lt;b&gt;: ours: 3 differ</li></ul>" in text
    few = replace(committed(), rows=[row for row in committed().rows if row.suite == "host"])
    assert "<svg" not in html_report.page([few])


def test_pictures_have_the_colours_of_the_page() -> None:
    _, body = html_report.page([committed()]).split("</style>", 1)
    painted = set(re.findall(r"(?:fill|stroke)[:=]\s*[\"']?(#\w+|currentColor)", body))
    assert "currentColor" in painted and painted <= {*charts.COLOURS.values(), "currentColor", "#b0b0b0"}  # the grid


def test_report_files(tmp_path: Path) -> None:
    results, out = tmp_path / "r.json", tmp_path / "report.html"
    results.write_text(committed().to_json(), encoding="utf-8")
    assert main(["report", str(results), "-o", str(out)]) == 0
    assert out.read_text().count("<svg") == 2
    with pytest.raises(ArgumentError, match="--out: .*no/report.html' cannot be written"):
        html_report.run([results], tmp_path / "no/report.html")
