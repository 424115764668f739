"""Ranges in torch's profiler."""

from __future__ import annotations

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import profile

import shardweave


def program() -> None:
    """A redistribution, its backward, an asynchronous one, and a layer of experts with its backward."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
    with shardweave.installed():
        x.redistribute(placements=[Shard(1)]).to_local().sum().backward()
        x.detach().redistribute(placements=[Replicate()], async_op=True).to_local().sum()
    experts = shardweave.TokenDispatcher(num_experts=4, top_k=2, hidden=8, max_tokens=6, dtype=torch.float32)
    tokens, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    routed = experts.dispatch(tokens, torch.randint(0, 4, (6, 2)), weights)
    experts.combine(2 * routed.x, routed).sum().backward()


def profiled_program(rank: int) -> list[str]:
    with profile() as profiled:
        program()
    return [event.key.removeprefix("shardweave::") for event in profiled.events() if "shardweave::" in event.key]


@pytest.mark.multi
def test_profiler_has_the_calls_and_their_phases_forward_and_backward() -> None:
    for names in run_ranks(profiled_program, 2):
        assert names.count("redistribute") == 2 and {"copy", "exchange"} <= set(names)
        for name in ("begin", "finish", "dispatch", "combine", "backward of combine", "backward of dispatch"):
            assert names.count(name) == 1, names
