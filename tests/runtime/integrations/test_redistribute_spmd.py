"""`redistribute_spmd` against a dense reference, and against spmd_types' own calls one axis after the other."""

from __future__ import annotations

import importlib.util
import math
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_spmd_types import give_gloo_all_to_all
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.integrations.spmd_types import redistribute_spmd

if importlib.util.find_spec("spmd_types"):
    import spmd_types as spmd
    from spmd_types import I, P, PartitionSpec, R, S, SpmdType, V

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(
        importlib.util.find_spec("spmd_types") is None, reason="spmd_types is not installed (pip install spmd_types)"
    ),
]


class Axis(Enum):
    A, B = "a", "b"


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(kind: Any) -> Any:
    """The type of the gradient."""
    return P if kind is R else R if kind is P else kind


def typed(kinds: tuple[Any, ...], order: tuple[int, ...] = (0, 1), axes: tuple[Any, Any] = ("a", "b")) -> Any:
    """An argument for two axes; with a PartitionSpec where both shard one tensor dim."""
    if not all(isinstance(kind, S) for kind in kinds) or kinds[0] != kinds[1]:
        return dict(zip(axes, kinds, strict=True))
    entries: list[Any] = [None] * 2
    entries[kinds[0].dim] = tuple(axes[m] for m in order)
    return SpmdType(dict.fromkeys(axes, V), PartitionSpec(*entries))


def held(x: torch.Tensor, kinds: tuple[Any, ...], mesh: DeviceMesh, order: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    """This rank's shard by torch.chunk, without regard to P."""
    for m in order:
        if isinstance(kinds[m], S):
            d, at = kinds[m].dim, mesh.get_coordinate()[m]
            x = [*x.chunk(mesh.size(m), d), *[x.narrow(d, 0, 0)] * mesh.size(m)][at]
    return x.contiguous()


def terms_of(seed: int, shape: tuple[int, ...], kinds: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, torch.Tensor]:
    """The global tensor, as this rank has it before it is sharded, and the value that all ranks agree on: the sum over
    the partial axes of terms that differ along them."""
    partial = [m for m, kind in enumerate(kinds) if kind is P]
    coordinates = list(product(*(range(mesh.size(m)) for m in partial)))
    terms = {c: numbers(seed + 10 * i, shape) for i, c in enumerate(coordinates)}
    return terms[tuple(mesh.get_coordinate()[m] for m in partial)], sum(terms.values())


def total(x: torch.Tensor, kinds: tuple[Any, ...], mesh: DeviceMesh) -> torch.Tensor:
    """The value of a tensor: partial axes are summed by torch."""
    x = x.detach().clone()
    for m, kind in enumerate(kinds):
        if kind is P:
            dist.all_reduce(x, group=mesh.get_group(m))
    return x


def against_dense(rank: int, shape: tuple[int, int], samples: int) -> int:
    mesh, random = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), Random(7)
    kinds = list(product([R, I, P, S(0), S(1)], repeat=2))
    for src, dst in random.sample(list(product(kinds, kinds)), samples):
        orders = random.choice([(0, 1), (1, 0)]), random.choice([(0, 1), (1, 0)])
        mine, value = terms_of(1, shape, src, mesh)
        x = held(mine, src, mesh, orders[0]).requires_grad_()
        given = x.detach().clone()
        y = redistribute_spmd(x, mesh, typed(src, orders[0]), typed(dst, orders[1]), shape=shape)
        assert total(y, dst, mesh).equal(held(value, dst, mesh, orders[1])), (src, dst, orders)
        assert x.equal(given) and (y.is_contiguous() or y.data_ptr() == x.data_ptr())
        # The gradient goes the other way: that of R is partial, that of P is replicated.
        there, back = (tuple(map(gradient_of, types)) for types in (dst, src))
        mine, value = terms_of(2, shape, there, mesh)
        y.backward(held(mine, there, mesh, orders[1]))
        assert total(x.grad, back, mesh).equal(held(value, back, mesh, orders[0])), (src, dst, orders)
    assert not shardweave.stats().delegations
    return samples


