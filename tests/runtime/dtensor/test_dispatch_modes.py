"""Redistributions under dispatch modes: selective activation checkpointing, counting modes, delegation to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from variants import crossed

import shardweave
from shardweave.errors import UnsupportedError
from shardweave.integrations.autoparallel import redistribute_local_tensor

pytestmark = pytest.mark.multi
R, S0, S1 = Replicate(), Shard(0), Shard(1)
_c10d: Any = torch.ops._c10d_functional
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_NONE = nullcontext()
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_GATHER = _c10d.all_gather_into_tensor.default


class Recorder(TorchDispatchMode):
    """An unknown mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def collectives(self) -> int:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
        return sum(self.seen[f"_c10d_functional.{name}.default"] for name in names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Blocks under tensor and sequence parallelism, each a checkpointed region."""

    def __init__(self, mesh: DeviceMesh, contexts: Callable[[], Any] | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.contexts = contexts
        for block in self.blocks:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=S0, use_local_output=False),
                "down": RowwiseParallel(output_layouts=S0, use_local_output=False),
            }
            parallelize_module(block, mesh, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.contexts is None:
                x = block(x)
            else:
                # Checkpoint to the end of the region, as torchtitan does: otherwise its last part is never recomputed.
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts, early_stop=False)
        return x


def every_second_matmul() -> Callable[..., CheckpointPolicy]:
    """torchtitan's default policy: save reduce-scatters and every other matmul."""
    count = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in MATMULS:
            assert args[1].ndim == 2
            count["matmuls"] += 1
        saves = operator is REDUCE_SCATTER or (operator in MATMULS and count["matmuls"] % 2)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


SAVED: dict[str, Callable[[], Any]] = {
    "nothing": lambda: [],
    "matmuls": lambda: MATMULS,
    "reduce-scatters": lambda: [*MATMULS, REDUCE_SCATTER],
    "all-gathers": lambda: [ALL_GATHER],
    "waits": lambda: [_c10d.wait_tensor.default],
    "both": lambda: [REDUCE_SCATTER, ALL_GATHER],
    "as torchtitan": every_second_matmul,
    "everything": lambda: lambda *_, **__: CheckpointPolicy.PREFER_SAVE,
    "by bool": lambda: lambda context, operator, *_, **__: operator is ALL_GATHER,
}


class Step(NamedTuple):
    """The results of a training step: loss and gradients, and the bytes of collectives' results that regions saved."""

    values: list[torch.Tensor]
    saved_bytes: int


def trained(mesh: DeviceMesh, saved: str | None, forward: Any = _NONE, backward: Any = _NONE) -> Step:
    """A training step, with forward and backward each in a context."""
    regions: list[Any] = []

    def contexts() -> Any:
        made = create_selective_checkpoint_contexts(SAVED[saved or ""]())
        regions.append(made[0])
        return made

    model = Model(mesh, None if saved is None else contexts)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    source = distribute_tensor(x, mesh, [S0], src_data_rank=None).requires_grad_()
    with forward:
        loss = model(source).square().sum()
    kept = {}
    for region in regions:
        for operator, outputs in region.storage.items():
            if not isinstance(operator, str) and operator.namespace in ("_c10d_functional", "shardweave"):
                found = [
                    output.val
                    for output in (outputs.values() if isinstance(outputs, dict) else outputs)
                    if hasattr(output, "val")
                ]
                found = [y.elem if isinstance(y, AsyncCollectiveTensor) else y for y in found]
                kept |= {y.untyped_storage().data_ptr(): y.numel() * y.itemsize for y in found}
    with backward:
        loss.backward()
    gradients = [source.grad, *(p.grad for p in model.parameters())]
    whole = [loss.full_tensor().detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)]
    return Step(whole, sum(kept.values()))


def close(a: Step, b: Step) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(a.values, b.values, strict=True))


def same(a: Step, b: Step) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.values, b.values, strict=True))


def exchanges() -> int:
    """The number of programs that were carried out and in which this rank received something."""
    return sum(kind.calls for kind in shardweave.stats().redistributions.values() if kind.bytes_received)


