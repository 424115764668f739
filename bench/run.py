"""`python -m shardweave bench SUITE …`: the suites, a table, result files, and a look at the committed ones."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ArgumentError
from .machine import kind, machine, now
from .markdown import as_markdown
from .measuring import Found, Key, suite
from .result_file import Absent, Fault, Results, read
from .suites import SUITES
from .writable import check_writable

HERE = Path(__file__).resolve().parent
COMMITTED = HERE / "results"


def written(of_suites: Mapping[str, Found], scale: str, command: str, match: str) -> Results:
    """What was found, with the machine and the time."""
    return Results(
        date=now(),
        command=command,
        scale=scale,
        machine=machine(),
        rows=tuple(row for found in of_suites.values() for row in found.rows.values()),
        absent=tuple(
            Absent(name, case, contender, why)
            for name, found in of_suites.items()
            for (case, contender), why in found.absent.items()
        ),
        faults=tuple(
            Fault(name, case, contender, why)
            for name, found in of_suites.items()
            for (case, contender), why in _gone_wrong(found)
        ),
        match=match,
    )


def _gone_wrong(found: Found) -> Iterator[tuple[Key, str]]:
    if found.failed:
        yield ("", ""), found.failed
    yield from found.faults.items()


def run(
    names: Sequence[str],
    scale: str,
    match: str,
    json_path: Path | None,
    out: Path | None,
    check: bool,
    threshold: float,
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
    _check_files(json_path, out)
    cases = {name: [case for case in suite(name).cases(scale) if match in case] for name in chosen}
    if not any(cases.values()):
        raise ArgumentError(f"--match: {match!r} is in no case's name of {', '.join(chosen)}; allowed: part of one")
    command = ["python -m shardweave bench", *chosen, *(["--quick"] if scale == "quick" else [])]
    results, status = _measured(cases, scale)
    if results is None:
        return 1
    command += [f"--match {match!r}"] if match else []
    results = replace(results, command=" ".join(command), match=match)
    about = kind(results.machine)  # type: ignore[arg-type]
    print(as_markdown(results))
    if json_path is not None:
        results.write(json_path, "--json")
    if out is not None:
        folder = out / about
        folder.mkdir(parents=True, exist_ok=True)
        results.write(folder / f"{scale}.json", "--out")
        (folder / f"{scale}.md").write_text(as_markdown(results), encoding="utf-8")
        print(f"written: {folder / scale}.json, {folder / scale}.md", file=sys.stderr)
    if check:
        status = max(status, _checked(results, committed / about / f"{scale}.json", threshold))
    return status


def _measured(cases: Mapping[str, Sequence[str]], scale: str) -> tuple[Results | None, int]:
    """By pytest, in this process; the suites' own processes do the measuring."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        path, wanted = Path(folder, "results.json"), Path(folder, "cases.json")
        wanted.write_text(json.dumps(cases), encoding="utf-8")
        options = ["--scale", scale, "--cases", str(wanted), "--results", str(path)]
        # Of the caller's own pytest settings none holds here. Tables are this command's.
        options += ["-c", os.devnull, "--rootdir", str(HERE.parent), "-p", "no:cacheprovider", "-q", "--no-header"]
        options += ["--benchmark-quiet", "--tb=line", "-W", "ignore::pytest.PytestConfigWarning"]
        files = [str(HERE / "suites" / f"suite_{name}.py") for name, of in cases.items() if of]
        status = pytest.main(["--confcutdir", str(HERE), *options, *files], plugins=[])
        results = read(path, "results") if path.exists() else None
    return results, int(status != 0)


def _check_files(json_path: Path | None, out: Path | None) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise ArgumentError("bench: pytest-benchmark is not installed; allowed: pip install 'shardweave[bench]'")
    check_writable("--json", json_path)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"--out: {str(out)!r} cannot be made: {error}; allowed: a folder") from None


def _checked(results: Results, baseline: Path, threshold: float) -> int:
    from .compare_results import compare, lasting_regressions, show

    if not baseline.exists():
        print(
            f"Nothing to compare with: there are no committed results of this kind of machine ({baseline.parent.name}, "
            f"{results.scale}).\nTo commit some: python -m shardweave bench"
            f"{' --quick' if results.scale == 'quick' else ''} --out bench/results"
        )
        return 0
    before = read(baseline, "baseline")
    print(f"Against {baseline}:\n")
    found = compare(before, results, threshold, subset=True)
    status = show(found)
    if not found.regressions:
        return status
    # What else the machine did meanwhile may have lasted through all rounds of a case: it does not come again.
    cases: dict[str, list[str]] = {}
    for one in found.regressions:
        cases.setdefault(one.row.suite, []).append(one.row.case)
    print("\nOnce more, the cases of these:\n", flush=True)
    again, _ = _measured(cases, results.scale)
    if again is None:
        return 1
    lasting = lasting_regressions(found, compare(before, again, threshold, subset=True))
    for line in lasting:
        print(f"REGRESSED, twice: {line}")
    if not lasting:
        print("None of them is slower beyond noise once more.")
    return int(bool(lasting or found.failures))
