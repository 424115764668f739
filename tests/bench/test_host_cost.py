"""The benchmark of the host's work runs, and times what it says: nothing is left to torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.plan
def test_every_kind_is_timed() -> None:
    command = [sys.executable, "-m", "shardweave.bench.host_cost", "--rounds", "1", "--calls", "20"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    rows = [line for line in shown.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8 and all(len(row.split("|")) == 6 for row in rows)
