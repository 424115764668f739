"""`install()` against torch without it: wrong data, lost orders, dtypes, options, observers, counters."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed.tensor._redistribute as torch_redistribute
from rank_processes import run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import shardweave
from shardweave.errors import ArgumentError, MeetingTimeoutError, PeerError
from shardweave.integrations.autoparallel import ordered_redistribute_local_tensor

pytestmark = pytest.mark.multi
TWICE = hasattr(torch_redistribute, "NestedRedistribute")  # whether torch's own is differentiable twice
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def cut(x: torch.Tensor, mesh: DeviceMesh, order: dict[int, tuple[int, ...]]) -> torch.Tensor:
    """This rank's shard, by torch.chunk in the order of the cuts."""
    coordinate = mesh.get_coordinate()
    for dim, mesh_dims in order.items():
        for m in mesh_dims:
            parts = [*x.chunk(mesh.size(m), dim), *[x.narrow(dim, 0, 0)] * mesh.size(m)]
            x = parts[coordinate[m]]
    return x.contiguous()


def held(x: torch.Tensor, mesh: DeviceMesh, placements: Any, order: dict[int, tuple[int, ...]]) -> DTensor:
    """A DTensor made by slicing, without redistribution."""
    meta = TensorMeta(x.shape, x.stride(), x.dtype)
    entries = tuple((d, order[d]) for d in sorted(order))
    spec = DTensorSpec(mesh, tuple(placements), meta)
    if entries:
        spec = shardweave.runtime.dtensor.ordered_local._in_order("source", spec, dict(entries))
    return DTensor(cut(x, mesh, order), spec, requires_grad=False)


def right(got: DTensor, x: torch.Tensor, order: dict[int, tuple[int, ...]]) -> bool:
    local, want = got._local_tensor, cut(x, got.device_mesh, order)
    return local.shape == want.shape and bool(local.equal(want))


def uneven_nested_gather(mesh: DeviceMesh, n: int) -> bool:
    mesh["a", "b"]._flatten()
    x = whole(n)
    got = held(x, mesh, (S0, S0), {0: (0, 1)}).redistribute(placements=(R, R))
    return right(got, x, {})


def to_undecodable_strided(mesh: DeviceMesh) -> bool:
    x = whole(24, 12)
    got = held(x, mesh, (S1, R), {1: (0,)}).redistribute(placements=(S0, _StridedShard(1, split_factor=2)))
    want = cut(x, mesh, {0: (0,)})
    pieces = [block.chunk(2, 1)[mesh.get_coordinate()[1]] for block in want.chunk(2, 1)]
    return bool(got._local_tensor.equal(torch.cat(pieces, 1)))


def from_undecodable_strided(mesh: DeviceMesh) -> bool:
    x = whole(24, 12)
    pieces = [block.chunk(2, 0)[mesh.get_coordinate()[0]] for block in x.chunk(2, 0)]
    spec = DTensorSpec(mesh, (_StridedShard(0, split_factor=2), R), TensorMeta(x.shape, x.stride(), x.dtype))
    source = DTensor(torch.cat(pieces).contiguous(), spec, requires_grad=False)
    return right(source.redistribute(placements=(S1, S0)), x, {1: (0,), 0: (1,)})


def order_under_forward_dtype(mesh: DeviceMesh) -> bool:
    x = whole(16)
    source = held(x, mesh, (S0, S0), {0: (1, 0)})
    got = source.redistribute(placements=(R, R), forward_dtype=torch.float64)
    return right(got, x.double(), {})


def another_mesh_same_placements(mesh: DeviceMesh) -> bool:
    x = whole(8, 3)
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("c", "d"))
    got = held(x, mesh, (S0, R), {0: (0,)}).redistribute(other, (S0, R))
    return got.device_mesh == other and right(got, x, {0: (0,)})


def another_mesh(mesh: DeviceMesh) -> bool:
    x = whole(7, 3)
    other = DeviceMesh("cpu", [0, 1, 3])
    got = held(x, mesh, (S0, S1), {0: (0,), 1: (1,)}).redistribute(other, (S0,))
    if other.get_coordinate() is None:
        return got._local_tensor.numel() == 0
    return got.device_mesh == other and right(got, x, {0: (0,)})


def order_only(mesh: DeviceMesh) -> bool:
    x = whole(8, 3)
    got = held(x, mesh, (S0, S0), {0: (1, 0)}).redistribute(placements=(S0, S0))
    return got._spec.shard_order[0].mesh_dims == (0, 1) and right(got, x, {0: (0, 1)})


