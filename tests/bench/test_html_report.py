"""The report: one well-formed page that loads nothing, with a picture for each thing that was measured."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
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
    assert [element.tag for element in elements].count("svg") == 2 * 3
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
    assert out.read_text().count("<svg") == 3
    with pytest.raises(ArgumentError, match="--out: .*no/report.html' cannot be written"):
        html_report.run([results], tmp_path / "no/report.html")


def starts(browser: str | None) -> bool:
    return browser is not None and subprocess.run([browser, "--version"], capture_output=True).returncode == 0


BROWSER = next(filter(starts, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FAULTS = {  # put into the pictures, and the names of the findings
    "": "",
    "picture.style.width = '150px'": "px high",
    "picture.style.background = 'rgb(120, 120, 120)'": "contrast",
    "picture.querySelector('g[id*=text_]').setAttribute('transform', 'translate(-2000 0)')": "leaves the picture",
    "picture.querySelectorAll('g[id*=text_]').forEach(t => t.after(Object.assign(t.cloneNode(true), {id: 'text_'})))":
        "crosses",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("scheme", "number"), [("dark", 0), ("light", 1)])
def test_pictures_of_the_committed_results_can_be_read(scheme: str, number: int, tmp_path: Path) -> None:
    """Without a word on the console; and with faults put in, to see that they would be seen."""
    results = [read(path, path.name) for path in sorted(RESULTS.glob("*/quick.json"))]
    text = html_report.page(results)
    page, look = tmp_path / "report.html", (Path(__file__).parent / "picture_faults.js").read_text(encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom"]
    command += ["--disable-dev-shm-usage", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1366,2400", f"--blink-settings=preferredColorScheme={number}", page.as_uri()]
    for fault, called in FAULTS.items():
        before = f"for (const picture of document.querySelectorAll('svg')) {{ {fault} }}"
        page.write_text(text.replace("</body>", f"<script>{before} {look}</script></body>"), encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        title = re.search(r"<title>(.*)</title>", done.stdout)
        assert done.returncode == 0 and title is not None and "CONSOLE" not in done.stderr, done.stderr
        seen = json.loads(unescape(title[1]))
        assert seen["texts"] > 50 and (seen["paper"] < 0.1) == (scheme == "dark"), seen
        assert bool(seen["faults"]) == bool(fault) and any(called in one for one in seen["faults"]) == bool(fault), seen
