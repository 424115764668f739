"""The CPU paths of the token kernels as they are where numba is not installed."""

from __future__ import annotations

import pytest

from shardweave.kernels.tokens import combine_rows_cpu, count_pairs_cpu, locate_rows_cpu, push_rows_cpu, weigh_rows_cpu


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test no loop is compiled; what takes their place works on few rows at a time."""
    for module in (combine_rows_cpu, weigh_rows_cpu):
        monkeypatch.setattr(module, "CHUNK", 200)
    for module in (combine_rows_cpu, count_pairs_cpu, locate_rows_cpu, push_rows_cpu, weigh_rows_cpu):
        monkeypatch.setattr(module, "compiled_loop", lambda *args: None)
