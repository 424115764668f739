"""By what means steps are carried out: chosen alike by all who meet, with the reason, in few kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from test_simulate import integers, oracle, poison, prove  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave
from shardweave.__main__ import main
from shardweave.planner import NVLINK_INFINIBAND, Exchange, Mesh
from shardweave.runtime import copies
from shardweave.runtime.lowering import LARGEST_IN_ONE_CALL, AssumedWorld, explain_on, lower

SLOW = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
MESH = Mesh((2, 2))


@pytest.mark.plan
@pytest.mark.parametrize(
    ("source", "target", "shape", "one_sided", "how", "why"),
    [
        ("S0 S1", "S1 S0", (8, 6), True, "push", "ranks write into each other's memory"),
        ("S0 S1", "S1 S0", (8, 6), False, "all-to-all", "shards of 48 B at most cost less in one call"),
        ("S0 R", "S1 R", (8, 6), False, "all-to-all", "shards of 96 B at most"),
        ("S0 R", "S1 R", (1024, 1024), False, "send and receive", "shards of 2 MiB are not copied into one message"),
        ("R R", "S0 S1", (8, 6), True, "local", "no rank receives anything"),
        ("R R", "S0 S1", (8, 6), False, "local", "no rank receives anything"),
    ],
)
def test_the_means_and_why(
    source: str, target: str, shape: tuple[int, ...], one_sided: bool, how: str, why: str
) -> None:
    program = shardweave.plan(MESH, shape, "float32", source, target)
    found = lower(program, program.steps[0], 0, AssumedWorld(MESH, one_sided))
    assert found.how == how and why in found.why
    assert f"     by {found.how}: {found.why}" in explain_on(program, AssumedWorld(MESH, one_sided))


@pytest.mark.plan
def test_a_subset_of_mesh_dims_has_no_group() -> None:
    mesh = Mesh((2, 2, 2))
    program = shardweave.plan(mesh, (8, 8), "float32", "R S0 S1", "R S1 S0")
    found = lower(program, program.steps[0], 0, AssumedWorld(mesh, False))
    assert found.how == "send and receive" and "no process group of a mesh dim, or of all" in found.why
    crossing = shardweave.plan(MESH, (8, 8), "float32", "S0 S1", "S0", target_mesh=Mesh((4,)))
    found = lower(crossing, crossing.steps[0], 0, AssumedWorld(MESH, False))
    assert found.how == "send and receive" and "between two meshes" in found.why


@pytest.mark.plan
@pytest.mark.parametrize("case", [case for case in oracle.SAMPLED if len(case.shape)], ids=str)
def test_all_who_meet_choose_alike(case: Any) -> None:
    mesh = Mesh(case.mesh_shape)
    # Shards of odd sizes around the limit.
    shape = (*case.shape[:-1], LARGEST_IN_ONE_CALL // 4 // 10)
    for source, target in case.pairs()[::9]:
        program = shardweave.plan(mesh, shape, "float32", source, target)
        for step in program.steps:
            for position in range(mesh.size):
                members = program.members(step, position)
                found = [lower(program, step, p, AssumedWorld(mesh, False)) for p in members]
                assert all(other == found[0] for other in found)
                assert not isinstance(step, Exchange) or found[0].how in ("all-to-all", "send and receive")


@pytest.mark.plan
@pytest.mark.parametrize("groups", [False, True], ids=["messages", "all-to-all"])
def test_steps_that_copy_take_one_kernel_more_than_exchanges(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    call = copies.Copies.__call__

    def counted(self: copies.Copies, *args: Any) -> None:
        launches.append(0 if self.empty else 1)
        call(self, *args)

    monkeypatch.setattr(copies.Copies, "__call__", counted)
    longest = 0
    for mesh, shape, node_size in (((2, 4), (16, 8), 4), ((4, 2), (16, 8), 2), ((2, 2, 2), (16, 32), 4)):
        topology = replace(NVLINK_INFINIBAND, node_size=node_size, network=SLOW)
        texts = list(oracle.layout_texts(len(mesh), ("R", "S0", "S1")))
        for source in texts[::3]:
            for target in texts[1::4]:
                program = shardweave.plan(mesh, shape, torch.float32, source, target, topology=topology)
                launches.clear()
                contributed = integers(oracle.contribution_shape(mesh, shape, source), source + target)
                prove(mesh, shape, torch.float32, source, target, contributed, False, topology, groups)
                # A message to each peer is packed by itself.
                if groups:
                    assert sum(launches) <= (program.exchanges + 1) * program.mesh.size, program.explain()
                longest = max(longest, program.exchanges)
    assert longest >= 3


def explained(rank: int, world: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    assert shardweave.explain(x, [Shard(0), Shard(1)], world=world).endswith(
        "nothing to do: the output is the input\n  received 0 B (bound 0 B, met exactly), peak 24 B"
    )
    return shardweave.explain(x, [Replicate(), Shard(1)], world=world)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("world", "means"),
    [
        ("shared_memory", "push: ranks write into each other's memory"),
        ("collective", "all-to-all: shards of 48 B at most cost less in one call"),
    ],
)
def test_explain_tells_the_world_and_its_means(world: str, means: str) -> None:
    for rank, text in enumerate(run_ranks(explained, 4, world)):
        assert text.splitlines() == [
            f"S0 S1 → R S1   float32[4, 6] on 2×2, rank {rank}",
            "  1. exchange S0 S1 → R S1   along 0",
            "     3 boxes, receives at most 24 B",
            f"     by {means}",
            "  received 24 B (bound 24 B, met exactly), peak 72 B",
            f"  on world {world}: asked for",
        ]


@pytest.mark.plan
def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--mesh", "2,2", "--shape", "8,6", "--world", "collective"]
    assert main([*asked, "S0 S1", "S1 S0"]) == 0
    assert "     by all-to-all: shards of 48 B at most" in capsys.readouterr().out
    assert main([*asked, "--target-mesh", "2@3", "S0 S1", "S0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("S0 S1 on 2×2 of ranks 0..3 → S0 on 2 of ranks 3..4   float32[8, 6]\n")
    assert "     by send and receive: between two meshes" in shown
    assert main([*asked, "--target-mesh", "2@3", "S0 S1", "S0 S0"]) == 2
    assert "error: dst: S0 S0 has 2 placements, the mesh (2,) has 1 dims" in capsys.readouterr().err
    for wrong in ("2,2@", "2@x", "2,x"):
        with pytest.raises(SystemExit):
            main([*asked, "--target-mesh", wrong, "S0 S1", "S0"])
