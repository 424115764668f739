"""Token dispatch in torch's profiler: a range for each operation, and in it one for each phase."""

from __future__ import annotations

import pytest
import torch
from rank_processes import run_ranks
from torch.profiler import profile

import shardweave

pytestmark = pytest.mark.multi


def profiled_layer(rank: int) -> list[str]:
    dispatcher = shardweave.TokenDispatcher(num_experts=4, top_k=2, hidden=8, max_tokens=6, dtype=torch.float32)
    x = torch.randn(6, 8, requires_grad=True)
    ids, weights = torch.randint(0, 4, (6, 2)), torch.rand(6, 2, requires_grad=True)
    with profile() as profiled:
        routed = dispatcher.dispatch(x, ids, weights)
        dispatcher.combine(2 * routed.x, routed).sum().backward()
    return [event.key for event in profiled.key_averages()]


def test_profiler_has_ranges_of_dispatch_and_combine() -> None:
    for names in run_ranks(profiled_layer, 2):
        for name in ("dispatch", "combine", "backward of dispatch", "backward of combine", "copy", "exchange"):
            assert f"shardweave::{name}" in names, names
