"""The report of `make gpu`, from the rows that its sections have written so far: JSON and Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardweave.bench.gpu import outcomes
from shardweave.bench.gpu.sections import Section
from shardweave.bench.harness import markdown

STATES = ("passed", "failed", "error", "killed", "skipped", "not reached")
_LINES = 3  # shown of a failure


def write(sections: Sequence[Section], rows: Path, dry: bool) -> dict[str, Any]:
    """Write `gpu.json` and `gpu.md` beside the rows; returns what `section_of` returns, by section."""
    found = list(outcomes.read(rows))
    report = {one.name: section_of(one, found) for one in sections}
    _write_whole(rows.with_name("gpu.json"), json.dumps({"dry": dry, "sections": report}, indent=1))
    lines = ["# Tests and measurements on a GPU", "", *["A dry run: no GPU was used.", ""] * dry]
    heads = ["section", "outcome", *STATES, "seconds of processes"]
    cells = [[name, one["outcome"], *one["tests"].values(), one["seconds"]] for name, one in report.items()]
    lines += [
        *markdown.table(heads, cells),
        "",
        "A test counts in every section that has it, and runs in the first.",
        "",
    ]
    for name, one in report.items():
        lines += lines_of(name, one)
    for name, one in report.items():
        lines += ["", f"## {name}", "", "```", one["output"].strip(), "```"] if one["output"] else []
    _write_whole(rows.with_name("gpu.md"), "\n".join(lines) + "\n")
    return report


def _write_whole(file: Path, text: str) -> None:
    """Write a file all at once: the run may be killed at any time."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def section_of(section: Section, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The outcome of a section: passed, failed, killed, timed out, skipped (every test of it) or not reached; the
    number of its tests in each state, its failures, and why tests were skipped. Tests that another section has run
    count with what they did there."""
    tests: dict[str, str] = {}
    texts: dict[str, str] = {}
    ends, mine = [], set[str]()
    for row in rows:
        name = row.get("test")
        if row["section"] == section.name:
            mine |= {name} if name else set(row.get("selected", ()))
            ends += [row] if "ended" in row else []
        if name and row["outcome"] != "finished" and tests.get(name) not in ("failed", "error"):
            tests[name] = "killed" if row["outcome"] == "started" else row["outcome"]  # until it has ended
            texts[name] = row.get("text", "")
    states = Counter(tests.get(name, "not reached") for name in mine)
    # pytest's exit code 5: no test was left for this process.
    expected = ("exit 0", *(f"exit {code}" for code in (1, 5, outcomes.LOST) if mine))
    wrong = [end for end in ends if end["ended"] not in expected]
    if not ends:
        outcome = "not reached"
    elif any(end["ended"] == "timed out" for end in ends):
        outcome = "timed out"
    elif states["killed"] or any(end["ended"].startswith(("killed", "hung")) for end in ends):
        outcome = "killed"
    elif wrong or states["failed"] or states["error"]:
        outcome = "failed"
    elif states["not reached"]:
        outcome = "not reached"
    else:
        outcome = "passed" if states["passed"] or section.is_python else "skipped"
    failed = [name for name in sorted(mine) if tests.get(name) in ("failed", "error", "killed")]
    return {
        "outcome": outcome,
        "tests": {state: states[state] for state in STATES},
        "seconds": round(sum(end["seconds"] for end in ends), 1),
        "failures": [{"what": name, "how": tests[name], "text": texts[name]} for name in failed]
        + [{"what": section.name, "how": end["ended"], "text": end["text"]} for end in wrong],
        "skipped": dict(Counter(texts[name] for name in mine if tests.get(name) == "skipped")),
        "output": "".join(end["text"] for end in ends) if section.is_python else "",
    }


def lines_of(name: str, found: Mapping[str, Any]) -> list[str]:
    """A section in a few lines: what went wrong, and the number of tests skipped for each reason."""
    counts = ", ".join(f"{number} {state}" for state, number in found["tests"].items() if number)
    lines = [f"- **{name}: {found['outcome']}**" + f" ({counts})" * bool(counts)]
    for failure in found["failures"]:
        text = [line.strip() for line in failure["text"].splitlines() if line.strip()]
        errors = [line for line in text if line.startswith("E ")][:_LINES]  # of a traceback of pytest's
        lines += [f"  - `{failure['what']}`: {failure['how']}", *(f"      {x}" for x in errors or text[-_LINES:])]
    return lines + [f"  - {number} skipped: {why}" for why, number in found["skipped"].items()]