# The uneven shape on shared memory, that with an empty shard on gloo.
@pytest.mark.parametrize(
    ("samples", "shape", "transport"),
    [
        (60, (7, 3), "shared_memory"),
        (60, (1, 5), "process_group"),
        pytest.param(625, (7, 3), "process_group", marks=pytest.mark.long),
    ],
)
def test_types_of_two_axes(shape: tuple[int, int], transport: str, samples: int) -> None:
    assert run_ranks(against_dense, 4, shape, samples, environment={"SHARDWEAVE_TRANSPORT": transport}) == [samples] * 4


def against_spmd_types(rank: int, every: int) -> int:
    """One axis after the other, the last to shard first, where spmd_types has a sequence."""
    give_gloo_all_to_all()
    mesh, done = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), 0
    groups = {name: mesh.get_group(name) for name in "ab"}
    for src, dst in list(product(product([R, I, P, S(0), S(1)], repeat=2), repeat=2))[::every]:
        shards = [t.dim for t in (*src, *dst) if isinstance(t, S)]
        if len(shards) != len(set(shards)):
            continue  # two axes on one tensor dim
        mine, _ = terms_of(1, (8, 4), src, mesh)
        results = []
        gradient = held(terms_of(2, (8, 4), tuple(map(gradient_of, dst)), mesh)[0], dst, mesh)
        try:
            for one_call in (False, True):
                y = x = held(mine, src, mesh).requires_grad_()
                for name, a, b in zip("ab", src, dst, strict=True):
                    if not one_call:
                        y = spmd.redistribute(y, groups[name], src=a, dst=b, backward_options={"op_dtype": y.dtype})
                if one_call:
                    y = redistribute_spmd(x, mesh, typed(src), typed(dst))
                y.backward(gradient)
                results.append((y.detach(), x.grad))
        except AssertionError as error:
            assert "contiguous" in str(error)  # spmd_types 0.2.3 refuses results of its own reduce-scatter
            continue
        for ours, theirs in zip(*results, strict=True):
            assert ours.equal(theirs), (src, dst)
        done += 1
    return done


def test_equals_one_axis_after_the_other() -> None:
    (done,) = set(run_ranks(against_spmd_types, 4, 3))
    assert done > 100 / 3


