"""What torch.compile traces is counted once for each redistribution in a graph, and stays in the counters."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardweave

pytestmark = pytest.mark.multi
TRACED = "torch.compile is tracing"
R, S0 = (Replicate(),), (Shard(0),)


def sharded(requires_grad: bool = False, mesh: DeviceMesh | None = None) -> DTensor:
    mesh = mesh or init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.randn(8, 4), mesh, S0, src_data_rank=None).requires_grad_(requires_grad)


def traced(function: Any, *inputs: Any, backward: bool = False, times: int = 1) -> int:
    """How many redistributions are counted when a function is compiled and called a number of times."""
    before = shardweave.stats().traced.total()
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(times):
        result = compiled(*inputs)
        if backward:
            (result.to_local() if isinstance(result, DTensor) else result).sum().backward()
    return shardweave.stats().traced.total() - before


def there_and_back(x: DTensor, times: int = 2) -> DTensor:
    for _ in range(times):
        x = x.redistribute(placements=R).sin().redistribute(placements=S0)
    return x


def broken(x: DTensor) -> DTensor:
    y = x.redistribute(placements=R).sin()
    torch._dynamo.graph_break()
    return y.redistribute(placements=S0)


def recomputed(x: DTensor) -> DTensor:
    return checkpoint(lambda y: there_and_back(y, 1), x, use_reentrant=False)


def counted_once(rank: int) -> None:
    shardweave.install()
    x = sharded()
    w = sharded(requires_grad=True, mesh=x.device_mesh)
    assert traced(there_and_back, x, times=2) == 4
    assert traced(there_and_back, w, backward=True, times=2) == 8
    assert traced(lambda a, b: (a + b.redistribute(placements=R)).sin(), x, w, backward=True) == 2  # one is implicit
    assert traced(broken, w, backward=True) == 4
    assert traced(recomputed, w, backward=True) == 4
    assert not shardweave.stats().delegations
    shardweave.install(traced=False)
    torch._dynamo.reset()
    assert traced(there_and_back, x) == 0 and shardweave.stats().delegations == {TRACED: 4}


def test_each_redistribution_of_a_graph_is_counted_once() -> None:
    run_ranks(counted_once, 2)


def reset_in_between(rank: int) -> None:
    stats, x = shardweave.stats(), sharded()
    shardweave.install(only=[], traced=False)
    compiled = torch.compile(there_and_back, backend="aot_eager")
    compiled(x)
    x.redistribute(placements=R)
    assert stats.delegations == {TRACED: 4, "a mesh that install(only=) leaves out": 1}
    for _ in range(2):
        stats.reset()
        compiled(x)
        assert stats.delegations == {TRACED: 4} and "    4  torch.compile is tracing" in str(stats)
    shardweave.install()
    assert traced(broken, x) == 2
    stats.reset()
    assert stats.delegations == {TRACED: 4} and stats.traced.total() == 2


def test_reset_keeps_what_is_in_graphs() -> None:
    run_ranks(reset_in_between, 2)


def own_function(rank: int, installed: bool) -> None:
    def function(x: DTensor) -> DTensor:
        y = shardweave.redistribute(x, R, transport="process_group").sin()
        torch._dynamo.graph_break()
        return shardweave.redistribute(y, S0)

    if installed:
        shardweave.install()
    assert traced(function, sharded()) == 2
    assert shardweave.stats().ignored == {"transport": 1}
    shardweave.stats().reset()
    assert shardweave.stats().ignored == {"transport": 1}


@pytest.mark.parametrize("installed", [False, True])
def test_own_function_with_graph_breaks(installed: bool) -> None:
    run_ranks(own_function, 2, installed)


CACHED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardweave

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
x = distribute_tensor(torch.randn(8, 4), init_device_mesh("cpu", (4,)), [Shard(0)]).requires_grad_()
shardweave.install()
torch.compile(lambda x: x.redistribute(placements=[Replicate()]).sin())(x).to_local().sum().backward()
print(shardweave.stats().traced.total())
"""


@pytest.mark.long
def test_forward_of_a_graph_from_torchs_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counts = [subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout for run in counts] == ["2\n", "1\n"], counts