def flattened_view(mesh: DeviceMesh) -> bool:
    x = whole(4, 8, 3)
    y = held(x, mesh, (R, S1), {1: (1,)}).flatten(0, 1)
    got = y.redistribute(placements=(S0, y.placements[1]))
    return bool(got.full_tensor().equal(x.flatten(0, 1)))


CASES: dict[str, tuple[Any, ...]] = {
    "uneven nested gather of 5": (uneven_nested_gather, 5),
    "uneven nested gather of 6": (uneven_nested_gather, 6),
    "uneven nested gather of 9": (uneven_nested_gather, 9),
    "to an undecodable strided shard": (to_undecodable_strided,),
    "from an undecodable strided shard": (from_undecodable_strided,),
    "shard order under forward_dtype": (order_under_forward_dtype,),
    "another mesh, the same placements": (another_mesh_same_placements,),
    "another mesh": (another_mesh,),
    "another order, the same placements": (order_only,),
}
if torch.__version__ >= "2.12":  # earlier versions of DTensor refused such views
    CASES["a view's strided shard"] = (flattened_view,)


def tried(rank: int, name: str, ours: bool) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    function, *arguments = CASES[name]
    if ours:
        shardweave.install()
    try:
        fine = function(mesh, *arguments)
    except Exception as error:  # torch raises many types
        if ours:
            raise
        return type(error).__name__
    return "right" if fine else "wrong"


@pytest.mark.parametrize("name", CASES)
def test_cases_that_torch_gets_wrong(name: str) -> None:
    """Each case is wrong or refused on some rank without shardweave. The test fails when torch fixes one."""
    assert run_ranks(tried, 4, name, True) == ["right"] * 4
    stock = run_ranks(tried, 4, name, False)
    assert stock != ["right"] * 4, "torch is right now: move the case to the tests against torch"


