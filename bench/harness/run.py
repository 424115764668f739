"""`python -m shardweave bench SUITE …`: measures suites and prints a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import ArgumentError
from ..suites import ON_REQUEST, SUITES
from .machine import provenance
from .markdown import as_markdown
from .measure import measure, suite
from .writable import check_writable


def run(names: Sequence[str], scale: str, match: str, out: Path | None) -> int:
    """Measure suites and print the tables, with the command, the machine and the commit.

    Args:
        names: of `SUITES` or `ON_REQUEST`; none: all of `SUITES`.
        match: only cases with this in their name.
        out: also write what is printed, Markdown, to this file.

    Returns:
        The exit status: 1 if a result was wrong or could not be measured.

    Raises:
        ArgumentError: an unknown suite, no case with that name, a file that cannot be written.
    """
    for name in names:
        if name not in (*SUITES, *ON_REQUEST):
            allowed = f"{', '.join((*SUITES, *ON_REQUEST))}, or none for all but {', '.join(ON_REQUEST)}"
            raise ArgumentError(f"suite: {name!r}; allowed: {allowed}")
    chosen = list(dict.fromkeys(names)) or list(SUITES)
    check_writable("--out", out)
    cases = {name: [case for case in suite(name).cases(scale) if match in case] for name in chosen}
    if not any(cases.values()):
        raise ArgumentError(f"--match: {match!r} is in no case's name of {', '.join(chosen)}; allowed: part of one")
    results = measure(cases, scale)
    page = as_markdown(results, provenance())
    print(page)
    if out is not None:
        out.write_text(page, encoding="utf-8")
        print(f"written: {out}", file=sys.stderr)
    return int(bool(results.faults or not results.rows))
