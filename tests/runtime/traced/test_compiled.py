"""torch.compile on ranks in processes: the bits of eager redistribution, forward and backward, in one graph."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.integrations.autoparallel import ordered_redistribute_local_tensor

pytestmark = pytest.mark.multi
R, S0, S1 = Replicate(), Shard(0), Shard(1)
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))


def square_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def sharded(mesh: DeviceMesh, shape: tuple[int, ...], placements: Any = (S0, S1)) -> DTensor:
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def check(function: Any, x: DTensor, backend: str) -> None:
    """Compiled as in eager mode: the values, the layout and the gradient."""
    torch._dynamo.reset()
    x = x.detach().requires_grad_()
    got, want = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
    assert got.placements == want.placements and got._spec.shard_order == want._spec.shard_order
    assert got.to_local().equal(want.to_local()), (got.to_local(), want.to_local())
    gradients = [torch.autograd.grad((y * y).sum(), x)[0] for y in (got, want)]
    assert gradients[0].placements == gradients[1].placements
    assert gradients[0].to_local().equal(gradients[1].to_local())


ARGUMENTS: list[dict[str, Any]] = [
    {"placements": "S1 S0"},
    {"placements": "S0 S0 @ 0:1,0"},
    {"placements": [S0, S0], "shard_order": {0: (1, 0)}},
    {"placements": "R R", "forward_dtype": torch.bfloat16},
    {"placements": "R S1", "backward_dtype": torch.bfloat16},
    {"placements": [S0, R], "reduction": "fast"},
    {"placements": "R S0"},
]


TARGETS = [(S1, S0), (R, S0), (S0, S0), (R, R), (S1, S1)]


def redistributed(rank: int, backend: str, shapes: list[tuple[int, ...]], number: int) -> None:
    """With `number` of the arguments, and of the targets under `install`, drawn for each shape."""
    mesh = square_mesh()
    for shape in shapes:
        x, draw = sharded(mesh, shape), Random(str(shape))
        for arguments in draw.sample(ARGUMENTS, min(number, len(ARGUMENTS))):  # without install(), too
            if torch.__version__ < "2.12" and ("shard_order" in arguments or "@" in arguments["placements"]):
                with pytest.raises(Exception, match="drops it from DTensors in graphs"):
                    check(lambda x, given=arguments: shardweave.redistribute(x * 2, **given), x, backend)
                continue
            check(lambda x, given=arguments: shardweave.redistribute(x * 2, **given), x, backend)
        with shardweave.installed():
            for placements in draw.sample(TARGETS, min(number, len(TARGETS))):
                check(lambda x, to=placements: (x * 2).redistribute(placements=to) * 3, x, backend)
    assert not shardweave.stats().delegations and shardweave.stats().traced.total() > 0


def test_redistributions_in_compiled_functions() -> None:
    run_ranks(redistributed, 4, "aot_eager", [(13, 6)], len(ARGUMENTS))


@pytest.mark.long
def test_redistributions_compiled_by_inductor() -> None:
    shapes = [(13, 6), (8, 12), (1, 5), (4, 4), (7, 9)]
    run_ranks(redistributed, 4, "inductor", shapes[:PARTS], 2 * PARTS, timeout=300 * PARTS)


def compiled_once(rank: int, ours: bool) -> tuple[int, int]:
    """How many graphs were found in torch's caches, and how many were not."""
    counts = torch._dynamo.utils.counters["aot_autograd"]
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.full((8, 3), rank + 1.0), mesh, [Partial()], run_check=False)
    # Stock's graph is the same on all ranks. It cannot have others in caches: it would take those of other ranks.
    function = torch.compile(lambda x: x.redistribute(placements=[S0]) * 2, fullgraph=True)
    if ours:
        shardweave.install()
    assert function(x).to_local().equal(torch.full((4, 3), 6.0))
    if ours:
        x = sharded(mesh, (13, 6), (S0,))
        function = torch.compile(lambda x: x.redistribute(placements=[S1]) * 2, fullgraph=True)
        assert function(x).to_local().equal(2 * x.redistribute(placements=[S1]).to_local())
    return counts["autograd_cache_hit"], counts["autograd_cache_miss"]


