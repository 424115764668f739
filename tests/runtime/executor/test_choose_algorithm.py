"""The algorithm of each step and its reason, equal on all members; the number of kernels."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from test_simulate import integers, oracle, poison, prove  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.__main__ import main
from shardweave.errors import ArgumentError, DisagreementError
from shardweave.planner import Exchange, Mesh
from shardweave.runtime.executor.choose_algorithm import AssumedTransport, choose_algorithm
from shardweave.runtime.transports.backend_limits import BACKENDS

MESH = Mesh((2, 2))


@pytest.mark.plan
@pytest.mark.parametrize(
    ("source", "target", "shape", "backend", "reduction", "algorithm"),
    [
        ("S0 R", "R R", (8, 6), "gloo", "fast", "all-to-all"),
        ("S0 R", "R R", (8, 6), "nccl", "ordered", "all-gather"),
        ("S1 R", "R R", (8, 6), "nccl", "ordered", "all-gather"),
        ("S0 S0", "R R", (8, 6), "nccl", "ordered", "all-gather"),
        ("S0 S1", "R R", (8, 6), "nccl", "ordered", "all-gather"),
        ("S0 R", "R R", (7, 6), "nccl", "ordered", "send and receive"),  # uneven
        ("S0 R", "S1 R", (8, 6), "nccl", "ordered", "send and receive"),  # its all-to-all is messages
        ("S0 S0", "R S0", (8, 6), "nccl", "ordered", "send and receive"),  # each rank needs something else
        ("P R", "S0 R", (8, 6), "nccl", "ordered", "send and receive"),
        ("P R", "S0 R", (8, 6), "nccl", "fast", "reduce-scatter"),
        ("P R", "S1 R", (8, 6), "gloo", "fast", "reduce-scatter"),
        ("P Pavg", "S1 S0", (8, 6), "gloo", "fast", "reduce-scatter"),
        ("P R", "S0 R", (7, 6), "gloo", "fast", "all-to-all"),  # uneven
        ("P S0", "S0 S0", (8, 6), "gloo", "fast", "send and receive"),  # not all of the group have terms of it
        ("P R", "R R", (1, 1), "gloo", "fast", "all-reduce"),
        ("P R", "R R", (1, 1), "gloo", "ordered", "all-to-all"),
    ],
)
def test_choose_algorithm_collectives_by_backend(
    source: str, target: str, shape: tuple[int, ...], backend: str, reduction: Any, algorithm: str
) -> None:
    topology = None if shape != (1, 1) else shardweave.NVLINK_NODE  # on which one step is cheaper than two
    program = shardweave.plan(MESH, shape, "float32", source, target, topology=topology)
    chosen = [
        choose_algorithm(program, program.steps[0], r, AssumedTransport(MESH, False, backend), reduction)
        for r in range(4)
    ]
    assert {algorithm.name for algorithm in chosen} == {algorithm}, (program.explain(), chosen[0])
    exact = shape == (1, 1) or "P" not in source
    contributed = integers(oracle.contribution_shape((2, 2), shape, source), source + target)
    for dtype in (torch.float32, torch.int64) if exact or "avg" not in source else (torch.float32,):
        prove((2, 2), shape, dtype, source, target, contributed, False, topology, backend, reduction)


@pytest.mark.plan
@pytest.mark.parametrize("case", [case for case in oracle.SAMPLED if len(case.shape)], ids=str)
def test_choose_algorithm_equal_on_all_members(case: Any) -> None:
    mesh = Mesh(case.mesh_shape)
    # Shards of odd sizes around the limit.
    shape = (*case.shape[:-1], int(BACKENDS["gloo"].all_to_all) // 4 // 10)
    for source, target in case.pairs()[::9]:
        program = shardweave.plan(mesh, shape, "float32", source, target)
        for step in program.steps:
            for position in range(mesh.size):
                members = program.members(step, position)
                chosen = [choose_algorithm(program, step, p, AssumedTransport(mesh, False)) for p in members]
                assert all(other == chosen[0] for other in chosen)
                here = len(members) == 1 or 0 in (program.shape_before(step, members[0]))
                allowed = ("all-to-all", "send and receive", *(["local"] if here else []))
                assert not isinstance(step, Exchange) or chosen[0].name in allowed


def explained(rank: int, transport: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    assert shardweave.explain(x, [Shard(0), Shard(1)], transport=transport).endswith(
        "nothing to do: the output is the input\n  received 0 B (bound 0 B, met exactly), peak 24 B"
    )
    return shardweave.explain(x, [Replicate(), Shard(1)], transport=transport)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("transport", "means"),
    [
        ("shared_memory", "push: ranks write into each other's memory"),
        ("process_group", "all-to-all: shards of 48 B at most cost less in one call"),
    ],
)
def test_explain_shows_transport_and_algorithms(transport: str, means: str) -> None:
    for rank, text in enumerate(run_ranks(explained, 4, transport)):
        assert text.splitlines() == [
            f"S0 S1 → R S1   float32[4, 6] on 2×2, rank {rank}",
            "  1. exchange S0 S1 → R S1   along 0",
            "     3 boxes, receives at most 24 B",
            f"     by {means}",
            "  received 24 B (bound 24 B, met exactly), peak 72 B",
            f"  on transport {transport}: requested",
            "  when torch traces: all-gather of 2 ranks",
        ]


COLLECTIVES = (
    ("all-reduce", (), ([Partial(), Replicate()], [Replicate(), Replicate()]), "bfloat16"),
    ("reduce-scatter", (8, 6), ([Partial("avg"), Shard(1)], [Shard(0), Shard(1)]), "float32"),
    ("reduce-scatter", (8, 6), ([Shard(0), Partial("product")], [Shard(0), Shard(1)]), "int64"),
    # Backends do not guarantee to propagate NaN, and the order of these reductions costs nothing.
    ("all-to-all|send and receive", (8, 6), ([Shard(0), Partial("max")], [Shard(0), Shard(1)]), "int64"),
    ("reduce-scatter", (8, 6), ([Partial(), Partial()], [Shard(1), Shard(0)]), "float16"),
    ("all-gather", (8, 6), ([Shard(0), Shard(1)], [Shard(0), Replicate()]), "bool"),
    ("all-gather", (8, 6), ([Shard(0), Shard(0)], [Replicate(), Replicate()]), "float8_e4m3fn"),
    ("all-gather", (8, 6), ([Shard(1), Shard(0)], [Replicate(), Replicate()]), "complex64"),
)


def carry_out_by_collectives(rank: int) -> None:
    BACKENDS["gloo"] = BACKENDS["nccl"]
    mesh = init_device_mesh("cpu", (2, 2))
    for algorithm, shape, (source, target), dtype in COLLECTIVES:
        terms = torch.arange(4 * math.prod(shape)).view(4, *shape) % 7  # whole numbers: exact in any order
        partial = [isinstance(p, Partial) for p in source]
        op = next((p.reduce_op for p in source if isinstance(p, Partial)), "sum")
        term = (rank // 2) * partial[0] * 2 + (rank % 2) * partial[1]
        mine = terms[term].to(getattr(torch, dtype))
        known = [terms[i * 2 * partial[0] + j * partial[1]] for i in (0, 1) for j in (0, 1)]
        known = known if all(partial) else known[:: 2 if partial[0] else 1][:2] if any(partial) else known[:1]
        stacked = torch.stack(known).double()
        whole = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "product": stacked.prod(0)}[op]
        whole = whole.to(mine.dtype)
        held = [Replicate() if isinstance(p, Partial) else p for p in source]
        local = distribute_tensor(mine.view(torch.uint8) if dtype == "float8_e4m3fn" else mine, mesh, held,
                                  src_data_rank=None).to_local().view(mine.dtype)  # fmt: skip
        x = DTensor.from_local(local, mesh, source, run_check=False, shape=mine.shape, stride=mine.stride())
        assert re.search(
            f"by ({algorithm}): ", shardweave.explain(x, target, transport="process_group", reduction="fast")
        )
        got = shardweave.redistribute(x, target, transport="process_group", reduction="fast").full_tensor()
        assert got.view(torch.uint8).equal(whole.view(torch.uint8)) if shape else got.equal(whole), algorithm


def asked_differently(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(DisagreementError, match="made different requests"):
        shardweave.redistribute(x, [Shard(0)], transport="process_group", reduction="fast" if rank else "ordered")


@pytest.mark.multi
def test_collectives_are_exact() -> None:
    run_ranks(carry_out_by_collectives, 4)


@pytest.mark.multi
def test_different_reduction_settings_raise() -> None:
    run_ranks(asked_differently, 2)


@pytest.mark.plan
def test_unknown_reduction_raises() -> None:
    for call in (lambda: shardweave.install(reduction="quick"), lambda: shardweave.simulate(None, [], reduction=3)):
        with pytest.raises(ArgumentError, match=r"reduction: .*; allowed: 'ordered', 'fast'"):
            call()
    assert not shardweave.is_installed()


@pytest.mark.plan
def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--mesh", "2,2", "--shape", "8,6", "--transport", "process_group"]
    assert main([*command, "S0 R", "S1 R"]) == 0
    assert "     by all-to-all: shards of 96 B at most" in capsys.readouterr().out
    fast = [*command, "--backend", "nccl", "--reduction", "fast"]
    assert main([*fast, "P S1", "R S1"]) == 0
    assert '     by all-reduce: reduction="fast" leaves the order of terms to nccl' in capsys.readouterr().out
    fast[fast.index("2,2")] = "4,2"
    assert main([*fast, "P S1", "R S1"]) == 0
    shown = capsys.readouterr().out
    assert '     by reduce-scatter: reduction="fast" leaves the order of terms to nccl' in shown
    assert "     by all-gather: every rank ends with 96 B, an equal part from each" in shown
    assert main([*command[:-2], "--backend", "nccl", "S0 S1", "S1 S0"]) == 2
    assert "error: --backend: given without --transport process_group or hierarchical" in capsys.readouterr().err
    assert main([*command, "--target-mesh", "2@3", "S0 S1", "S0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("S0 S1 on 2×2 of ranks 0..3 → S0 on 2 of ranks 3..4   float32[8, 6]\n")
    assert "     by send and receive: between two meshes" in shown
    assert main([*command, "--target-mesh", "2@3", "S0 S1", "S0 S0"]) == 2
    assert "error: target: S0 S0 has 2 placements, the mesh (2,) has 1 dims" in capsys.readouterr().err
    for wrong in ("2,2@", "2@x", "2,x"):
        with pytest.raises(SystemExit):
            main([*command, "--target-mesh", wrong, "S0 S1", "S0"])
