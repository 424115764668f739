"""The report of `make gpu`, Markdown, from the rows that its sections have written so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardweave.bench.gpu import outcomes
from shardweave.bench.gpu.sections import Section
from shardweave.bench.harness import markdown

STATES = ("passed", "failed", "error", "killed", "skipped", "not reached")
_LINES = 3  # shown of a failure


@dataclass
class Found:
    """What a section has come to.

    Attributes:
        outcome: passed, failed, killed, timed out, skipped (every test of it) or not reached.
        tests: the number of its tests in each state; those that another section has run count too.
        failures: for each test or process that went wrong: what, how, and the text of its error.
        skipped: how many tests were skipped, by reason.
        output: of a program.
    """

    outcome: str = "not reached"
    tests: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    output: str = ""


def write(sections: Sequence[Section], rows: Path, dry: bool) -> dict[str, Found]:
    """Write `gpu.md` beside the rows; returns what each section has come to."""
    written = list(outcomes.read(rows))
    found = {one.name: found_of(one, written) for one in sections}
    lines = ["# Tests and measurements on a GPU", "", *["A dry run: no GPU was used.", ""] * dry]
    cells = [[name, one.outcome, *(one.tests[state] for state in STATES), f"{one.seconds:.1f}"]
             for name, one in found.items()]  # fmt: skip
    lines += [*markdown.table(["section", "outcome", *STATES, "seconds of processes"], cells), ""]
    lines += ["A test counts in every section that has it, and runs in the first.", ""]
    for name, one in found.items():
        lines += lines_of(name, one)
    for name, one in found.items():
        lines += ["", f"## {name}", "", one.output.strip()] if one.output else []  # which is Markdown
    part = rows.with_name("gpu.md.part")  # the run may be killed at any time
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(rows.with_name("gpu.md"))
    return found


def found_of(section: Section, rows: Sequence[dict[str, Any]]) -> Found:
    of_tests = outcomes.ends(rows)
    states = {name: "killed" if outcome == "started" else outcome for name, (outcome, _) in of_tests.items()}
    texts = {name: text for name, (_, text) in of_tests.items()}
    ends, mine = [], set[str]()
    for row in rows:
        if row["section"] == section.name:
            mine |= {row["test"]} if "test" in row else set(row.get("selected", ()))
            ends += [row] if "ended" in row else []
    tests = Counter(states.get(name, "not reached") for name in mine)
    # pytest's exit code 5: no test was left for this process.
    expected = ("exit 0", *(f"exit {code}" for code in (1, 5, outcomes.LOST) if mine))
    wrong = [end for end in ends if end["ended"] not in expected]
    if not ends:
        outcome = "not reached"
    elif any(end["ended"] == "timed out" for end in ends):
        outcome = "timed out"
    elif tests["killed"] or any(end["ended"].startswith(("killed", "hung")) for end in ends):
        outcome = "killed"
    elif wrong or tests["failed"] or tests["error"]:
        outcome = "failed"
    elif tests["not reached"]:
        outcome = "not reached"
    else:
        outcome = "passed" if tests["passed"] or section.is_python else "skipped"
    failed = [name for name in sorted(mine) if states.get(name) in ("failed", "error", "killed")]
    return Found(
        outcome,
        tests,
        sum(end["seconds"] for end in ends),
        [*((name, states[name], texts[name]) for name in failed),
         *((section.name, end["ended"], end["text"]) for end in wrong)],
        Counter(texts[name] for name in mine if states.get(name) == "skipped"),
        "".join(end["text"] for end in ends) if section.is_python else "",
    )  # fmt: skip


def lines_of(name: str, found: Found) -> list[str]:
    """A section in a few lines: what went wrong, and the number of tests skipped for each reason."""
    counts = ", ".join(f"{found.tests[state]} {state}" for state in STATES if found.tests[state])
    lines = [f"- **{name}: {found.outcome}**" + f" ({counts})" * bool(counts)]
    for what, how, full in found.failures:
        text = [line.strip() for line in full.splitlines() if line.strip()]
        errors = [line for line in text if line.startswith("E ")][:_LINES]  # of a traceback of pytest's
        lines += [f"  - `{what}`: {how}", *(f"      {line}" for line in errors or text[-_LINES:])]
    return lines + [f"  - {number} skipped: {why}" for why, number in found.skipped.items()]
