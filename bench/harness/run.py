"""`python -m shardweave bench SUITE …`: measures suites, prints a table, and compares it with committed results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import ArgumentError
from ..suites import SUITES
from .compare import THRESHOLD, compare, named, show
from .machine import kind, machine, now
from .markdown import as_markdown
from .measure import measured, suite
from .result_file import Missing, Results, Row, read
from .writable import check_writable

HERE = Path(__file__).resolve().parents[1]
COMMITTED = HERE / "results"


def run(
    names: Sequence[str],
    scale: str,
    match: str,
    json_path: Path | None,
    out: Path | None,
    check: bool,
    committed: Path = COMMITTED,
) -> int:
    """Measure suites, show the table, write the files; 1 where a result was wrong, could not be measured, or, with
    `check`, is slower than the committed one beyond noise.

    Args:
        names: of `SUITES`; none: all.
        out: a folder: `<kind of machine>/<scale>.json` and `.md` go there.
        check: compare with `<kind of machine>/<scale>.json` in `committed`; says so where there is none.

    Raises:
        ArgumentError: a suite that there is not, no case with that name, a file that cannot be written.
    """
    for name in names:
        if name not in SUITES:
            raise ArgumentError(f"suite: {name!r}; allowed: {', '.join(SUITES)}, or none for all of them")
    chosen = list(dict.fromkeys(names)) or list(SUITES)
    check_writable("--json", json_path)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"--out: {str(out)!r} cannot be made: {error}; allowed: a folder") from None
    cases = {name: [case for case in suite(name).cases(scale) if match in case] for name in chosen}
    if not any(cases.values()):
        raise ArgumentError(f"--match: {match!r} is in no case's name of {', '.join(chosen)}; allowed: part of one")
    options = ["--quick"] * (scale == "quick") + [f"--match {match!r}"] * bool(match)
    command = " ".join(["python -m shardweave bench", *chosen, *options])
    results = _measured(cases, scale, command, match)
    print(as_markdown(results))
    about = kind(results.machine)
    written = {} if json_path is None else {json_path: results.to_json()}
    if out is not None:
        (out / about).mkdir(exist_ok=True)
        written |= {out / about / f"{scale}.json": results.to_json(), out / about / f"{scale}.md": as_markdown(results)}
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)
    slower = check and _checked(results, committed / about / f"{scale}.json")
    return int(bool(slower or results.faults or not results.rows))


def _measured(cases: Mapping[str, Sequence[str]], scale: str, command: str = "", match: str = "") -> Results:
    """Measures each suite in a process of its own."""
    rows: list[Row] = []
    absent: list[Missing] = []
    faults: list[Missing] = []
    for name, selected in cases.items():
        if selected:
            found = measured(name, selected, scale)
            rows += found.rows.values()
            absent += (Missing(name, *key, why) for key, why in found.absent.items())
            faults += (Missing(name, *key, why) for key, why in found.all_faults().items())
    return Results(now(), command, scale, machine(), tuple(rows), tuple(absent), tuple(faults), match)


def _checked(results: Results, baseline: Path) -> int:
    if not baseline.exists():
        print(
            f"Nothing to compare with: there are no committed results of this kind of machine ({baseline.parent.name}, "
            f"{results.scale}).\nTo commit some: python -m shardweave bench"
            f"{' --quick' if results.scale == 'quick' else ''} --out bench/results"
        )
        return 0
    before = read(baseline, "baseline")
    print(f"Against {baseline}:\n")
    found = compare(before, results, THRESHOLD, subset=True)
    status = show(found)
    if not found.regressions:
        return status
    # What else the machine did meanwhile may have lasted through all rounds of a case: it does not come again.
    cases: dict[str, list[str]] = {}
    for one in found.regressions:
        cases.setdefault(one.row.suite, []).append(one.row.case)
    print("\nOnce more, the cases of these:\n", flush=True)
    again = _measured(cases, results.scale)
    second = {one.row.key: one for one in compare(before, again, THRESHOLD, subset=True).rows}
    lasting = [one for one in found.regressions if one.row.key not in second or second[one.row.key].verdict == "slower"]
    for one in lasting:
        ratios = [f"{c.ratio:.2f}" for c in (one, second.get(one.row.key)) if c is not None]
        print(f"REGRESSED, twice: {named(one.row)}: {', '.join(ratios)}")
    if not lasting:
        print("None of them is slower beyond noise once more.")
    return int(bool(lasting or found.failures))
