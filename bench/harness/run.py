"""`python -m shardweave bench SUITE …`: the suites under pytest-benchmark, a table, and the committed ones beside."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import ArgumentError
from ..suites import SUITES
from .compare import THRESHOLD, compare, named, show
from .machine import kind
from .markdown import as_markdown
from .measure import suite
from .result_file import Results, read
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
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise ArgumentError("bench: pytest-benchmark is not installed; allowed: pip install 'shardweave[bench]'")
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
    results, status, text = _measured(cases, scale, command, match)
    if results is None:
        return 1
    print(as_markdown(results))
    about = kind(results.machine)
    written = {} if json_path is None else {json_path: text}
    if out is not None:
        (out / about).mkdir(exist_ok=True)
        written |= {out / about / f"{scale}.json": text, out / about / f"{scale}.md": as_markdown(results)}
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)
    return max(status, _checked(results, committed / about / f"{scale}.json") if check else 0)


def _measured(
    cases: Mapping[str, Sequence[str]], scale: str, command: str = "", match: str = ""
) -> tuple[Results | None, int, str]:
    """By pytest, in this process; the suites' own processes do the measuring. Results, status, and the JSON."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        path, wanted = Path(folder, "results.json"), Path(folder, "cases.json")
        wanted.write_text(json.dumps(cases), encoding="utf-8")
        options = ["--scale", scale, "--cases", str(wanted), "--benchmark-json", str(path)]
        # Of the caller's own pytest settings none holds here. Tables are this command's.
        options += ["-c", os.devnull, "--rootdir", str(HERE.parent), "-p", "no:cacheprovider", "-q", "--no-header"]
        options += ["--benchmark-quiet", "--tb=line", "-W", "ignore::pytest.PytestConfigWarning"]
        files = [str(HERE / "suites" / f"suite_{name}.py") for name, of in cases.items() if of]
        status = pytest.main(["--confcutdir", str(HERE), *options, *files], plugins=[])
        if not path.exists() or not path.stat().st_size:  # nothing has a row; why is above
            return None, 1, ""
        given = {**json.loads(path.read_text(encoding="utf-8")), "command": command, "match": match}
        text = json.dumps(given, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        return read(path, "results"), int(status != 0), text


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
    again, *_ = _measured(cases, results.scale)
    if again is None:
        return 1
    second = {one.row.key: one for one in compare(before, again, THRESHOLD, subset=True).rows}
    lasting = [one for one in found.regressions if one.row.key not in second or second[one.row.key].verdict == "slower"]
    for one in lasting:
        ratios = [f"{c.ratio:.2f}" for c in (one, second.get(one.row.key)) if c is not None]
        print(f"REGRESSED, twice: {named(one.row)}: {', '.join(ratios)}")
    if not lasting:
        print("None of them is slower beyond noise once more.")
    return int(bool(lasting or found.failures))
