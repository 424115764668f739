"""FSDP2 on shardweave's worlds, against FSDP2 on gloo and against plain float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

import shardweave

pytestmark = pytest.mark.multi

WORLDS = ("shared_memory", "collective")
STEPS = 3


class Model(torch.nn.Module):
    """Odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = torch.nn.Linear(7, 13), torch.nn.Linear(13, 9), torch.nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def in_order(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Sums in the order of the list, 16-bit floats in float32, rounded once."""
    wide = [x.float() if x.dtype.itemsize == 2 else x for x in inputs]
    total = wide[0].clone()
    for x in wide[1:]:
        total += x
    return (total / len(inputs) if op == dist.ReduceOp.AVG else total).to(inputs[0].dtype)


class InOrder(DefaultReduceScatter):
    """What our reduce-scatter is to do, bit for bit, from a gather of everything."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
        everything = input_tensor.new_empty(group.size(), group.size(), output_tensor.numel())
        dist.all_gather_into_tensor(everything.view(-1), input_tensor, group=group)
        output_tensor.copy_(in_order(list(everything[:, group.rank()]), op))


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def shard(mesh: DeviceMesh, policy: MixedPrecisionPolicy, sum_only: bool = False, factor: float | None = None) -> Model:
    model = made()
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # gloo has no AVG and no PREMUL_SUM: FSDP itself divides then.
            part.set_force_sum_reduction_for_comms(sum_only)
            if factor is not None:
                part.set_gradient_divide_factor(factor)
    return model


def adapted(model: Model) -> Model:
    shardweave.adapt_fsdp(model)
    return model


def summed_in_order(model: Model) -> Model:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(InOrder())
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, batches: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The gradients and parameters of each step; each has batches whose losses are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for some in batches:
        optimizer.zero_grad()
        for x in some:
            (model(x).square().sum() / len(some)).backward()
        optimizer.step()
        tensors = dict(model.named_parameters())
        tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
        found.append({name: t.detach().clone() for name, t in whole.items()})
    return found


def difference(found: list[dict], expected: list[dict]) -> float:
    """The largest, relative to the largest value of its tensor."""
    pairs = [(a[name].double(), b[name].double()) for a, b in zip(found, expected, strict=True) for name in b]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def made_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def train_all_ways(rank: int, shape: tuple[int, ...], low: bool) -> tuple[dict[str, int], float, float, float]:
    mesh, hybrid = made_mesh(shape), len(shape) > 1
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if low else MixedPrecisionPolicy()
    mine = [[batch(rank, step)] for step in range(STEPS)]
    stock = train(shard(mesh, policy, sum_only=True), mine)
    expected = train(summed_in_order(shard(mesh, policy, sum_only=hybrid)), mine)
    assert not shardweave.stats().calls
    ours = train(adapted(shard(mesh, policy, sum_only=hybrid)), mine)
    calls = dict(shardweave.stats().calls)
    everyone = [[batch(r, step).double() for r in range(dist.get_world_size())] for step in range(STEPS)]
    exact = train(made().double(), everyone)
    return calls, *(difference(ours, other) for other in (expected, stock, exact))


@pytest.mark.parametrize("low", (False, True), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", ((2,), (4,), (2, 2)), ids=str)
def test_training_is_that_of_fsdp(shape: tuple[int, ...], world: str, low: bool) -> None:
    size = 2 if shape == (2,) else 4
    ends = run_ranks(train_all_ways, size, shape, low, environment={"SHARDWEAVE_WORLD": world})
    for calls, from_expected, from_stock, from_exact in ends:
        # A step gathers three modules forward and two backward (the root stays whole), and reduces three.
        assert calls == {world: 8 * STEPS}
        assert from_expected == 0
        # In a sum of two there is no order to differ in, and halves are exact.
        assert from_stock <= (0 if shape != (4,) else 2**-4 if low else 2**-20)
        assert from_exact <= (0.25 if low else 2**-20)


def gradients_multiplied(rank: int) -> tuple[int, float]:
    """FSDP passes PREMUL_SUM for a divide factor of one's own."""
    mesh, x = made_mesh((2,)), [[batch(rank, 0)]]
    stock = train(shard(mesh, MixedPrecisionPolicy(), sum_only=True, factor=3), x)
    ours = train(adapted(shard(mesh, MixedPrecisionPolicy(), factor=3)), x)
    return sum(shardweave.stats().calls.values()), difference(ours, stock)


def test_a_factor_of_ones_own() -> None:
    for calls, off in run_ranks(gradients_multiplied, 2):
        assert calls == 8
        assert off < 2**-20


def other_ways_through_fsdp(rank: int) -> None:
    mesh, x = made_mesh((2,)), batch(rank, 0)
    expected = made()(x)
    model = adapted(shard(mesh, MixedPrecisionPolicy()))
    with torch.inference_mode():  # FSDP keeps buffers that only inference may write: a model of its own
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    model = adapted(shard(mesh, MixedPrecisionPolicy()))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    model.unshard(async_op=True).wait()
    model.first.set_modules_to_forward_prefetch([model.second])
    model(x).sum().backward()
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    # Accumulating: only the last backward reduces.
    before = sum(shardweave.stats().calls.values())
    accumulating, once = (adapted(shard(mesh, MixedPrecisionPolicy())) for _ in range(2))
    accumulating.set_requires_gradient_sync(False)
    accumulating(x).sum().backward()
    accumulating.set_requires_gradient_sync(True)
    accumulating(x).sum().backward()
    (2 * once(x).sum()).backward()
    assert sum(shardweave.stats().calls.values()) == before + 5 + 8 + 8
    for a, b in zip(accumulating.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())


@pytest.mark.parametrize("world", WORLDS)
def test_other_ways_through_fsdp(world: str) -> None:
    run_ranks(other_ways_through_fsdp, 2, environment={"SHARDWEAVE_WORLD": world})


def collectives_alone(rank: int, world: str) -> None:
    gather, scatter = shardweave.FSDPAllGather(), shardweave.FSDPReduceScatter()
    here = torch.device("cpu")
    groups = [dist.group.WORLD, *(dist.new_group(ranks) for ranks in ([0, 2, 3], [1]))]
    for group, dtype, n in product(groups, (torch.float32, torch.bfloat16, torch.float16, torch.float64), (0, 1, 257)):
        ranks = dist.get_process_group_ranks(group) if rank in dist.get_process_group_ranks(group) else None
        if ranks is None:
            continue
        size = len(ranks)
        whole = [torch.randn(size, n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in ranks]
        me = group.rank()

        # In place, as FSDP gathers: the input is a view of the output.
        out = gather.allocate((size * n,), dtype=dtype, device=here).fill_(float("nan"))
        part = out.narrow(0, n * me, n).copy_(whole[me][0])
        assert gather(output_tensor=out, input_tensor=part, group=group, async_op=True) is None
        assert torch.equal(out, torch.cat([x[0] for x in whole]))
        # Memory of someone else's is written where it is.
        theirs = torch.full((2 * size * n,), float("nan"), dtype=dtype)
        gather(theirs[size * n :], whole[me][0], group)
        assert torch.equal(theirs[size * n :], out)
        assert theirs[: size * n].isnan().all()

        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.SUM)):
            kept = whole[me].clone()
            reduced = scatter.allocate((n,), dtype=dtype, device=here).fill_(float("nan"))
            assert scatter(reduced, kept.view(-1), group, op) is None
            assert torch.equal(reduced, in_order([x[me] for x in whole], op)), (dtype, n, op)
            assert torch.equal(kept, whole[me])
    assert set(shardweave.stats().calls) == {world}
    x, y = torch.zeros(4), torch.zeros(1)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.PREMUL_SUM):
        with pytest.raises(shardweave.UnsupportedError, match=op.name):
            scatter(y, x, dist.group.WORLD, op)
    with pytest.raises(shardweave.UnsupportedError, match="avg"):
        scatter(y.int(), x.int(), dist.group.WORLD, dist.ReduceOp.AVG)
    with pytest.raises(shardweave.ArgumentError, match="4 times as large"):
        gather(x[:3], y, dist.group.WORLD)
    with pytest.raises(shardweave.ArgumentError, match="call fully_shard first"):
        shardweave.adapt_fsdp(made())


@pytest.mark.parametrize("world", WORLDS)
def test_collectives_alone(world: str) -> None:
    run_ranks(collectives_alone, 4, world, environment={"SHARDWEAVE_WORLD": world})


def one_rank(rank: int) -> float:
    mesh, x = made_mesh((1,)), [[batch(rank, 0)]]
    return difference(train(adapted(shard(mesh, MixedPrecisionPolicy())), x), train(made(), x))


def test_one_rank() -> None:
    assert run_ranks(one_rank, 1) == [0]


def on_a_backend_without_worlds(rank: int) -> str:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2)
    with pytest.raises(shardweave.UnsupportedError) as caught:
        adapted(shard(made_mesh((2,)), MixedPrecisionPolicy()))
    return str(caught.value)


def test_a_backend_without_worlds_is_refused_when_adapting() -> None:
    assert "fake" in run_ranks(on_a_backend_without_worlds, 1)[0]
