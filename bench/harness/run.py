"""`python -m shardweave bench SUITE …`: measures suites, prints a table, and compares it with committed results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import ArgumentError
from ..suites import ON_REQUEST, SUITES
from .compare import THRESHOLD, compare, show
from .machine import kind, machine
from .markdown import as_markdown
from .measure import measure, suite
from .result_file import Results, read
from .writable import check_writable

COMMITTED = Path(__file__).resolve().parents[1] / "results"


def run(
    names: Sequence[str],
    scale: str,
    match: str,
    json_path: Path | None,
    out: Path | None,
    check: bool,
    committed: Path = COMMITTED,
) -> int:
    """Measure suites, print the tables and write the files.

    Args:
        names: of `SUITES` or `ON_REQUEST`; none: all of `SUITES`.
        out: write JSON and Markdown to `<kind of machine>/<scale>` in this folder.
        check: compare with `<kind of machine>/<scale>.json` in `committed`, if there is one.

    Returns:
        The exit status: 1 if a result was wrong or could not be measured, or, with `check`, is slower than the
        committed one beyond noise.

    Raises:
        ArgumentError: an unknown suite, no case with that name, a file that cannot be written.
    """
    for name in names:
        if name not in (*SUITES, *ON_REQUEST):
            allowed = f"{', '.join((*SUITES, *ON_REQUEST))}, or none for all but {', '.join(ON_REQUEST)}"
            raise ArgumentError(f"suite: {name!r}; allowed: {allowed}")
    chosen = list(dict.fromkeys(names)) or list(SUITES)
    check_writable("--json", json_path)
    folder = None if out is None else out / kind(machine())
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"--out: {str(folder)!r} cannot be made: {error}; allowed: a folder") from None
        check_writable("--out", folder / f"{scale}.json")
    cases = {name: [case for case in suite(name).cases(scale) if match in case] for name in chosen}
    if not any(cases.values()):
        raise ArgumentError(f"--match: {match!r} is in no case's name of {', '.join(chosen)}; allowed: part of one")
    options = ["--quick"] * (scale == "quick") + [f"--match {match!r}"] * bool(match)
    results = measure(cases, scale, " ".join(["python -m shardweave bench", *chosen, *options]), match)
    print(as_markdown(results))
    files = {} if json_path is None else {json_path: results.to_json()}
    if folder is not None:
        files |= {folder / f"{scale}.json": results.to_json(), folder / f"{scale}.md": as_markdown(results)}
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)
    slower = check and _is_slower(results, committed / kind(results.machine) / f"{scale}.json")
    return int(bool(slower or results.faults or not results.rows))


def _is_slower(results: Results, baseline: Path) -> bool:
    """Compare with committed results, and measure again what looks slower: other programs on the machine may have
    slowed all rounds of a case."""
    if not baseline.exists():
        print(
            f"Nothing to compare with: there are no committed results of this kind of machine ({baseline.parent.name}, "
            f"{results.scale}).\nTo commit some: python -m shardweave bench"
            f"{' --quick' if results.scale == 'quick' else ''} --out bench/results"
        )
        return False
    before = read(baseline, "baseline")
    print(f"Against {baseline}:\n")
    comparison = compare(before, results, THRESHOLD, subset=True)
    status = show(comparison)
    if not comparison.regressions:
        return bool(status)
    cases: dict[str, list[str]] = {}
    for one in comparison.regressions:
        cases.setdefault(one.row.suite, []).append(one.row.case)
    print("\nOnce more, the cases of these:\n", flush=True)
    again = compare(before, measure(cases, results.scale), THRESHOLD, subset=True)
    # A row that could not be measured again counts as slower.
    once = {one.row.key for one in again.rows if one.verdict != "slower"}
    lasting = [one for one in comparison.regressions if one.row.key not in once]
    for one in lasting:
        print(f"REGRESSED, twice: {one.row.name}: {one.ratio:.2f}")
    if not lasting:
        print("None of them is slower beyond noise once more.")
    return bool(lasting or comparison.failures)
