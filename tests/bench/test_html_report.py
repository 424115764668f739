"""The report: one well-formed page that loads nothing, with a picture for each thing that was measured."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardweave.__main__ import main
from shardweave.bench import html_report
from shardweave.bench.projection_rows import Row as Projected
from shardweave.bench.result_file import Absent, Fault, Results, Row, read
from shardweave.bench.theme import THEME, standalone
from shardweave.errors import ArgumentError

pytest.importorskip("matplotlib", reason="the report's pictures are drawn by matplotlib")
from matplotlib.figure import Figure

from shardweave.bench import pictures

pytestmark = pytest.mark.plan
RESULTS = Path(__file__).parents[2] / "bench" / "results"
ABOUT = {"cpu": "A <CPU> & more", "cores": 2, "gpus": [], "torch": "2.13.0", "commit": "abc"}
_EMPTY = {"meta", "br", "hr", "img", "link", "input"}


def sweep(contender: str, factor: float) -> list[Row]:
    return [
        Row("redistribute", f"all-gather {n}×{n}", contender, "µs", (factor * n, factor * n * 1.1), n * n, n * n, 0.5,
            detail={"sweep": "all-gather", "source": "S0", "target": "R", "tensor_bytes": 4 * n * n})
        for n in (64, 256, 1024)
    ]  # fmt: skip


def everything() -> Results:
    rows = [*sweep("ours", 1.0), *sweep("stock", 9.0), *sweep("copy", 0.3)]
    rows += [Row("redistribute", "llama/<wq>", side, "µs", (t, t * 2)) for side, t in (("ours", 5.0), ("stock", 60.0))]
    rows += [Row("kernels", "copy, 64 B", side, "µs", (t,), 1 << 20, 1 << 20, 1 / t) for side, t in
             (("ours", 2.0), ("index_select", 3.0), ("copy", 1.0))]  # fmt: skip
    rows += [Row("dispatch", "T 16", side, "µs", (t,)) for side, t in (("ours", 2.0), ("torch.distributed", 9.0))]
    rows += [Row("host", "S0 → R", side, "µs", (t,)) for side, t in (("ours", 40.0), ("stock", 80.0))]
    rows += [Row("plan", "bytes ÷ bound, even", side, "×", s, paired=True) for side, s in
             (("ours", (1.0, 1.0)), ("stock, greedy", (2.0, 7.5)), ("stock, graph", (1.0, 3.0)))]  # fmt: skip
    return Results(
        "2026-01-02T03:04:05",
        "bench --quick",
        "quick",
        ABOUT,
        tuple(rows),
        (Absent("kernels", "a", "torchao", "no <GPU>"),),
    )


def projection() -> dict[str, Any]:
    rows = [
        {"workload": "Llama", "case": case, "topology": topology, "ranks": n, "mesh": f"{n} (tp)", "calls": calls,
         "ours_us": 1.0 * n, "stock_us": 3.0 * n, "ours_bytes": 1, "stock_bytes": 2}
        for case, calls in (("a", 2), ("b", 5)) for topology in ("flat", "nodes of 8") for n in (8, 1024, 131072)
    ]  # fmt: skip
    return {"version": 1, "command": "python -m shardweave.bench.projection", "machine": {}, "rows": rows}


def projected() -> dict[str, Any]:
    return {**projection(), "rows": [Projected(**row) for row in projection()["rows"]]}


class Page(HTMLParser):
    """Elements opened and closed in order, ids, links and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _EMPTY:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[n] for n in ("href", "src", "srcset", "data", "action", "xlink:href") if n in given]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(given.values()))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    text = html_report.page([everything(), everything()], projected())
    page = Page(text)
    assert page.tags.count("svg") == 2 * 6 + 1
    assert len(set(page.ids)) == len(page.ids), "two pictures share a name"
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "http:" not in text and "https:" not in text and "@import" not in text and "<script" not in text
    assert "A &lt;CPU&gt; &amp; more" in text and "llama/&lt;wq&gt;" in text and "no &lt;GPU&gt;" in text


def test_what_went_wrong_is_on_the_page() -> None:
    wrong = (Fault("kernels", "a <b>", "ours", "3 differ"), Fault("host", "", "", "ended with -9"))
    text = html_report.page([replace(everything(), faults=wrong)])
    Page(text)
    assert "<li>kernels: a &lt;b&gt;: ours: 3 differ</li><li>host: ended with -9</li>" in text
    assert 'class="wrong"' in text and 'class="wrong"' not in html_report.page([everything()])


