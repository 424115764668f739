"""The CPU paths of the token kernels where nothing can be compiled."""

from __future__ import annotations

import pytest

from shardweave.kernels.tokens import combine_rows_cpu, count_pairs_cpu, locate_rows_cpu, push_rows_cpu, weigh_rows_cpu

LOOPS = {
    combine_rows_cpu: ("_sums_loop", "_values_loop"),
    count_pairs_cpu: ("_counts_loop",),
    locate_rows_cpu: ("_locations_loop",),
    push_rows_cpu: ("_pushes_loop",),
    weigh_rows_cpu: ("_weighs_loop",),
}


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test no loop is compiled; what takes their place works on few rows at a time."""
    for module in (combine_rows_cpu, weigh_rows_cpu):
        monkeypatch.setattr(module, "CHUNK", 200)
    for module, names in LOOPS.items():
        for name in names:
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, lambda *args: None)
