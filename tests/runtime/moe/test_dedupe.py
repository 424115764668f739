"""Token dispatch in which a token crosses once for each rank: bitwise equal to once for each expert, and what crosses."""

from __future__ import annotations

import pytest
from rank_processes import interpreted, run_ranks
from test_processes import rounds_of, virtual_rounds
from test_windows import digest

from shardweave import kernels
from shardweave.kernels.signal import signal_kernel

pytestmark = pytest.mark.multi


def deduped(rank: int) -> list[bytes]:
    return rounds_of(rank, "symmetric_memory", dedupe=True)


def test_equals_virtual_ranks() -> None:
    assert run_ranks(deduped, 3) == virtual_rounds(3)


def in_the_interpreter(rank: int) -> str:
    assert kernels.interpreted(signal_kernel)
    return digest(rounds_of(rank, "symmetric_memory", rounds=2, dedupe=True))


def test_interpreted_kernels_equal_virtual_ranks() -> None:
    virtual = "[t.digest(rounds) for rounds in t.virtual_rounds(2, rounds=2)]"
    assert interpreted("test_dedupe", f"t.run_ranks(t.in_the_interpreter, 2) == {virtual}") == "True"