def checkpointed(rank: int, policies: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stats = shardweave.stats()
    with Recorder() as seen:
        torchs_plain = trained(mesh, None)
    torchs_fewest = seen.collectives()
    with shardweave.installed():
        plain = trained(mesh, None)
    fewest = exchanges()
    # The sum of two terms does not depend on the order.
    assert same(plain, torchs_plain) if dist.get_world_size() == 2 else close(plain, torchs_plain)
    recomputed = {"nothing": 4, "matmuls": 4, "waits": 4} | dict.fromkeys(
        ("reduce-scatters", "all-gathers", "as torchtitan", "by bool"), 2
    )
    for saved in policies:
        # Below the region's own mode, so that it sees the calls of the region.
        with Recorder() as seen:
            stock = trained(mesh, saved)
        stats.reset()
        with shardweave.installed():
            ours = trained(mesh, saved)
        assert same(stock, torchs_plain) and same(ours, plain), saved
        assert not stats.delegations, (saved, stats.delegations)
        # Policies are not called for waits: torch saves the wait, and issues the collective again.
        # torch saves uneven shards padded.
        if saved == "waits" or 8 % dist.get_world_size():
            assert ours.saved_bytes <= stock.saved_bytes, saved
        else:
            assert ours.saved_bytes == stock.saved_bytes, saved
        again = recomputed.get(saved, 0)
        assert exchanges() - fewest == seen.collectives() - torchs_fewest == again, saved


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        (4, "shared_memory"),
        pytest.param(3, "process_group", marks=pytest.mark.long),
    ],
)
def test_selective_checkpointing_saves_and_recomputes_like_torch(size: int, transport: str) -> None:
    policies = {3: tuple(SAVED), 4: ("both", "as torchtitan")}
    run_ranks(checkpointed, size, policies[size], environment={"SHARDWEAVE_TRANSPORT": transport})


def forward_under_other_modes(rank: int, saved: str) -> None:
    """Recomputation repeats the forward, whatever modes are active then."""
    mesh = init_device_mesh("cpu", (2,))
    stats, plain = shardweave.stats(), trained(mesh, None)
    with shardweave.installed():
        for forward, backward, left in (
            (Recorder(), _NONE, 4),
            (CommDebugMode(), _NONE, 4),
            (_NONE, Recorder(), 0),
            (Recorder(), Recorder(), 4),
            (FlopCounterMode(display=False), FlopCounterMode(display=False), 0),
        ):
            stats.reset()
            assert same(trained(mesh, saved, forward, backward), plain)
            if left:
                # Explicitly in forward, and again in backward.
                assert stats.delegations.total() >= 2 * left, (saved, stats.delegations)
            elif isinstance(backward, Recorder):
                # Backward's own redistributions are left to torch; recomputed ones are not.
                before = stats.delegations.total()
                stats.reset()
                trained(mesh, None, _NONE, Recorder())
                assert stats.delegations.total() == before
            else:
                assert not stats.delegations
    # Torch alone carries out the forward and the recomputation.
    stats.reset()
    assert same(trained(mesh, saved, backward=shardweave.installed()), plain)
    reasons = stats.delegations
    assert set(reasons) == {"_CachedTorchDispatchMode recomputes what torch carried out"} and stats.calls
    if saved == "nothing" and torch.__version__ < (2, 13):
        # Torch then matches recomputed operators with those that were saved only.
        assert same(trained(mesh, saved, forward=shardweave.installed()), plain)
        return
    with pytest.raises(RuntimeError, match="encountered during backward,? but not found in storage"):
        trained(mesh, saved, forward=shardweave.installed())


@crossed("saved", ("nothing", "both", "as torchtitan"), gate=lambda saved: saved == "as torchtitan")
def test_recomputation_repeats_the_forward(saved: str) -> None:
    run_ranks(forward_under_other_modes, 2, saved)


