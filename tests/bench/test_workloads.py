"""The workloads and their oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardweave import Layout
from shardweave.bench.baselines.stock_dtensor import Unsuitable, held, mesh_for, placements, respell
from shardweave.bench.workloads import load_workloads, scaled_down
from shardweave.runtime.tracing.trace_file import Entry, Trace

pytestmark = pytest.mark.plan


def test_workloads_cover_what_they_claim() -> None:
    workloads = load_workloads()
    assert 20 <= len(workloads) <= 40
    assert {w.model for w in workloads} == {"Llama-3-8B", "DeepSeek-V3 style", "ordered meshes", "uneven"}
    partial = [w for w in workloads if w.partial]
    assert len(partial) >= 4 and {w.dtype for w in partial} == {"float32", "bfloat16"}
    assert any(128257 in w.full_shape for w in workloads) and any(7 in w.full_shape for w in workloads)
    assert len({w.name for w in workloads}) == len(workloads)
    for w in workloads:
        assert len(placements(w.source)) == len(placements(w.target)) == len(w.mesh_names) == len(w.mesh)


@pytest.mark.parametrize(("full", "scaled"), [(4096, 512), (128257, 16033), (14336, 1792), (7, 7), (63, 63), (66, 8)])
def test_scaled_down_keeps_parity(full: int, scaled: int) -> None:
    assert scaled_down(full) == scaled and (full - scaled) % 2 == 0


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8])
def test_held_cuts_as_chunk_does(size: int) -> None:
    whole = torch.arange(size)

    def chunk(x: torch.Tensor, n: int, i: int) -> torch.Tensor:
        parts = x.chunk(n) if len(x) else ()
        return parts[i] if i < len(parts) else x[:0]

    for i in range(2):
        for j in range(3):
            plain = whole[held("S0 S0", (2, 3), [i, j], (size,))[0]]
            assert torch.equal(plain, chunk(chunk(whole, 2, i), 3, j))
            reversed_ = whole[held("S0/3 S0", (2, 3), [i, j], (size,))[0]]
            assert torch.equal(reversed_, chunk(chunk(whole, 3, j), 2, i))


def test_respell_follows_the_mesh() -> None:
    assert respell("S0/2 S0", (2, 2), (2, 4)) == "S0/4 S0"
    with pytest.raises(Unsuitable, match="no shard order"):
        respell("S0/4 S0", (2, 2), (2, 2))
    assert [mesh_for(n) for n in (1, 2, 4, 6, 8, 9)] == [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (3, 3)]


def key(entry: Entry) -> tuple:
    return entry.shape, entry.dtype, entry.source, entry.target


def test_every_case_of_the_demo_is_recorded() -> None:
    """What the hand-written cases say is what a program with layers as a sharding solver places them does."""
    trace = Trace.read(Path(__file__).parents[1] / "cli/traces/solver.json")
    found = {key(entry) for entry in trace.redistributions}
    missing = []
    for case in load_workloads():
        source, target = (str(Layout.parse(text, case.mesh)) for text in (case.source, case.target))
        if (case.full_shape, case.dtype, source, target) not in found:
            missing.append((case.name, case.full_shape, case.dtype, source, target))
    assert not missing
