"""FSDP2 on shardweave's transports, against FSDP2 on gloo and against plain float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, TransportError, UnsupportedError

pytestmark = pytest.mark.multi

TRANSPORTS = ("shared_memory", "process_group")
STEPS = 3


class Model(torch.nn.Module):
    """Odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = torch.nn.Linear(7, 13), torch.nn.Linear(13, 9), torch.nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def in_order(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Sum in the order of the list, 16-bit floats in float32, rounded once."""
    wide = [x.float() if x.dtype.itemsize == 2 else x for x in inputs]
    total = wide[0].clone()
    for x in wide[1:]:
        total += x
    return (total / len(inputs) if op == dist.ReduceOp.AVG else total).to(inputs[0].dtype)


class InOrder(DefaultReduceScatter):
    """The expected result of shardweave's reduce-scatter, bitwise, from a gather of all inputs."""

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
            # gloo has no AVG and no PREMUL_SUM, so FSDP itself divides.
            part.set_force_sum_reduction_for_comms(sum_only)
            if factor is not None:
                part.set_gradient_divide_factor(factor)
    return model


def adapted(model: Model) -> Model:
    shardweave.fsdp.adapt_fsdp(model)
    return model


def summed_in_order(model: Model) -> Model:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(InOrder())
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, batches: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The gradients and parameters after each step."""
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
    """The largest difference, relative to the largest value of its tensor."""
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


# Each mesh, dtype and transport.
@crossed(
    "shape, transport, low", ((2,), (4,), (2, 2)), TRANSPORTS, (False, True), ids=str,
    gate=lambda *of: of
    in (((2,), "process_group", True), ((4,), "process_group", False), ((2, 2), "shared_memory", True)),
)  # fmt: skip
def test_adapted_training_matches_fsdp(shape: tuple[int, ...], transport: str, low: bool) -> None:
    size = 2 if shape == (2,) else 4
    ends = run_ranks(train_all_ways, size, shape, low, environment={"SHARDWEAVE_TRANSPORT": transport})
    for calls, from_expected, from_stock, from_exact in ends:
        # A step gathers three modules forward and two backward (the root stays whole), and reduces three.
        assert calls == {transport: 8 * STEPS}
        assert from_expected == 0
        # The sum of two terms does not depend on the order, and halving is exact.
        assert from_stock <= (0 if shape != (4,) else 2**-4 if low else 2**-20)
        assert from_exact <= (0.25 if low else 2**-20)


def gradients_multiplied(rank: int) -> tuple[int, float]:
    """FSDP passes PREMUL_SUM for a gradient divide factor."""
    mesh, x = made_mesh((2,)), [[batch(rank, 0)]]
    stock = train(shard(mesh, MixedPrecisionPolicy(), sum_only=True, factor=3), x)
    ours = train(adapted(shard(mesh, MixedPrecisionPolicy(), factor=3)), x)
    return sum(shardweave.stats().calls.values()), difference(ours, stock)


def test_gradient_divide_factor() -> None:
    for calls, off in run_ranks(gradients_multiplied, 2):
        assert calls == 8
        assert off < 2**-20


def other_ways_through_fsdp(rank: int) -> None:
    mesh, x = made_mesh((2,)), batch(rank, 0)
    expected = made()(x)
    model = adapted(shard(mesh, MixedPrecisionPolicy()))
    with torch.inference_mode():  # a separate model, since FSDP keeps inference buffers
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
    # With gradient accumulation only the last backward reduces.
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fsdp_options(transport: str) -> None:
    run_ranks(other_ways_through_fsdp, 2, environment={"SHARDWEAVE_TRANSPORT": transport})


def collectives_alone(rank: int, transport: str) -> None:
    gather, scatter = shardweave.fsdp.FSDPAllGather(), shardweave.fsdp.FSDPReduceScatter()
    here = torch.device("cpu")
    groups = [dist.group.WORLD, *(dist.new_group(ranks) for ranks in ([0, 2, 3], [1]))]
    for group, dtype, n in product(groups, (torch.float32, torch.bfloat16, torch.float16, torch.float64), (0, 1, 257)):
        ranks = dist.get_process_group_ranks(group) if rank in dist.get_process_group_ranks(group) else None
        if ranks is None:
            continue
        size = len(ranks)
        whole = [torch.randn(size, n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in ranks]
        me = group.rank()

        # In place, as FSDP does: the input is a view of the output.
        out = gather.allocate((size * n,), dtype=dtype, device=here).fill_(float("nan"))
        part = out.narrow(0, n * me, n).copy_(whole[me][0])
        assert gather(output_tensor=out, input_tensor=part, group=group, async_op=True) is None
        assert torch.equal(out, torch.cat([x[0] for x in whole]))
        # Outputs that were not allocated by `allocate` are written in place.
        theirs = torch.full((2 * size * n,), float("nan"), dtype=dtype)
        gather(theirs[size * n :], whole[me][0], group)
        assert torch.equal(theirs[size * n :], out)
        assert theirs[: size * n].isnan().all()

        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.SUM)):
            kept = whole[me].clone()
            reduced = scatter.allocate((n,), dtype=dtype, device=here).fill_(float("nan"))
            assert scatter(reduced, kept.view(-1), group, op) is None
            summed = in_order([x[me] for x in whole], op)
            if transport == "hierarchical":  # the ranks of a node add first, and round
                most = 2 * torch.finfo(dtype).eps * sum(x[me].double().abs() for x in whole)
                assert ((reduced.double() - summed.double()).abs() <= most).all(), (dtype, n, op)
            else:
                assert torch.equal(reduced, summed), (dtype, n, op)
            assert torch.equal(kept, whole[me])
    assert set(shardweave.stats().calls) == {transport}
    x, y = torch.zeros(4), torch.zeros(1)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.PREMUL_SUM):
        with pytest.raises(UnsupportedError, match=op.name):
            scatter(y, x, dist.group.WORLD, op)
    with pytest.raises(UnsupportedError, match="avg"):
        scatter(y.int(), x.int(), dist.group.WORLD, dist.ReduceOp.AVG)
    with pytest.raises(ArgumentError, match="4 times as large"):
        gather(x[:3], y, dist.group.WORLD)
    for change in (shardweave.fsdp.adapt_fsdp, shardweave.fsdp.restore_fsdp):
        with pytest.raises(ArgumentError, match="^module: 'model'; allowed: a torch.nn.Module$"):
            change("model")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="call fully_shard first"):
            change(made())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_without_fsdp(transport: str) -> None:
    run_ranks(collectives_alone, 4, transport, environment={"SHARDWEAVE_TRANSPORT": transport})


def one_rank(rank: int) -> float:
    mesh, x = made_mesh((1,)), [[batch(rank, 0)]]
    return difference(train(adapted(shard(mesh, MixedPrecisionPolicy())), x), train(made(), x))


def test_adapt_fsdp_on_one_rank() -> None:
    assert run_ranks(one_rank, 1) == [0]


def on_a_backend_without_transports(rank: int) -> str:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for part, size in ((model[0], 1), (model[1], 2)):  # the first alone could be adapted
        fully_shard(part, mesh=DeviceMesh("cpu", list(range(size))))
    before = comms_of(model)
    with pytest.raises(UnsupportedError) as caught:
        shardweave.fsdp.adapt_fsdp(model)
    assert comms_of(model) == before
    return str(caught.value)


def test_unsupported_backend_adapts_no_module() -> None:
    (message,) = run_ranks(on_a_backend_without_transports, 1)
    assert "module: '1'" in message and "fake" in message


def comms_of(model: torch.nn.Module) -> list[Any]:
    """The collectives of each of FSDP2's parameter groups."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    # torch 2.11 has one group for each module.
    several = [s._fsdp_param_groups if hasattr(s, "_fsdp_param_groups") else [s._fsdp_param_group] for s in states]
    groups = [group for groups in several for group in groups]
    return [comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)]


