"""`redistribute_cost` and `plan` with torch's objects, and `install(costs=True)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._collective_utils as torch_costs
import torch.distributed.tensor._ops.utils as torch_strategies
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave
from shardweave import NVLINK_INFINIBAND, NVLINK_NODE
from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.planner import redistribute_cost as cost_on_mesh
from shardweave.runtime.dtensor import sharding_costs

pytestmark = pytest.mark.plan

NODES_OF_4 = replace(NVLINK_INFINIBAND, node_size=4)
SHAPE = (512, 96)
PAIRS = 250  # of specs whose costs are compared, out of some 20,000


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    yield
    shardweave.uninstall()
    shardweave.stats().reset()


def spec(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = SHAPE, **options: Any) -> DTensorSpec:
    dtype = options.pop("dtype", torch.float32)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    return DTensorSpec(mesh, placements, options.pop("tensor_meta", meta), **options)


def test_equal_arguments_have_equal_costs_and_plans(mesh: DeviceMesh) -> None:
    meshes = (mesh, (2, 4), [2, 4], shardweave.Mesh((2, 4)))
    sources = ("S0 P", shardweave.Layout.parse("S0 P"), (Shard(0), Partial()), [Shard(-2), Partial("sum")])
    targets = ("R S1", [shardweave.Replicate(), shardweave.Shard(1)], (Replicate(), Shard(1)), [Replicate(), Shard(-1)])
    expected = cost_on_mesh((2, 4), SHAPE, "bfloat16", "S0 P", "R S1", NODES_OF_4)
    program = shardweave.plan((2, 4), SHAPE, "bfloat16", "S0 P", "R S1")
    assert expected > 0
    for on, shape, dtype in product(meshes, (SHAPE, list(SHAPE), torch.Size(SHAPE)), ("bfloat16", torch.bfloat16)):
        for source, target in zip(sources, targets, strict=True):
            for _ in range(2):
                assert shardweave.redistribute_cost(on, shape, dtype, source, target, NODES_OF_4) == expected
            result = shardweave.plan(on, shape, dtype, source, target)  # a DeviceMesh has names, so programs differ
            for name in ("source", "target", "peak_bytes"):
                assert getattr(result, name) == getattr(program, name)


@pytest.mark.parametrize(("name", "topology"), [("nvlink", NVLINK_NODE), ("nvlink-infiniband", NVLINK_INFINIBAND)])
def test_topologies_have_names(mesh: DeviceMesh, name: Any, topology: shardweave.Topology) -> None:
    request = (4, 8), (8192, 8192), "bfloat16", "S0 S0", "R R"
    by_name, by_topology = (shardweave.plan(*request, topology=given) for given in (name, topology))
    assert by_name.explain() == by_topology.explain() and topology.name in by_name.explain()
    assert shardweave.redistribute_cost(*request, name) == shardweave.redistribute_cost(*request, topology)
    by_name, by_topology = (shardweave.plan_batch([request], topology=given) for given in (name, topology))
    assert by_name.explain() == by_topology.explain()
    whole, part = spec(mesh, Shard(0), Shard(1)), spec(mesh, Shard(1), Shard(0))
    with shardweave.installed(costs=True, topology=name):
        us = cost_on_mesh((2, 4), SHAPE, "float32", "S0 S1", "S1 S0", topology)
        assert torch_costs.redistribute_cost(whole, part) == us


def test_strided_shards_decode_to_orders(mesh: DeviceMesh) -> None:
    request = mesh, SHAPE, torch.float32, [_StridedShard(-2, split_factor=4), Shard(0)]
    assert shardweave.plan(*request, "S0 S0").source == shardweave.Layout.parse("S0 S0 @ 0:1,0")
    assert shardweave.redistribute_cost(*request, "S0 S0") == cost_on_mesh(
        (2, 4), SHAPE, "float32", "S0 S0 @ 0:1,0", "S0 S0"
    )


@pytest.mark.parametrize("ask", [shardweave.plan, shardweave.redistribute_cost])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mesh": (2, "4")}, ArgumentError, "mesh: (2, '4')"),
        ({"shape": (8, -1)}, ArgumentError, "shape: (8, -1)"),
        ({"dtype": torch.quint8}, ArgumentError, "dtype: 'quint8' is not supported"),
        ({"source": "S0 Q"}, ArgumentError, "source: unknown token 'Q'"),
        ({"source": 3}, ArgumentError, "source: 3; allowed: a Layout, its text form, or a sequence of Replicate"),
        ({"target": [Shard(0)]}, ArgumentError, "target: 1 given for a mesh of 2 dims; allowed: one per mesh dim"),
        ({"target": [Shard(0), 5]}, ArgumentError, "target: mesh dim 1 has 5; allowed: Replicate, Shard, Partial"),
        ({"target": [Shard(2), Replicate()]}, ArgumentError, "target: mesh dim 0 shards tensor dim 2; allowed: -2..1"),
        ({"target": [Partial("product"), Replicate()]}, UnsupportedError, "target: mesh dim 0 becomes a partial"),
        ({"source": [Partial("bor"), Shard(0)]}, UnsupportedError, "source: placement P(bor) on mesh dim 0"),
        ({"source": [Partial("avg"), Shard(0)], "dtype": torch.int64}, UnsupportedError, "partial op 'avg' of int64"),
        ({"topology": 5}, ArgumentError, "topology: 5; allowed: a Topology"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(ask: Callable[..., Any], change: dict, error: type, text: str) -> None:
    request = {"mesh": (2, 4), "shape": SHAPE, "dtype": "float32", "source": "S0 S1", "target": "R R"}
    with pytest.raises(error) as raised:
        ask(**{**request, **change})
    assert text in str(raised.value)


def test_install_costs_binds_every_module(mesh: DeviceMesh) -> None:
    whole, part = spec(mesh, Shard(0), Shard(1)), spec(mesh, Shard(1), Shard(0))

    def bound() -> list[Any]:
        return [torch_costs.redistribute_cost, torch_strategies.redistribute_cost]

    def ours(topology: shardweave.Topology) -> float:
        return cost_on_mesh((2, 4), SHAPE, "float32", "S0 S1", "S1 S0", topology)

    theirs = sharding_costs.stock_redistribute_cost(whole, part)
    assert ours(NVLINK_NODE) != ours(NODES_OF_4)
    shardweave.install()
    assert bound() == [sharding_costs.stock_redistribute_cost] * 2
    for _ in range(2):
        shardweave.install(costs=True)
        assert {ask(whole, part) for ask in bound()} == {ours(NVLINK_NODE)}
    shardweave.install(costs=True, topology=NODES_OF_4)
    assert {ask(whole, part) for ask in bound()} == {ours(NODES_OF_4)}
    strategies = OpStrategy([OpSpec(whole), OpSpec(part)])
    assert torch_strategies.generate_redistribute_costs(strategies, part) == [ours(NODES_OF_4), 0.0]
    with shardweave.installed():
        assert {ask(whole, part) for ask in bound()} == {theirs}
    assert {ask(whole, part) for ask in bound()} == {ours(NODES_OF_4)}
    shardweave.install()
    assert bound() == [sharding_costs.stock_redistribute_cost] * 2 and shardweave.is_installed()
    shardweave.uninstall()
    with shardweave.installed(costs=True, topology=NODES_OF_4):
        assert {ask(whole, part) for ask in bound()} == {ours(NODES_OF_4)}
    assert bound() == [sharding_costs.stock_redistribute_cost] * 2 and not shardweave.is_installed()
    for _ in range(2):
        shardweave.uninstall()
    assert not shardweave.stats().delegations


def test_cost_topology_is_validated() -> None:
    with pytest.raises(ArgumentError, match="topology: 'nvlinks'; allowed: a Topology, or None, or .*'nvlink'"):
        shardweave.install(costs=True, topology="nvlinks")  # type: ignore[arg-type]
    assert not shardweave.is_installed()


def outcome(ask: Callable[..., float], a: DTensorSpec, b: DTensorSpec) -> float | str:
    try:
        return float(ask(a, b))
    except Exception as error:
        return type(error).__name__


def every_spec(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> list[DTensorSpec]:
    placements = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max"), _MaskPartial()]
    placements += [Partial("product"), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    found = []
    for chosen in product(placements, repeat=mesh.ndim):
        readings: list[dict[str, Any]] = [{}]
        if any(isinstance(p, _StridedShard) for p in chosen):
            readings.append({"use_strided_shard_as_shard_order": False})
        if chosen == (Shard(0), Shard(0)):
            readings.append({"shard_order": (ShardOrderEntry(0, (1, 0)),)})
        if chosen[0] == Shard(1):
            readings.append({"tensor_meta": None})
        found += [spec(mesh, *chosen, shape=shape, dtype=dtype, **reading) for reading in readings]
    return found


@pytest.mark.parametrize(
    ("sizes", "shape", "dtype"),
    [
        ((2, 4), (7, 3), torch.int64),
        ((1, 2), (9, 4), torch.quint8),
    ],
)
def test_costs_raise_only_where_torch_does(
    mesh: DeviceMesh, sizes: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    specs = every_spec(DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")), shape, dtype)
    priced = 0
    with shardweave.installed(costs=True, topology=NODES_OF_4):
        for a, b in Random(5).sample(list(product(specs, repeat=2)), PAIRS):
            theirs, ours = (
                outcome(sharding_costs.stock_redistribute_cost, a, b),
                outcome(torch_costs.redistribute_cost, a, b),
            )
            if isinstance(ours, str):
                assert ours == theirs, (a, b)
            elif (theirs == 0 and ours != 0) or (theirs == math.inf and ours != math.inf):
                # torch redistributes strided shards, but has no cost for them yet.
                assert any(isinstance(p, _StridedShard) for p in (*a.placements, *b.placements)), (a, b)
            priced += theirs != ours
    assert priced or dtype == torch.quint8
    reasons = shardweave.stats().delegations
    assert all(reason.startswith("price: ") for reason in reasons)
    assert "price: the spec has no tensor_meta" in reasons
    assert "price: shard or another op to partial, which torch refuses" in reasons


def test_costs_on_meshes_that_torch_refuses(mesh: DeviceMesh) -> None:
    elsewhere = DeviceMesh("cpu", [4, 5, 6, 7])
    a, b = spec(mesh["tp"], Shard(0)), spec(elsewhere, Shard(0))
    away = spec(elsewhere, Replicate())
    with shardweave.installed(costs=True):
        assert torch_costs.redistribute_cost(a, away) == math.inf
        assert torch_costs.redistribute_cost(b, away) == sharding_costs.stock_redistribute_cost(b, away) == 0
        near = spec(mesh["tp"], Replicate())
        assert torch_costs.redistribute_cost(a, near) == cost_on_mesh((4,), SHAPE, "float32", "S0", "R")
        # Which links are on the network depends on the ranks of a submesh.
        across = spec(mesh["dp"], Shard(0)), spec(mesh["dp"], Replicate())
        assert torch_costs.redistribute_cost(*across) == cost_on_mesh((2,), SHAPE, "float32", "S0", "R")
    with shardweave.installed(costs=True, topology=NODES_OF_4):
        assert torch_costs.redistribute_cost(*across) == cost_on_mesh(
            shardweave.Mesh((2,), ranks=[0, 4]), SHAPE, "float32", "S0", "R", NODES_OF_4
        )
    assert set(shardweave.stats().delegations) == {
        "price: another mesh, which torch refuses",
        "price: this rank is not in the mesh",
    }


def test_sharding_propagation_uses_costs(mesh: DeviceMesh) -> None:
    """Also under a fake tensor mode; decisions made with other costs are dropped."""

    def chosen() -> tuple[Any, ...]:
        with FakeTensorMode():
            left = DTensor.from_local(torch.zeros(16, 1024), mesh, [Replicate(), Shard(0)], run_check=False)
            right = DTensor.from_local(torch.zeros(1024, 256), mesh, [Replicate(), Shard(1)], run_check=False)
            return (left @ right).placements

    stock = chosen()
    with shardweave.installed(costs=True, topology=NODES_OF_4):
        ours = chosen()
    assert ours != stock and chosen() == stock