def test_pictures_are_coloured_by_the_style_sheet() -> None:
    text = html_report.page([everything()], projected())
    style, body = text.split("</style>")
    names = set(re.findall(r"var\(--(\w+)\)", body))
    assert names >= {"ink", "muted", "grid", "ours", "stock", "ceiling"}
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for name in names | set(pictures.NAMES):
        assert f"--{name}: #" in light and f"--{name}: #" in dark, name
    # Nothing is left in a colour of its own: it would be lost on one of the backgrounds.
    assert not re.findall(r"(?:fill|stroke)[:=]\s*[\"']?#[0-9a-f]{3,6}", body)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_colours_stand_out_on_both_backgrounds() -> None:
    for theme in THEME.split("@media (prefers-color-scheme: dark)"):
        colours = dict(re.findall(r"--(\w+): #([0-9a-f]{6})", theme))
        page = _luminance(colours["page"])
        for name, least in {"ink": 7.0, "muted": 4.5, "ours": 4.5, "stock": 4.5, "other": 4.5, "other2": 4.5,
                            "ceiling": 4.5, "ours2": 3.0}.items():  # fmt: skip
            lighter, darker = sorted((_luminance(colours[name]), page), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= least, name


def test_what_was_not_measured_has_no_picture() -> None:
    few = replace(everything(), rows=tuple(row for row in everything().rows if row.suite == "host"))
    text = html_report.page([few])
    page = Page(text)
    assert page.tags.count("svg") == 1 and "No projection was given" in text
    assert Page(html_report.page([replace(few, rows=(), scale="dry")])).tags.count("svg") == 0
    empty = html_report.page([few], {**projection(), "rows": []})
    assert "None of its rows has both sides" in empty


def drawn_by_ranks(rows: Sequence[Projected], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """The points of the picture's lines, by their labels."""
    lines: dict[str, list[tuple[float, float]]] = {}

    def seen(figure: Figure, name: str, about: str) -> str:
        for ax in figure.axes:
            title = ax.get_title("left")
            lines.update({f"{title}, {one.get_label()}": list(map(tuple, one.get_xydata())) for one in ax.lines})
        return "<svg>"

    monkeypatch.setattr(pictures, "themed", seen)
    assert pictures.cost_against_ranks(rows) == "<svg>"
    return lines


def test_axes_of_less_than_a_decade_have_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def seen(figure: Figure, name: str, about: str) -> str:
        for ax in figure.axes:
            low, high = ax.get_ylim()
            found.append(sum(low <= tick <= high for tick in ax.get_yticks()))
        return "<svg>"

    monkeypatch.setattr(pictures, "themed", seen)
    pictures.cost_against_ranks([replace(row, ours_us=row.ranks + 3e5, stock_us=3e5) for row in projected()["rows"]])
    assert found and min(found) >= 2


def test_a_picture_stands_alone() -> None:
    svg = standalone(pictures.cost_against_ranks(projected()["rows"]) or "")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    named = set(re.findall(r"var\(--(\w+)\)", svg))
    assert {"ink", "ours", "stock"} <= named <= set(re.findall(r"--(\w+): #", svg))


def test_cost_over_ranks_is_of_all_calls_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 calls of one case and 5 of the other, which is not there on the fewest ranks."""
    rows = [row for row in projected()["rows"] if row.case == "a" or row.ranks > 8]
    lines = drawn_by_ranks(rows, monkeypatch)
    assert len(lines) == 4
    for topology in ("flat", "nodes of 8"):
        for side, us in (("ours", 1), ("stock", 3)):
            expected = [(n, calls * us * n / 1e3) for n, calls in ((8, 2), (1024, 7), (131072, 7))]
            assert lines[f"Llama, {side}, {topology}"] == [pytest.approx(point) for point in expected]


def test_cost_over_ranks_is_what_the_committed_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(pictures.__file__).with_name("results") / "projection"
    lines = drawn_by_ranks(html_report.read_projection(folder / "projection.json")["rows"], monkeypatch)
    table = (folder / "projection.md").read_text(encoding="utf-8").split("| workload | topology |")[1].split("\n\n")[0]
    compared = 0
    for line in table.splitlines()[2:]:
        workload, topology, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        pairs = [tuple(map(float, cell.split(" / "))) for cell in cells if cell != "-"]
        for place, side in enumerate(("ours", "stock")):
            ms = [y for _, y in lines[f"{workload}, {side}, {topology}"]]
            assert ms == pytest.approx([pair[place] for pair in pairs], abs=0.051)
            compared += len(ms)
    assert compared > 100


def test_files_in_and_out(tmp_path: Path) -> None:
    given, file, out = tmp_path / "r.json", tmp_path / "projection.json", tmp_path / "report.html"
    everything().write(given, "--json")
    file.write_text(json.dumps(projection()))
    options = ["-o", str(out), "--projection", str(file), "--markdown", str(tmp_path / "r.md")]
    assert main(["report", str(given), *options]) == 0
    assert Page(out.read_text()).tags.count("svg") == 7 and "## plan" in (tmp_path / "r.md").read_text()
    row = projection()["rows"][0]
    for change, said in (
        ({"version": 2}, "of version 2"),
        ({"rows": [{n: v for n, v in row.items() if n != "calls"}]}, "lacks one of workload.*calls"),
        ({"rows": [{**row, "calls": None}]}, "calls of a row .* is None"),
        ({"rows": [{**row, "calls": 10**400}]}, "calls of a row .* is 1000"),
        ({"rows": [{**row, "ours_us": -1.0}]}, "ours_us of a row .* is -1"),
        ({"rows": [{**row, "ranks": 0}]}, "ranks of a row .* is 0"),
    ):
        file.write_text(json.dumps({**projection(), **change}))
        with pytest.raises(ArgumentError, match=f"--projection: .*{said}"):
            html_report.read_projection(file)
    file.write_text(json.dumps(projection())[:200])
    with pytest.raises(ArgumentError, match="--projection: .*is cut short"):
        html_report.read_projection(file)
    with pytest.raises(ArgumentError, match="--out: .*no/report.html' cannot be written"):
        html_report.run([given], tmp_path / "no/report.html", None, None)
    with pytest.raises(ArgumentError, match="--markdown: .*no/r.md' cannot be written"):
        html_report.run([given], out, None, tmp_path / "no/r.md")


def starts(browser: str | None) -> bool:
    return browser is not None and subprocess.run([browser, "--version"], capture_output=True).returncode == 0


BROWSER = next(filter(starts, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FAULTS = {  # in what is shown, and what each is called
    "": "",
    "picture.style.width = '150px'": "px high",
    "picture.style.background = 'rgb(120, 120, 120)'": "contrast",
    "picture.querySelector('g[id*=text_]').setAttribute('transform', 'translate(-2000 0)')": "leaves the picture",
    "picture.querySelectorAll('g[id*=text_]').forEach(t => t.after(Object.assign(t.cloneNode(true), {id: 'text_'})))":
        "crosses",
}  # fmt: skip
_has_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def in_a_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Chromium takes a second for each page it shows, and these tests show thirty."""
    return pytest.mark.long(_has_browser(test))


def show(page: Path, *options: str) -> tuple[str, str]:
    """What headless Chromium says of a page, and the page's title once its scripts have run."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--disable-dev-shm-usage", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.with_suffix('.profile')}", "--dump-dom", *options]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    title = re.search(r"<title>(.*)</title>", done.stdout)
    assert title is not None, done.stderr
    return done.stderr, unescape(title[1])


@in_a_browser
def test_the_console_is_heard(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for script, heard in (("console.error('said')", True), ("nothing.there", True), ("1", False)):
        page.write_text(f"<title>a page</title><script>{script}</script>", encoding="utf-8")
        said, _ = show(page)
        assert ("CONSOLE" in said) == heard


@in_a_browser
def test_nothing_is_wider_than_the_window(tmp_path: Path) -> None:
    """Tables scroll by themselves. An element that is too wide is put in to see that it would be seen."""
    results = replace(everything(), command="bench " + "--json=" + "a" * 300, faults=(Fault("a", "b" * 300, "c", "d"),))
    text = html_report.page([results], projected())
    page, tell = tmp_path / "report.html", "<script>document.title = document.documentElement.scrollWidth</script>"
    for width in (1366, 600):
        for more in ("", f'<div style="width: {width + 300}px">wide</div>'):
            page.write_text(text.replace("</body>", f"{more}{tell}</body>"), encoding="utf-8")
            _, found = show(page, f"--window-size={width},2400")
            assert (int(found) > width) == bool(more), (found, width, more)


def committed() -> str:
    """The page of what is committed."""
    results = [read(path, path.name) for path in sorted(RESULTS.glob("*/quick.json"))]
    assert results
    return html_report.page(results, html_report.read_projection(RESULTS / "projection" / "projection.json"))


def invented() -> str:
    return html_report.page([everything()], projected())


@in_a_browser
@pytest.mark.parametrize("made", [committed, invented])
@pytest.mark.parametrize(("scheme", "number"), [("dark", 0), ("light", 1)])
def test_its_pictures_can_be_read(made: Callable[[], str], scheme: str, number: int, tmp_path: Path) -> None:
    """Without a word on the console; and with faults put in, to see that they would be seen."""
    page, look = tmp_path / "report.html", (Path(__file__).parent / "picture_faults.js").read_text(encoding="utf-8")
    text, light = made(), f"--blink-settings=preferredColorScheme={number}"
    for fault, called in FAULTS.items():
        before = f"for (const picture of document.querySelectorAll('svg')) {{ {fault} }}"
        page.write_text(text.replace("</body>", f"<script>{before} {look}</script></body>"), encoding="utf-8")
        said, found = show(page, "--window-size=1366,2400", light)
        assert "CONSOLE" not in said, said
        seen = json.loads(found)
        assert seen["texts"] > 50 and (seen["paper"] < 0.1) == (scheme == "dark"), seen
        assert bool(seen["faults"]) == bool(fault) and any(called in one for one in seen["faults"]) == bool(fault), seen