class Block(torch.nn.Module):
    """A layer on all ranks, and experts that are sharded along the mesh dim "ep"."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(7, 7)
        torch.manual_seed(50 + at)
        self.experts = torch.nn.Parameter(torch.randn(5, 7, 7) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.einsum("bi,eij->bj", x, self.experts).relu()


def shard_experts(mesh: DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(0)
    at = mesh.get_local_rank("ep")
    model = torch.nn.Sequential(Block(at), torch.nn.Linear(7, 7), Block(at))
    for linear in (model[0].layer, model[1], model[2].layer):
        torch.manual_seed(9)
        torch.nn.init.uniform_(linear.weight)
    among = _fsdp_common.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)

    def placement(parameter: torch.nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(None, among) if parameter.ndim == 3 else None

    for part in (*model, model):
        fully_shard(part, mesh=mesh["shard", "ep"]._flatten("all"), shard_placement_fn=placement)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # gloo has no AVG
            part.set_force_sum_reduction_for_comms(True)
    return model


def parameters_on_several_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    mine = [[batch(rank, step)] for step in range(STEPS)]
    oracle = shard_experts(mesh)
    for part in (oracle[0], oracle[1], oracle[2]):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group._reduce_scatter_comm = InOrder()
    assert [len(m._get_fsdp_state()._fsdp_param_groups) for m in oracle] == [2, 1, 2]
    expected = train(oracle, mine)
    assert not shardweave.stats().calls
    model = shard_experts(mesh)
    before = comms_of(model)
    shardweave.fsdp.adapt_fsdp(model)
    ours = comms_of(model)
    assert {type(comm) for comm in ours} == {shardweave.fsdp.FSDPAllGather, shardweave.fsdp.FSDPReduceScatter}
    shardweave.fsdp.adapt_fsdp(model[0])  # a second call has no effect
    assert comms_of(model) == ours
    found = train(model, mine)
    # Five groups, gathered forward and backward and reduced.
    assert sum(shardweave.stats().calls.values()) == 15 * STEPS and not shardweave.stats().delegations
    # Experts are compared shard by shard.
    assert difference(found, expected) == 0

    # A part, then the rest. A collective that was set since is kept.
    shardweave.fsdp.restore_fsdp(model[0])
    assert comms_of(model)[:4] == before[:4] and comms_of(model)[4:] == ours[4:]
    own = DefaultReduceScatter()
    model[1].set_custom_reduce_scatter(own)
    shardweave.fsdp.restore_fsdp(model)
    shardweave.fsdp.restore_fsdp(model)
    assert comms_of(model) == [own if i == 5 else comm for i, comm in enumerate(before)]
    shardweave.stats().reset()
    train(model, mine)
    assert not shardweave.stats().calls
    shardweave.fsdp.adapt_fsdp(model)
    shardweave.fsdp.restore_fsdp(model)
    assert comms_of(model)[5] is own


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP2 has one group for each module before torch 2.12")
def test_modules_with_parameters_on_several_meshes_are_adapted_and_restored() -> None:
    run_ranks(parameters_on_several_meshes, 4)


def spread(values: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """The same elements with other strides; the memory between them holds 99."""
    room = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 3
    x = values.new_full((max(room, 0) + 1,), 99).as_strided(shape, strides, offset)
    return x.copy_(values.view(shape))


def same_order(v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors with the elements of `v` [n] in the same order, in various memory layouts."""
    n = len(v)
    found = {
        "contiguous": v.clone(),
        "stride 2": spread(v, (n,), (2,)),
        "offset": spread(v, (n,), (1,), 3),
        "neg": torch._neg_view(-v),
    }
    if n == 1:
        found |= {"0-d": v.reshape(()).clone(), "stride 5 of one": spread(v, (1,), (5,))}
    if n % 6 == 0:
        found |= {
            "columns": spread(v, (n // 3, 3), (1, max(n // 3, 1))),
            "part of rows": spread(v, (n // 3, 3), (7, 2), 1),
            "three dims": spread(v, (2, n // 6, 3), (3, 6, 1)),
        }
    if v.is_complex():
        found["conj"] = v.conj().resolve_conj().conj()
    return found


def numbers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact."""
    draw = torch.Generator().manual_seed(17 * n + rank)
    if dtype.is_complex:
        return torch.complex(*(torch.randint(-9, 10, (n,), generator=draw).float() for _ in range(2))).to(dtype)
    return torch.randint(-9, 10, (n,), generator=draw).to(dtype)


def however_tensors_lie(rank: int, transport: str) -> None:
    gather, scatter = shardweave.fsdp.FSDPAllGather(), shardweave.fsdp.FSDPReduceScatter()
    group, size = dist.group.WORLD, dist.get_world_size()

    def outputs(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
        empty = torch.full((n,), 99, dtype=dtype)
        own = gather.allocate((n,), dtype=dtype, device=torch.device("cpu")).fill_(99)
        return [own, *same_order(empty).values()]

    for n, dtype in product((0, 1, 6), (torch.float32, torch.bfloat16, torch.complex64, torch.int32)):
        mine = same_order(numbers(rank, n, dtype)) | {"expanded": numbers(rank, 1, dtype).expand(n)}
        whole = same_order(numbers(rank, n * size, dtype))
        for turn in range(max(len(mine), len(whole), len(outputs(n * size, dtype)))):
            # Each rank has another memory layout.
            x = list(mine.values())[(turn + rank) % len(mine)]
            before, everything = x.clone(), torch.empty(n * size, dtype=dtype)
            dist.all_gather_into_tensor(everything, x.resolve_conj().resolve_neg().reshape(-1).contiguous())
            all_outputs = outputs(n * size, dtype)
            out = all_outputs[(turn + 2 * rank) % len(all_outputs)]
            gather(out, x, group)
            assert torch.equal(out.reshape(-1), everything) and torch.equal(x, before), (n, dtype, turn)
            room = everything.new_empty(0).set_(out.untyped_storage())
            assert (room == 99).sum() == len(room) - n * size, "memory between the elements was written"

            x = list(whole.values())[(turn + rank) % len(whole)]
            before, everything = x.clone(), torch.empty(size, n * size, dtype=dtype)
            dist.all_gather_into_tensor(everything.view(-1), x.resolve_conj().resolve_neg().reshape(-1).contiguous())
            wide = torch.complex128 if dtype.is_complex else torch.float64
            expected = everything.to(wide).sum(0)[n * rank : n * (rank + 1)].to(dtype)
            all_outputs = outputs(n, dtype)
            out = all_outputs[(turn + 2 * rank) % len(all_outputs)]
            scatter(out, x, group, dist.ReduceOp.SUM)
            assert torch.equal(out.reshape(-1), expected) and torch.equal(x, before), (n, dtype, turn)

    # The pending result of another collective.
    late = funcol.all_reduce(torch.full((2,), rank + 1.0), "sum", group)
    assert type(late) is funcol.AsyncCollectiveTensor
    out = torch.empty(2 * size)
    gather(out, late, group)
    assert (out == sum(range(1, size + 1))).all()

    # Outputs that overlap their inputs, differently on each rank.
    buffer = torch.full((4 * size + 8,), 99.0)
    for at in range(9):
        start = (at + rank) % 9
        values = numbers(rank, 4, torch.float32)
        buffer[start : start + 4] = values
        gather(buffer[4 : 4 + 4 * size], buffer[start : start + 4], group)
        assert torch.equal(buffer[4 : 4 + 4 * size], torch.cat([numbers(r, 4, torch.float32) for r in range(size)]))
        values = numbers(rank, 4 * size, torch.float32)
        buffer[4 : 4 + 4 * size] = values
        scatter(buffer[start : start + 4], buffer[4 : 4 + 4 * size], group, dist.ReduceOp.SUM)
        summed = sum(numbers(r, 4 * size, torch.float32) for r in range(size))
        assert torch.equal(buffer[start : start + 4], summed[4 * rank : 4 * rank + 4])
    assert set(shardweave.stats().calls) == {transport}


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        pytest.param("shared_memory", 5, marks=pytest.mark.long),
        ("process_group", 3),
        pytest.param("hierarchical", 5, marks=pytest.mark.long),
        ("symmetric_memory", 3),
    ],
)
def test_collectives_of_strided_and_lazy_tensors(transport: str, size: int) -> None:
    chosen = {"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {"SHARDWEAVE_TRANSPORT": transport}
    run_ranks(however_tensors_lie, size, transport, environment=chosen)


def refused_by_all_alike(rank: int, transport: str) -> None:
    gather, scatter = shardweave.fsdp.FSDPAllGather(), shardweave.fsdp.FSDPReduceScatter()
    group, size = dist.group.WORLD, dist.get_world_size()
    other = dist.new_group([1])
    n = 3
    x, out = torch.full((n,), float(rank)), torch.full((n * size,), -1.0)
    with torch.inference_mode():
        inference = torch.empty(n * size)
    mesh = init_device_mesh("cpu", (size,))
    wrong = [
        (lambda: gather(out, DTensor.from_local(x, mesh), group), "input_tensor: a DTensor; allowed"),
        (lambda: gather(out.to("meta"), x, group), "output_tensor: on the meta device, which has no data"),
        (
            lambda: gather(torch.zeros(1).expand(n * size), x, group),
            "output_tensor: .* no two elements in the same memory",
        ),
        (lambda: gather(inference, x, group), "output_tensor: made under torch.inference_mode"),
        (lambda: gather(x, x, other), "group: .*; allowed: a process group that this rank is in"),
        (lambda: scatter(x[:2], out, group, dist.ReduceOp.SUM), "as large as the other"),
    ]
    for turn, (call, text) in enumerate(wrong):
        # A group without this rank has no known peers.
        if rank == 0 or not text.startswith("group"):
            with pytest.raises(ArgumentError, match=text):
                call()
        out.fill_(-1)
        gather(out, x + turn, group)
        assert torch.equal(out, torch.arange(size).repeat_interleave(n) + float(turn))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_next_collective_works_after_all_ranks_refuse(transport: str) -> None:
    run_ranks(
        refused_by_all_alike, 3, transport, environment={"SHARDWEAVE_TRANSPORT": transport, "SHARDWEAVE_TIMEOUT": "30"}
    )


def refused_on_one_rank(rank: int, transport: str) -> str:
    """Rank 0 refuses an output, catches the error, and makes the next call with the same arguments."""
    gather, group, size = shardweave.fsdp.FSDPAllGather(), dist.group.WORLD, dist.get_world_size()
    outcomes = []
    for turn in range(3):
        out = torch.full((3 * size,), -1.0)
        given = torch.zeros(1).expand(3 * size) if rank == 0 and turn == 1 else out
        try:
            gather(given, torch.full((3,), float(rank + turn)), group)
            right = torch.equal(out, (torch.arange(size) + float(turn)).repeat_interleave(3))
            outcomes.append("right" if right else "wrong")
        except (ArgumentError, TransportError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return "; ".join(outcomes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collective_refused_on_one_rank_raises_on_its_peers(transport: str) -> None:
    outcomes = run_ranks(
        refused_on_one_rank, 3, transport, environment={"SHARDWEAVE_TRANSPORT": transport, "SHARDWEAVE_TIMEOUT": "30"}
    )
    assert not any("wrong" in text for text in outcomes) and all(text.startswith("right; ") for text in outcomes), (
        outcomes
    )
    assert "ArgumentError: output_tensor" in outcomes[0], outcomes
    assert any("rank 0 refused its arguments in call 2" in text for text in outcomes[1:]), outcomes