@pytest.mark.long
def test_caches_of_torch(tmp_path: Path) -> None:
    """With one folder for all ranks: no graph is taken for another's, and a second start finds its own."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start(ours: bool) -> list[tuple[int, int]]:
        return run_ranks(compiled_once, 2, ours, environment=environment, timeout=300)

    assert sum(misses for _, misses in start(ours=False)) > 0
    assert start(ours=True) == [(0, 2)] * 2
    assert start(ours=True) == [(2, 0)] * 2


def batches_and_local_tensors(rank: int) -> None:
    mesh = square_mesh()
    x, y = sharded(mesh, (13, 6)), sharded(mesh, (4, 4), (R, S0))

    def batch(x: DTensor, y: DTensor) -> list[DTensor]:
        return shardweave.redistribute_batch([x, y], ["S1 S0", [S0, R]])

    got, want = (function(x, y) for function in (torch.compile(batch, backend="aot_eager", fullgraph=True), batch))
    assert all(
        a.placements == b.placements and a.to_local().equal(b.to_local()) for a, b in zip(got, want, strict=True)
    )
    if torch.__version__ < "2.12":  # specs are no constants for its Dynamo
        return
    source, target = x._spec, sharded(mesh, (13, 6), (S0, S0))._spec

    def ordered(local: torch.Tensor) -> torch.Tensor:
        return ordered_redistribute_local_tensor(local, source, target, None, {0: (1, 0)})

    local = x.to_local()
    assert torch.compile(ordered, backend="aot_eager", fullgraph=True)(local).equal(ordered(local))


def test_batches_and_local_tensors() -> None:
    run_ranks(batches_and_local_tensors, 4)


def refusals(rank: int) -> None:
    x = sharded(square_mesh(), (13, 6))
    for arguments, text in (({"out": x}, "out: given"), ({"shard_order": {5: (0,)}}, "shard_order")):
        with pytest.raises(Exception, match=text):
            torch.compile(
                lambda x, given=arguments: shardweave.redistribute(x, "S1 S0", **given),
                backend="aot_eager", fullgraph=True,
            )(x)  # fmt: skip
        torch._dynamo.reset()
    # No peer was told of a refusal, for which it would not wait.
    assert shardweave.redistribute(x, "R R").to_local().shape == (13, 6)


def test_refused_arguments() -> None:
    run_ranks(refusals, 4)


def lengths(rank: int) -> None:
    mesh = square_mesh()
    shardweave.install()

    def compiles(placements: Any, target: Any, shapes: list[tuple[int, ...]]) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def function(x: DTensor) -> DTensor:
            return (x * 2).redistribute(placements=target)

        compiled = torch.compile(function, backend=counter, fullgraph=True)
        for shape in shapes:
            x = sharded(mesh, shape, placements)
            assert compiled(x).to_local().equal(function(x).to_local()), shape
        return counter.frame_count

    shapes = [(4, n, 8) for n in (1000, 1001, 1013, 1020, 1000)]
    assert compiles((S0, Shard(2)), (S0, R), shapes) == 2  # a dim that is not cut
    assert compiles((S0, Shard(2)), (S0, S0), shapes) == 2
    assert compiles((S0, Shard(2)), (S0, S1), [(4, n, 8) for n in (1000, 1002, 1014, 1020)]) == 2  # cut evenly
    assert compiles((S0, Shard(2)), (S0, S1), shapes[:3]) <= 3  # cut unevenly: one graph for each size
    assert not shardweave.stats().delegations


def test_symbolic_sizes() -> None:
    run_ranks(lengths, 4)


def stages(rank: int) -> None:
    """Ranks of two pipeline stages trace different functions at different times."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    shardweave.install()
    shardweave.prepare(mesh, 1 << 20)
    x = sharded(mesh, (6, 4))
    if rank < 2:
        check(lambda x: (x * 2).redistribute(placements=(S1, S0)), x, "aot_eager")
    else:
        check(lambda x: (x + 1).redistribute(placements=(R, R)).sin(), x, "aot_eager")
    assert not shardweave.stats().delegations


def test_pipeline_stages() -> None:
    run_ranks(stages, 4)


def traced_to_torch(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shardweave.install(traced=False)
    x = sharded(mesh, (5, 3), (S0,))
    compiled = torch.compile(lambda x: x.redistribute(placements=[R]) * 2, backend="aot_eager", fullgraph=True)
    assert compiled(x).to_local().equal(2 * x.full_tensor())
    assert set(shardweave.stats().delegations) == {"torch.compile is tracing"} and not shardweave.stats().traced
    dist.barrier()


def test_install_without_tracing() -> None:
    run_ranks(traced_to_torch, 2)
