"""The workloads and their oracle; the committed traces: they load, and the programs still make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardweave import Layout
from shardweave.bench.baselines.stock_dtensor import Unsuitable, held, mesh_for, placements, respell
from shardweave.bench.workloads import load_workloads, scaled_down
from shardweave.bench.workloads.record_workloads import RECORDED, WORKLOADS, llama, main, recorded, solver
from shardweave.bench.workloads.solver_program import SolverSizes
from shardweave.bench.workloads.transformer import Sizes
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


TRACES = {name: Trace.read(RECORDED / f"{name}.json") for name in WORKLOADS}
_LLAMA = Sizes(2, 64, 8, 4, 96, 128, 10_000.0)
_SMALL: dict[str, tuple[Callable[[DeviceMesh], None], dict[str, int]]] = {
    "llama3_8b": (lambda mesh: llama(mesh, _LLAMA, 16), {"replicas": 2, "dp": 2, "tp": 2}),
    "solver": (
        lambda mesh: solver(mesh, SolverSizes(32, 64, 8, 4, 96, 64, 8, 32, 16, 2, 64, 37, 7)),
        {"dp": 2, "tp": 2},
    ),
}


def kinds(trace: Trace) -> set[tuple]:
    return {
        (e.mesh.names, e.dtype, len(e.shape), e.source, e.target, e.where.split(" ")[0] == "FSDP")
        for e in trace.redistributions
    }


@pytest.mark.parametrize("name", _SMALL)
def test_small_models_record_equal_kinds(name: str) -> None:
    small = recorded(*_SMALL[name])
    assert kinds(small) == kinds(TRACES[name]) and not small.left_out


def test_calls_and_sizes_are_of_whole_models() -> None:
    """By what is known of the models."""
    for name, layers, width, kv, hidden in (
        ("llama3_8b", 32, 4096, 1024, 14336),
        ("llama3_70b", 80, 8192, 1024, 28672),
    ):
        found = TRACES[name].redistributions
        weights = 2 * width * (width + kv) + 3 * width * hidden
        block = weights // 8 + 2 * width  # norms are whole on every rank along tp
        gathers = {e: c for e, c in found.items() if e.where.startswith("FSDP gathers blocks.*")}
        assert {e.shape for e in gathers} == {(block,)} and sum(c.calls for c in gathers.values()) == 2 * layers
        reduces = {e: c for e, c in found.items() if e.where.startswith("FSDP reduces blocks.*")}
        assert [(e.shape, e.dtype, c.calls) for e, c in reduces.items()] == [((block,), "float32", layers)]
        scattered = sum(c.calls for e, c in found.items() if (e.source, e.target) == ("P", "S1"))
        # wo and w2 of each block and the embedding; backward what each block and the output gather.
        assert scattered == 2 * (2 * layers + 1)


def key(entry: Entry) -> tuple:
    return entry.shape, entry.dtype, entry.source, entry.target


def test_every_case_of_the_demo_is_recorded() -> None:
    """One source of truth: what the hand-written cases say is what the solver's program does, on a mesh of any size."""
    found = {key(entry) for entry in TRACES["solver"].redistributions}
    missing = []
    for case in load_workloads():
        source, target = (str(Layout.parse(text, case.mesh)) for text in (case.source, case.target))
        if (case.full_shape, case.dtype, source, target) not in found:
            missing.append((case.name, case.full_shape, case.dtype, source, target))
    assert not missing


def test_unknown_workload_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["nothing"]) == 2 and "allowed: llama3_8b" in capsys.readouterr().err