def all_arguments(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = whole(6, 4)
    source = held(x, mesh, (S0, S1), {0: (0,), 1: (1,)})
    # Shard orders without placements.
    nested = held(x, mesh, (S0, S0), {0: (0, 1)})
    assert right(shardweave.redistribute(nested, shard_order={0: (1, 0)}), x, {0: (1, 0)})
    # Dtypes.
    got = shardweave.redistribute(source, (R, S0), forward_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16 and right(got, x.bfloat16(), {0: (1,)})
    assert got._spec.tensor_meta.dtype == torch.bfloat16
    # In place.
    out = DTensor(torch.full((6, 2), -1.0), held(x, mesh, (R, S1), {1: (1,)})._spec, requires_grad=False)
    pointer = out._local_tensor.data_ptr()
    assert shardweave.redistribute(source, (R, S1), out=out) is out
    assert right(out, x, {1: (1,)}) and out._local_tensor.data_ptr() == pointer
    # Any strides without overlap, such as interleaved steps of 2 and 5.
    apart = torch.zeros(30).as_strided((6, 2), (2, 5))
    wide = DTensor(apart, out._spec, requires_grad=False)
    assert right(shardweave.redistribute(source, (R, S1), out=wide), x, {1: (1,)})
    for strides in ((0, 1), (1, 0), (1, 1), (2, 4), (1, 5), (3, 15)):
        room = torch.full((40,), -1.0)
        local = room.as_strided((6, 2), strides)
        with pytest.raises(
            ArgumentError, match=r"out: its local tensor is \[6, 2\] with strides .*no two elements in the same memory"
        ):
            shardweave.redistribute(source, (R, S1), out=DTensor(local, out._spec, requires_grad=False))
        assert (room == -1).all()
    with torch.inference_mode():
        frozen = DTensor(torch.zeros(6, 2), out._spec, requires_grad=False)
        assert right(shardweave.redistribute(source, (R, S1), out=frozen), x, {1: (1,)})
    for wrong, text in (
        ({"out": frozen}, "out: made in inference mode; allowed: within that mode"),
        ({"out": torch.ones(6, 2)}, "out: Tensor; allowed: a DTensor, or None"),
        ({"out": source}, "out: its layout is .*; allowed: "),
        ({"out": out, "forward_dtype": torch.float64}, r"out: torch.float32\[6, 4\]; allowed: torch.float64\[6, 4\]"),
        ({"forward_dtype": "float32"}, "forward_dtype: 'float32'; allowed: a torch.dtype, or None"),
        ({"backward_dtype": 3}, "backward_dtype: 3; allowed"),
    ):
        with pytest.raises(ArgumentError, match=text):
            shardweave.redistribute(source, (R, S1), **wrong)
    with pytest.raises(ArgumentError, match="out: gradients are recorded; allowed: under torch.no_grad"):
        shardweave.redistribute(held(x, mesh, (S0, R), {0: (0,)}).requires_grad_(), (R, S1), out=out)


def test_redistribute_arguments_without_torch_equivalent() -> None:
    run_ranks(all_arguments, 4)


def gradients(rank: int, ours: bool) -> list[Any]:
    """Dtypes, placements and values of first and second gradients."""
    mesh = init_device_mesh("cpu", (2, 2))
    found: list[Any] = []
    x = whole(6, 4) / 8
    with shardweave.installed() if ours else torch.enable_grad():
        for source, target in (((S0, S1), (R, S0)), ((S0, S0), (S1, R)), ((R, R), (S0, S1))):
            for forward, backward in ((None, None), (torch.bfloat16, None), (None, torch.float64)):
                d = distribute_tensor(x, mesh, source, src_data_rank=None).requires_grad_()
                y = d.redistribute(placements=target, forward_dtype=forward, backward_dtype=backward)
                assert y.requires_grad and type(y.grad_fn).__name__ == "RedistributeBackward"
                (grad,) = torch.autograd.grad((y * y * y).sum(), d, create_graph=True)
                found_now = [grad.detach()]
                if TWICE:
                    found_now += torch.autograd.grad((grad * grad).sum(), d)
                for g in found_now:
                    found.append((str(g.dtype), str(g.placements), g.full_tensor().tolist()))
        p = DTensor.from_local(x, mesh, (Partial(), S0), run_check=False).requires_grad_()
        p.redistribute(placements=(R, S0)).sum().backward()
        found.append((str(p.grad.dtype), str(p.grad.placements), p.grad.full_tensor().tolist()))
        local = x.clone().requires_grad_()
        y = DTensor.from_local(local, mesh, (Partial(), R), run_check=False).redistribute(placements=(S0, R))
        y.sum().backward()
        found.append((str(local.grad.dtype), "", local.grad.tolist()))
        with torch.no_grad():
            assert not d.redistribute(placements=(R, R)).requires_grad
    return found


def test_gradients_match_torch() -> None:
    stock, ours = run_ranks(gradients, 4, False), run_ranks(gradients, 4, True)
    assert stock == ours and len(stock[0]) == (20 if TWICE else 11)


def order_of_gradients(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = whole(8, 3)
    for use in (lambda d: d.redistribute(placements=(R, S1)), lambda d: shardweave.redistribute(d, (R, S1))):
        with shardweave.installed():
            d = held(x, mesh, (S0, S0), {0: (1, 0)}).requires_grad_()
            y = use(d)
            (y * y).sum().backward()
        # Autograd detaches the gradient, and torch's detach resets the order in the spec.
        assert d.grad.placements == (S0, S0) and d.grad._spec.shard_order[0].mesh_dims == (0, 1)
        assert right(d.grad, 2 * x, {0: (0, 1)})


def test_gradient_data_matches_its_spec() -> None:
    run_ranks(order_of_gradients, 4)


def policies(rank: int) -> None:
    mesh, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    x = whole(8, 4)
    stats = shardweave.stats()

    def redistribute_forward(**policy: Any) -> list[bool]:
        """Whether redistributions of a tensor on each mesh are carried out."""
        counts = []
        for value, on in ((x, mesh), (x, line)):
            source = distribute_tensor(value, on, [S0] * on.ndim, src_data_rank=None)
            before = stats.calls.total()
            with shardweave.installed(**policy):
                assert source.redistribute(placements=[S1] * on.ndim).full_tensor().equal(value)
            counts.append(stats.calls.total() - before)
        return [n > 0 for n in counts]

    assert redistribute_forward() == redistribute_forward(only=[mesh, line]) == [True, True]
    assert redistribute_forward(only=line) == [False, True]
    assert stats.delegations["a mesh that install(only=) leaves out"] > 0
    for wrong in ({"only": "a"}, {"only": [mesh, 3]}):
        (name,) = wrong
        with pytest.raises(ArgumentError, match=f"{name}: .*; allowed: "):
            shardweave.install(**wrong)
    assert not shardweave.is_installed()


def test_install_on_some_meshes() -> None:
    run_ranks(policies, 4)


def counted(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    stats = shardweave.stats()
    source = distribute_tensor(whole(8, 4), mesh, (S0, S1), src_data_rank=None)
    stats.reset()
    for _ in range(3):
        shardweave.redistribute(source, (S1, S0))
    ((what, transport), kind), *others = stats.redistributions.items()
    assert not others and transport == "shared_memory"
    assert what == "S0 S1 → S1 S0   float32[8, 4] on 2×2"
    assert (kind.calls, kind.bytes_received, kind.bytes_bound) == (3, 0 if rank in (0, 3) else 32, kind.bytes_received)
    assert kind.milliseconds > 0
    stats.reset()
    assert not stats.redistributions and not stats.calls
    shardweave.redistribute(source, (S1, S0))
    assert kind.calls == 1 and kind.milliseconds > 0
    with shardweave.installed():
        torch.distributed.tensor._redistribute.redistribute_local_tensor(
            source._local_tensor,
            source._spec,
            DTensorSpec(mesh, (R, R), source._spec.tensor_meta),
            use_graph_based_transform=True,
        )
    assert stats.ignored == {"use_graph_based_transform": 1}


def test_stats_count_and_time_each_redistribution() -> None:
    run_ranks(counted, 4)


def ordered(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = whole(8, 4)
    meta = TensorMeta(x.shape, x.stride(), x.dtype)
    draw = random.Random(5)
    layouts = [((S0, S0), 0), ((S1, S1), 1), ((S0, S1), None), ((S1, S0), None), ((R, S0), None)]
    for _ in range(40):
        specs, orders, given = [], [], []
        for placements, both in draw.choices(layouts, k=2):
            specs.append(DTensorSpec(mesh, placements, meta))
            first = draw.choice(list(permutations((0, 1))))
            if both is not None:
                orders.append({both: first})
                given.append(draw.choice([{both: first}, ((both, first),), first]))
            else:
                orders.append({p.dim: (m,) for m, p in enumerate(placements) if p.is_shard()})
                given.append(draw.choice([None, first]))
        local = cut(x, mesh, orders[0]).requires_grad_(draw.random() < 0.5)
        got = ordered_redistribute_local_tensor(local, *specs, *given)
        assert type(got) is torch.Tensor and got.equal(cut(x, mesh, orders[1])), (specs, given)
        if local.requires_grad:
            (got * got).sum().backward()
            assert local.grad.equal(2 * local.detach())
    spec = DTensorSpec(mesh, (S0, S0), meta)
    for wrong in (3, {0: (0,)}, [1, 1], "ab"):
        with pytest.raises(ArgumentError, match="order: "):
            ordered_redistribute_local_tensor(cut(x, mesh, {0: (0, 1)}), spec, spec, wrong)
    with pytest.raises(ArgumentError, match="source_spec: .*; allowed: a DTensorSpec with tensor_meta"):
        ordered_redistribute_local_tensor(x, DTensorSpec(mesh, (S0, S0)), spec)
    replicated, local = DTensorSpec(mesh, (R, R), meta), cut(x, mesh, {0: (0, 1)})
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        dual = forward_ad.make_dual(local, torch.ones_like(local))
        ordered_redistribute_local_tensor(dual, spec, replicated)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jvp(lambda y: ordered_redistribute_local_tensor(y, spec, replicated), (local,), (local,))
    assert ordered_redistribute_local_tensor(local, spec, replicated).equal(x)


def test_ordered_redistribute_local_tensor() -> None:
    run_ranks(ordered, 4)


def waited_for_later(rank: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = whole(8, 6)
    source = held(x, mesh, (S0, S1), {0: (0,), 1: (1,)})
    partial = DTensor.from_local(x + rank % 2, mesh, (R, Partial()), run_check=False)
    summed = 2 * x + 1
    targets = (
        (source, (S1, S0), x, {1: (0,), 0: (1,)}),
        (source, (R, R), x, {}),
        (partial, (R, S0), summed, {0: (1,)}),
        (partial, (R, R), summed, {}),
    )
    with shardweave.installed():
        kept = []
        for turn in range(12):
            x_, placements, value, order = targets[turn % 4]
            y = x_.redistribute(placements=placements, async_op=True)
            alone = turn % 4 == 0 and rank in (0, 3) and transport == "process_group"  # needs no message
            assert isinstance(y._local_tensor, AsyncCollectiveTensor) is not alone
            if turn % 3 == 0:  # wait at once, after others have begun, or never
                assert right(y, value, order)
            elif turn % 3 == 1:
                kept.append((y, value, order))
        for y, value, order in reversed(kept):
            local = y._local_tensor.view(-1) if turn % 2 else y._local_tensor
            assert local.sum() == cut(value, mesh, order).sum() and right(y, value, order)
        # As the input of the next redistribution and of an op.
        y = source.redistribute(placements=(R, S0), async_op=True)
        assert right(y.redistribute(placements=(S1, R)), x, {1: (0,)})
        y = source.redistribute(placements=(R, S0), async_op=True)
        assert (y * 2).full_tensor().equal(2 * x)
        # Without an exchange there is nothing to wait for.
        whole_one = held(x, mesh, (R, R), {})
        assert type(whole_one.redistribute(placements=(S0, R), async_op=True)._local_tensor) is torch.Tensor
        z = held(x, mesh, (S0, S1), {0: (0,), 1: (1,)}).requires_grad_()
        z.redistribute(placements=(R, R), async_op=True).sum().backward()
        assert z.grad.full_tensor().equal(torch.ones(8, 6))
    late = shardweave.redistribute(source, (S1, S0), async_op=True, transport=transport)
    assert right(late, x, {1: (0,), 0: (1,)})


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_async_result_waits_on_first_use(transport: str) -> None:
    run_ranks(waited_for_later, 4, transport, environment={"SHARDWEAVE_TRANSPORT": transport})


def a_peer_that_never_comes(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = held(whole(4), mesh, (S0,), {0: (0,)})
    for _ in range(3):  # from then on buffers are ready, and the last exchange is the first meeting
        shardweave.redistribute(x, (R,))
    if rank == 1:
        return ""
    y = shardweave.redistribute(x, (R,), async_op=True)
    with pytest.raises((PeerError, MeetingTimeoutError)):
        y._local_tensor.wait()
    with pytest.raises((PeerError, MeetingTimeoutError)):
        shardweave.redistribute(x, (R,))
    return "raised"


def test_async_error_is_raised_by_wait() -> None:
    assert run_ranks(a_peer_that_never_comes, 2, environment={"SHARDWEAVE_TIMEOUT": "5"}) == ["raised", ""]


def beside_messages_of_the_users_own(rank: int) -> None:
    mesh, n = init_device_mesh("cpu", (2,)), 1 << 20
    x = whole(2 * n)
    source = held(x, mesh, (S0,), {0: (0,)})
    for _ in range(2):
        mine, theirs = torch.full((n,), -7.0 - rank), torch.empty(n)
        # Posted early on one side and late on the other, as in pipeline schedules.
        posted = torch.distributed.irecv(theirs, 1) if rank == 0 else None
        assert "send and receive" in shardweave.explain(source, (R,))
        got = shardweave.redistribute(source, (R,))
        if posted is None:
            torch.distributed.send(mine, 0)
        else:
            posted.wait()
            assert (theirs == -8).all()
        assert right(got, x, {})


def test_messages_are_separate_from_user_collectives() -> None:
    run_ranks(beside_messages_of_the_users_own, 2, environment={"SHARDWEAVE_TRANSPORT": "process_group"})


def with_another_past(rank: int) -> None:
    first, second = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 2))
    x = whole(4, 4)
    with shardweave.installed():
        if rank == 0:  # local-only calls need no peers
            held(x, second, (R, R), {}).redistribute(placements=(R, S0))
            shardweave.explain(held(x, second, (R, S0), {0: (1,)}), (R, R))
        for mesh in (first, second, first):
            assert right(held(x, mesh, (R, S0), {0: (1,)}).redistribute(placements=(R, S1)), x, {1: (1,)})


def test_ranks_with_different_histories_choose_the_same_groups() -> None:
    run_ranks(with_another_past, 4, environment={"SHARDWEAVE_TRANSPORT": "process_group", "SHARDWEAVE_TIMEOUT": "20"})


def refused_meanwhile(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = whole(16)
    source = held(x, mesh, (S0,), {0: (0,)})
    bad = DTensor(torch.zeros(5), source._spec, requires_grad=False)
    for _ in range(3):
        y = shardweave.redistribute(source, (R,), async_op=True)
        with pytest.raises(ArgumentError):
            shardweave.redistribute(bad, (R,))
        assert right(y, x, {})


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_refused_call_keeps_the_pending_one(transport: str) -> None:
    run_ranks(refused_meanwhile, 2, environment={"SHARDWEAVE_TRANSPORT": transport})
