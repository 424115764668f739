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


_GRID = "#b0b0b0"


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_pictures_contrast_with_light_and_dark_pages() -> None:
    for colour in charts.COLOURS.values():
        assert all(contrast(colour, page) >= 3 for page in ("#ffffff", "#121212")), colour
    _, body = html_report.page([committed()]).split("</style>", 1)
    painted = set(re.findall(r"(?:fill|stroke)[:=]\s*[\"']?(#\w+|currentColor)", body))
    assert "currentColor" in painted and painted <= {*charts.COLOURS.values(), "currentColor", _GRID}


def test_report_files(tmp_path: Path) -> None:
    results, out = tmp_path / "r.json", tmp_path / "report.html"
    results.write_text(committed().to_json(), encoding="utf-8")
    assert main(["report", str(results), "-o", str(out)]) == 0
    assert out.read_text().count("<svg") == 2
    with pytest.raises(ArgumentError, match="--out: .*no/report.html' cannot be written"):
        html_report.run([results], tmp_path / "no/report.html")
