"""What is in graphs, under a process group that communicates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave

pytestmark = pytest.mark.plan


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    shardweave.uninstall()
    shardweave.stats().reset()
    dist.destroy_process_group()


def config() -> Any:
    """Where this torch has the setting."""
    for module in (torch.compiler.config, getattr(dist, "config", None)):
        if hasattr(module, "compile_on_one_rank"):
            return module
    pytest.skip("this torch makes a graph for each rank")


def traced(mesh: DeviceMesh) -> torch.fx.GraphModule:
    """A redistribution, without dead code."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, mesh, (Shard(0), Shard(0)), run_check=False)
        return x.redistribute(placements=(Replicate(), Shard(1))).to_local()

    module = make_fx(function, tracing_mode="fake")(torch.ones(2, 8))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def test_a_graph_for_all_ranks_is_left_to_torch(mesh: DeviceMesh) -> None:
    with config().patch(compile_on_one_rank=True):
        expected = traced(mesh).code
        shardweave.install()
        assert traced(mesh).code == expected
    assert "compile_on_one_rank" in {text.partition(":")[0] for text in shardweave.stats().delegations}
    assert traced(mesh).code != expected


def test_a_graph_holds_no_rank_table(mesh: DeviceMesh) -> None:
    shardweave.install()
    module = traced(mesh)
    assert "_c10d_functional.all_to_all_single" in module.code
    assert not dict(module.named_buffers()) and not [name for name in vars(module) if name.startswith("_tensor_")]