def sharded_as_well(rank: int) -> None:
    """Tensor parallelism, checkpointed blocks and FSDP2 around them, as in torchtitan."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stats = shardweave.stats()

    def gradients(saved: str | None, ours: bool) -> list[torch.Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, SAVED[saved]()) if saved else None
        model = Model(mesh["tp"], None)
        for i, block in enumerate(model.blocks):
            if contexts is not None:
                model.blocks[i] = checkpoint_wrapper(block, context_fn=contexts, early_stop=False)
            fully_shard(model.blocks[i], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
        if ours:
            shardweave.fsdp.adapt_fsdp(model)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
        with shardweave.installed() if ours else _NONE:
            model(distribute_tensor(x, mesh["tp"], [S0], src_data_rank=None)).square().sum().backward()
        return [p.grad.to_local() for p in model.parameters()]

    plain = gradients(None, False)
    for saved in (None, "nothing", "as torchtitan"):
        stats.reset()
        for a, b in zip(gradients(saved, True), plain, strict=True):
            assert torch.equal(a, b), saved  # the sum of two terms does not depend on the order
        assert stats.calls and not stats.delegations, stats.delegations


def test_fsdp_around_selectively_checkpointed_blocks() -> None:
    run_ranks(sharded_as_well, 4)


def some_left_to_torch(rank: int) -> None:
    """A region in which torch carries out some redistributions: each finds its own saved result."""
    mesh = init_device_mesh("cpu", (2,))

    def region(x: DTensor, y: DTensor) -> torch.Tensor:
        found = x.redistribute(placements=[R]) * y.redistribute(placements=[R])
        partial = DTensor.from_local(found.to_local().sin(), mesh, [Partial()], run_check=False)
        with Recorder():
            again = y.redistribute(placements=[R]).cos()
        return (partial.redistribute(placements=[S0]).redistribute(placements=[R]) * again).to_local()

    def gradients(saved: str | None) -> list[torch.Tensor]:
        inputs = [torch.arange(8.0) / 9, torch.arange(8.0, 16) / 9]
        x, y = (distribute_tensor(t, mesh, [S0], src_data_rank=None).requires_grad_() for t in inputs)
        context = partial(create_selective_checkpoint_contexts, SAVED[saved]()) if saved else None
        options = {"use_reentrant": False, "early_stop": False}
        out = checkpoint(region, x, y, context_fn=context, **options) if context else region(x, y)
        out.square().sum().backward()
        return [x.grad.full_tensor(), y.grad.full_tensor()]

    plain = gradients(None)
    for saved in SAVED:
        for only in (mesh, []):
            with shardweave.installed(only=only):
                assert all(torch.equal(a, b) for a, b in zip(gradients(saved), plain, strict=True)), saved
    assert "a mesh that install(only=) leaves out" in shardweave.stats().delegations


def test_checkpointed_regions_with_delegations() -> None:
    run_ranks(some_left_to_torch, 2)


def questions(x: DTensor, target: tuple[Placement, ...]) -> list[tuple]:
    """The collectives that a policy is called with, and their arguments."""
    found = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert not context.is_recompute and operator.namespace != "shardweave"
        if operator.namespace == "_c10d_functional" and not any(s in str(operator) for s in ("autograd", "wait")):
            assert isinstance(args[0], torch.Tensor)
            found.append((operator, *args[1:]))
        return CheckpointPolicy.PREFER_RECOMPUTE

    with create_selective_checkpoint_contexts(policy)[0] as region:
        x.redistribute(placements=target)
    assert region.policy_fn is policy
    return found


def policy_arguments(rank: int) -> None:
    """Policies are called with the same arguments as by torch."""
    line, plane = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pairs = [
        (line, (S0,), (R,)),
        (line, (S0,), (S1,)),
        (line, (Partial(),), (R,)),
        (line, (Partial("max"),), (S1,)),
        (plane, (S0, S1), (R, S1)),
        (plane, (S0, S1), (S0, R)),
        (plane, (Partial(), R), (S0, R)),
        (plane, (S0, Partial("avg")), (S0, R)),
        (plane, (S0, S0), (R, R)),
        (plane, (Partial(), Partial()), (S0, R)),
        (plane, (Partial(), S0), (S0, S0)),
    ]
    for mesh, source, target in pairs:
        x = DTensor.from_local(torch.arange(16.0).reshape(4, 4), mesh, source, run_check=False)
        torchs = questions(x, target)
        with shardweave.installed():
            ours = questions(x, target)
        assert ours == torchs != [], (source, target)
    assert not shardweave.stats().delegations


def test_policies_receive_torch_collectives() -> None:
    run_ranks(policy_arguments, 4)


def what_modes_see(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [S0], src_data_rank=None)
    w = distribute_tensor(torch.ones(2, 4), mesh, [R], src_data_rank=None)
    stats = shardweave.stats()

    def run() -> torch.Tensor:
        return (x.redistribute(placements=[S1]).redistribute(placements=[R], async_op=True) @ w).full_tensor()

    with FlopCounterMode(display=False) as stock:
        run()
    with CommDebugMode() as torchs:
        expected = run()
    with shardweave.installed():
        with FlopCounterMode(display=False) as flops:
            assert run().equal(expected)
        assert flops.get_total_flops() == stock.get_total_flops() > 0
        with MemTracker() as memory:
            before = memory.get_tracker_snapshot("current").get(torch.device("cpu"), {}).get("Total", 0)
            kept = x.redistribute(placements=[R])
            after = memory.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
            assert after - before == 12 * 4 and kept.full_tensor().equal(x.full_tensor())
        assert stats.calls.total() >= 4 and not stats.delegations
        # Modes see complete tensors.
        with create_selective_checkpoint_contexts([])[0]:
            assert type(x.redistribute(placements=[R], async_op=True)._local_tensor) is torch.Tensor
            average = DTensorSpec(mesh, (Partial("avg"),), TensorMeta((6, 2), (2, 1), torch.float32))
            replicated = DTensorSpec(mesh, (R,), average.tensor_meta)
            local = torch.ones(6, 2)
            assert redistribute_local_tensor(local, replicated, average).data_ptr() != local.data_ptr()
        assert not stats.delegations
        calls = stats.calls.total()
        with CommDebugMode() as counted:
            assert run().equal(expected)
        assert counted.get_comm_counts() == torchs.get_comm_counts() and stats.calls.total() == calls
        with DebugMode(record_torchfunction=False) as debug:
            run()
        assert "redistribute_input" in debug.debug_string() or "all_gather" in debug.debug_string()
        with FakeTensorMode(allow_non_fake_inputs=True):
            x.redistribute(placements=[R])
        with Recorder() as seen:
            run()
        assert seen.collectives() and stats.calls.total() == calls
    assert set(stats.delegations) == {
        "CommDebugMode reports torch's own collectives",
        "DebugMode reports torch's own collectives",
        "Recorder is a dispatch mode not known",
    }
    # Unsupported requests raise under a mode as without one.
    stats.reset()
    bits = DTensor.from_local(torch.tensor([3 << rank], dtype=torch.int32), mesh, (Partial("band"),), run_check=False)
    with shardweave.installed(), create_selective_checkpoint_contexts([])[0]:
        assert bits.redistribute(placements=[R]).to_local().tolist() == [2]
    assert [reason[:17] for reason in stats.delegations] == ["placement P(band)"]
    # shardweave.redistribute itself is never delegated: any mode sees one operator.
    with Recorder() as seen:
        assert shardweave.redistribute(x, [S1]).full_tensor().equal(x.full_tensor())
    assert seen.seen["shardweave.redistribute.default"] == 1
    # No mode sees a batch. Where tensors have no memory, the results have none.
    with Recorder() as seen:
        (out,) = shardweave.redistribute_batch([x], [[S1]])
    assert not seen.seen and out.full_tensor().equal(x.full_tensor())
    with FakeTensorMode(allow_non_fake_inputs=True):
        outs = [shardweave.redistribute(x, [S1]), *shardweave.redistribute_batch([x], [[S1]])]
        assert all(type(out._local_tensor) is FakeTensor and out._local_tensor.shape == (6, 1) for out in outs)
        with pytest.raises(UnsupportedError, match="a fake tensor mode is"):
            shardweave.prepare_redistribute(x, [S1])
    assert shardweave.redistribute(x, [S1]).full_tensor().equal(x.full_tensor())
    shardweave.fsdp.FSDPAllGather()(torch.empty(4), torch.ones(2), dist.group.WORLD)
    with Recorder() as seen:
        out = torch.empty(4)
        shardweave.fsdp.FSDPAllGather()(out, torch.full((2,), float(rank)), dist.group.WORLD)
        seen.seen.pop("aten.empty.memory_format")
        seen.seen.pop("aten.full.default")
    assert not seen.seen and out.tolist() == [0, 0, 1, 1]


def test_operators_seen_by_each_dispatch_mode() -> None:
    run_ranks(what_modes_see, 2)


def two_backward_passes(rank: int) -> None:
    """A region that saves nothing may be recomputed again, by the decisions of its forward."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [S0], src_data_rank=None).requires_grad_()

    def block(y: DTensor) -> DTensor:
        return y.redistribute(placements=[R]).square().redistribute(placements=[S0]).sin()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    gradients = []
    stats = shardweave.stats()
    with shardweave.installed():
        loss = checkpoint(block, x, use_reentrant=False, context_fn=contexts).to_local().sum()
        for _ in range(2):
            x.grad = None
            loss.backward(retain_graph=True)
            gradients.append(x.grad.to_local())
    assert not stats.delegations, stats.delegations
    assert gradients[0].equal(gradients[1])
    whole = torch.arange(12.0).reshape(6, 2).requires_grad_()
    whole.square().sin().sum().backward()
    assert torch.allclose(gradients[0], whole.grad.chunk(2)[rank])


def test_recomputation_in_two_backward_passes() -> None:
    run_ranks(two_backward_passes, 2)


def traced_on_part_of_a_mesh(rank: int) -> None:
    """What first reads the ranks of a mesh is a tracer."""
    shardweave.install()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(x, mesh, [S0]).redistribute(placements=[R]).to_local()

    x = torch.full((2, 3), float(rank))
    graph = make_fx(gathered, tracing_mode="fake")(x)
    assert shardweave.stats().traced.total() == 1 and not shardweave.stats().delegations
    assert graph(x).equal(gathered(x))


def test_make_fx_on_part_of_a_mesh() -> None:
    run_ranks(traced_on_part_of_a_mesh, 4)