def one_exchange(rank: int, trace: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    x = numbers(rank, (4, 6))
    shardweave.stats().reset()
    src, dst = {Axis.A: S(0), Axis.B: P, "c": R}, {Axis.A: S(1), Axis.B: R, "c": S(0)}
    with shardweave.tracing.record(trace) as recording:
        redistribute_spmd(x, mesh, src, dst)
    ((entry, cost),) = recording.trace().redistributions.items()
    assert (entry.source, entry.target, entry.shape, cost.calls) == ("S0 P", "S1 R", (8, 6), 1), entry
    redistribute_spmd(x, mesh, {"a": S(0), "b": S(1)}, {"a": S(1), "b": S(0)})
    ((request, _), kind) = next(iter(shardweave.stats().redistributions.items()))
    assert sum(shardweave.stats().calls.values()) == 2, (request, kind)
    # Axes whose type stays take no part, and other ranks need not call.
    if mesh.get_local_rank("a") == 0:
        y = redistribute_spmd(x, mesh, {"a": V, "b": S(0)}, {"a": V, "b": R})
        assert y.equal(torch.cat([numbers(r, (4, 6)) for r in (0, 1)]))
        y = redistribute_spmd(x, mesh, {"a": S(1), "b": P}, {"a": S(1), "b": R})
        assert y.equal(numbers(0, (4, 6)) + numbers(1, (4, 6)))
    same = {"a": S(0), "b": R}
    assert redistribute_spmd(x, mesh, same, same) is x
    half = redistribute_spmd(x, mesh, same, same, forward_dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    x.requires_grad_()
    y = redistribute_spmd(
        x.T, mesh, {"a": S(1), "b": P}, {"a": R, "b": I}, forward_dtype=torch.float64, backward_dtype=torch.bfloat16
    )
    y.backward(torch.ones_like(y))
    assert y.dtype is torch.float64 and x.grad.dtype is torch.float32 and x.grad.equal(torch.full_like(x, 2.0))
    (gradient,) = torch.autograd.grad(
        redistribute_spmd(x, mesh, {"b": P}, {"b": R}).square().sum(), x, create_graph=True
    )
    gradient.sum().backward()  # differentiable twice


def test_one_call_for_several_axes(tmp_path: Path) -> None:
    run_ranks(one_exchange, 4, str(tmp_path / "trace.json"))


def wrong(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.zeros(4, 3)
    both = SpmdType({"a": V, "b": V}, PartitionSpec(("a", "b")))
    for text, arguments, options in [
        ("x: 3; allowed: a torch.Tensor", (3, mesh, {}, {}), {}),
        ("mesh: .*allowed: a DeviceMesh with names", (x, "cpu", {}, {}), {}),
        ("src: axis 'c'; allowed: 'a', 'b'", (x, mesh, {"c": R}, {"c": P}), {}),
        ("dst: no type of axis 'a', which src names", (x, mesh, {"a": R}, {"b": R}), {}),
        ("src: 'R' on axis 'a'; allowed: R, I, V, P, S", (x, mesh, {"a": "R"}, {"a": R}), {}),
        ("dst: S.2. on axis 'a'; allowed dims: -2..1", (x, mesh, {"a": R}, {"a": S(2)}), {}),
        ("V to R on axis 'a'; allowed: V on both", (x, mesh, {"a": V}, {"a": R}), {}),
        ("axes .'a', 'b'. shard tensor dim 0", (x, mesh, {"a": S(0), "b": S(0)}, both), {}),
        ("src: \\[1\\]; allowed: a mapping", (x, mesh, [1], {}), {}),
        ("shape: .8,. for a tensor of 2 dims", (x, mesh, {"a": R}, {"a": S(0)}), {"shape": (8,)}),
        ("x: \\[4, 3\\]; allowed: \\[5, 3\\]", (x, mesh, {"a": S(0)}, {"a": R}), {"shape": (10, 3)}),
        ("x: \\[4, 3\\]; allowed: \\[4, 9\\]", (x, mesh, {"a": S(0)}, {"a": R}), {"shape": (8, 9)}),
        ("x: \\[4, 3\\]; allowed: \\[8, 3\\]", (x, mesh, {"a": P}, {"a": S(0)}), {"shape": (8, 3)}),
        ("x: \\[4, 3\\]; allowed: \\[1, 3\\]", (x, mesh, {"a": S(0)}, {"a": S(0)}), {"shape": (2, 3)}),  # no change
        (  # of a dim that the change leaves alone
            "x: \\[4, 3\\]; allowed: \\[5, 3\\]",
            (x, mesh, {"a": S(0), "b": P}, {"a": S(0), "b": S(1)}),
            {"shape": (10, 3)},
        ),
        ("x: \\[4, 3\\]; allowed: \\[2, 3\\]", (x, mesh, both, both), {"shape": (8, 3)}),
        ("src: axis 'a' has two types", (x, mesh, {"a": R, Axis.A: P}, {"a": R}), {}),
        ("axes 'a_b' and 'a' have mesh dims .'a'. in common", (x, mesh, {dist.group.WORLD: P}, {"a": R}), {}),
        ("src: axis 7; allowed: 'a', 'b', a flattened", (x, mesh, {7: P}, {"a": R}), {}),
        ("forward_dtype: 'half'", (x, mesh, {"a": R}, {"a": P}), {"forward_dtype": "half"}),
        ("transport: 7", (x, mesh, {"a": R}, {"a": P}), {"transport": 7}),
    ]:
        with pytest.raises(ArgumentError, match=text):
            redistribute_spmd(*arguments, **options)
    with pytest.raises(UnsupportedError, match="do not ascend"):
        swapped = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("a", "b"))
        redistribute_spmd(x, swapped, {"b": S(0)}, {"b": R})
    with pytest.raises(UnsupportedError, match="x: torch.sparse_coo"):
        redistribute_spmd(x.to_sparse(), mesh, {"a": P}, {"a": R})
    y = redistribute_spmd(x + rank, mesh, {"a": P}, {"a": R})  # later calls work
    assert y.equal(torch.full((4, 3), float(2 * (rank % 2) + 2)))


def test_refused_arguments() -> None:
    run_ranks(wrong, 4)


def axes_by_group(rank: int) -> None:
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    groups = dict(zip("abc", mesh.get_all_groups(), strict=True))
    normalized = {name: spmd.normalize_axis(group) for name, group in groups.items()}
    src, dst = {"a": P, "b": S(0), "c": R}, {"a": S(0), "b": R, "c": P}
    x = numbers(rank, (4, 3))
    want = redistribute_spmd(x, mesh, src, dst)
    for keys in (groups, normalized):
        types = [{keys[name]: kind for name, kind in given.items()} for given in (src, dst)]
        assert redistribute_spmd(x, mesh, *types).equal(want)
        order = SpmdType({keys["a"]: V, keys["b"]: V}, PartitionSpec((keys["b"], keys["a"])))
        gathered = redistribute_spmd(x, mesh, order, {keys["a"]: R, keys["b"]: R})
        assert gathered.equal(torch.cat([numbers(r, (4, 3)) for r in (0, 2, 1, 3)]))
    with typecheck():
        spmd.assert_type(x, {groups["a"]: P, groups["b"]: R})
        own = spmd.get_local_type(x)
        y = redistribute_spmd(x, mesh, own, dict.fromkeys(own, R))
        assert set(spmd.get_local_type(y).values()) == {R}
    assert y.equal(numbers(rank % 2, (4, 3)) + numbers(rank % 2 + 2, (4, 3)))


def test_axes_by_process_group() -> None:
    run_ranks(axes_by_group, 4)


def flattened(rank: int, sizes: tuple[int, int, int], samples: int) -> None:
    """Axes "ac", which flattens two mesh dims that need not be neighbours, and "b", as on a mesh with these dims."""
    mesh, random = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")), Random(3)
    group = mesh["a", "c"]._flatten("ac").get_group()
    two_dims = DeviceMesh("cpu", mesh.mesh.permute(0, 2, 1).reshape(-1, sizes[1]), mesh_dim_names=("ac", "b"))
    kinds, shape = list(product([R, I, P, S(0), S(1)], repeat=2)), (5, 7)  # shards by four and then by two differ
    for src, dst in random.sample(list(product(kinds, kinds)), samples):
        order, axes = random.choice([(0, 1), (1, 0)]), (random.choice(["ac", group]), "b")
        mine, value = terms_of(1, shape, src, two_dims)
        x = held(mine, src, two_dims, order).requires_grad_()
        y = redistribute_spmd(x, mesh, typed(src, order, axes), typed(dst, order, axes), shape=shape)
        assert total(y, dst, two_dims).equal(held(value, dst, two_dims, order)), (src, dst, order)
        there, back = (tuple(map(gradient_of, types)) for types in (dst, src))
        mine, value = terms_of(2, shape, there, two_dims)
        y.backward(held(mine, there, two_dims, order))
        assert total(x.grad, back, two_dims).equal(held(value, back, two_dims, order)), (src, dst, order)
    assert not shardweave.stats().delegations


def other_flattened(rank: int) -> None:
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (2, 2, 1, 1), mesh_dim_names=("a", "b", "c", "d"))
    x = numbers(rank, (4, 3))
    want = redistribute_spmd(x, mesh, {"a": P, "b": S(0)}, {"a": S(0), "b": R})
    for dims, name in ((("a", "b"), "ab"), (("b", "c"), "bc"), (("c", "d"), "cd")):
        mesh[dims]._flatten(name)
    # Mesh dims of one rank make no difference.
    y = redistribute_spmd(x, mesh, {"a": P, "bc": S(0), "cd": R}, {"a": S(0), Axis.B: R, "cd": S(1)})
    assert y.equal(want)
    x = numbers(rank, (4, 3))
    for text, on, src, dst in [
        ("axes 'ab' and 'a' have mesh dims .'a'. in common", mesh, {"ab": S(0)}, {"a": R, "b": S(0)}),
        ("dst: no type of axis 'ab', which src names", mesh, {"ab": S(0), "c": R}, {"c": R}),
        ("src: axis 'ab' has two types", mesh, {"ab": S(0), dist.group.WORLD: R}, {"ab": R}),
        (
            "src: axis 'ab'; allowed: 'a', 'b', a flattened mesh dim if `mesh` is the root",
            mesh["a", "b"],
            {"ab": P},
            {},
        ),
        ("src: axis <.*ProcessGroup.*>; allowed: 'a', a flattened", mesh["a"], {dist.group.WORLD: P}, {}),
    ]:
        with pytest.raises(ArgumentError, match=text):
            redistribute_spmd(x, on, src, dst)
    y = redistribute_spmd(x, mesh["a", "b"], {dist.group.WORLD: P}, {dist.group.WORLD: R})
    assert y.equal(sum(numbers(r, (4, 3)) for r in range(4)))
    with typecheck():
        spmd.assert_type(x, {dist.group.WORLD: P})
        y = redistribute_spmd(x, mesh, {"ab": P}, {"ab": R})
        assert spmd.get_axis_local_type(y, dist.group.WORLD) is R
    swapped = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("e", "f"))
    swapped["e", "f"]._flatten("ef")
    y = redistribute_spmd(x, swapped, {"ef": P}, {"ef": R})  # no shards
    assert y.equal(sum(numbers(r, (4, 3)) for r in range(4)))
    with pytest.raises(UnsupportedError, match="along 'ef' do not ascend"):
        redistribute_spmd(x, swapped, {"ef": S(0)}, {"ef": R})


