"""The benchmark of the host's work runs, and times what it says: nothing is left to torch."""

from __future__ import annotations

import sys

import pytest
from warm_python import run_python


@pytest.mark.plan
def test_every_kind_is_timed() -> None:
    command = [sys.executable, "-m", "shardweave.bench.suites.host_cost", "--rounds", "1", "--calls", "20"]
    shown = run_python(command, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"`python {' '.join(command[1:])}`, 2") and "commit" in shown.stdout
    rows = [line.split("|")[1:-1] for line in shown.stdout.splitlines() if line.startswith("| ")]
    beside, on_devices = rows[:9], rows[9:]
    assert len(on_devices) == 9 and all(len(row) == 4 for row in beside) and all(len(row) == 7 for row in on_devices)
    # Two of boxes, as much as one exchange takes, and three signals; nothing is launched where there is no GPU.
    launches = {row[0].strip(): (row[2].strip(), int(row[5])) for row in on_devices[1:]}
    assert launches["S0 → S1"] == ("2 + 3", 2) and launches["P → R"][0] == "4 + 6", launches
    # torch copies what a rank keeps of its own.
    assert launches["R → S0"] == ("0 + 0", 0) and launches["nothing to do"] == ("0 + 0", 0), launches