@pytest.mark.parametrize("sizes, samples", [((2, 1, 2), 30), pytest.param((2, 2, 2), 60, marks=pytest.mark.long)])
def test_flattened_axes(sizes: tuple[int, int, int], samples: int) -> None:
    run_ranks(flattened, math.prod(sizes), sizes, samples)


def test_names_of_flattened_axes() -> None:
    run_ranks(other_flattened, 4)


def checkpointed_in_another_order(rank: int, saved: bool) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    src, dst = typed((S(0), S(0)), (1, 0)), {"a": R, "b": R}
    save = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    issued = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        issued.append(op)
        return save if op is gather else CheckpointPolicy.PREFER_RECOMPUTE

    whole = numbers(1, (8, 2))
    x = held(whole, (S(0), S(0)), mesh, (1, 0)).requires_grad_()
    shardweave.stats().reset()
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return redistribute_spmd(x * 1, mesh, src, dst).square()

    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    assert y.equal(whole.square()) and issued.count(gather) == 2  # one per axis
    y.sum().backward()
    assert x.grad.equal(8 * x)
    return sum(shardweave.stats().calls.values())


@pytest.mark.parametrize("saved, calls", [(False, 3), (True, 2)])
def test_selective_checkpointing_with_an_order_of_shards(saved: bool, calls: int) -> None:
    assert run_ranks(checkpointed_in_another_order, 4, saved) == [calls] * 4


def type_checked(rank: int) -> None:
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = numbers(rank, (4, 3)).requires_grad_()
    with spmd.set_current_mesh(mesh), typecheck():
        spmd.assert_type(x, {"a": P, "b": S(0)})
        y = redistribute_spmd(x, mesh, {"a": P, "b": S(0)}, {"a": S(0), "b": R})
        assert spmd.get_axis_local_type(y, "a") is V and spmd.get_axis_local_type(y, "b") is R
        with pytest.raises(spmd.SpmdTypeError):
            redistribute_spmd(x, mesh, {"a": R, "b": S(0)}, {"a": S(0), "b": R})
        with pytest.raises(ArgumentError, match="src: no type of axes"):
            redistribute_spmd(x, mesh, {"a": P}, {"a": R})
        z = spmd.reinterpret(spmd.reinterpret(y.sum(), "a", src=V, dst=P), "b", src=R, dst=P, expert_mode=True)
        z.backward()
    assert x.grad.equal(torch.full_like(x, 2.0))


def test_type_checking() -> None:
    run_ranks(type_checked, 4)
