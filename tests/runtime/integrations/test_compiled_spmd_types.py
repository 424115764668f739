"""Collectives of spmd_types and `redistribute_spmd` under `torch.compile(fullgraph=True)`, against the same calls
without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from rank_processes import run_ranks
from test_spmd_types import Outcome, outcome, same, values
from torch.distributed.device_mesh import init_device_mesh

import shardweave
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
Function = Callable[[torch.Tensor], torch.Tensor]


def assert_carried(function: Function, x: torch.Tensor, redistributions: int) -> Outcome:
    """Assert that a compiled function returns what it returns otherwise, and its gradient, and that this many
    redistributions of its graphs are ours and none is left."""
    want = outcome(function, x)
    assert isinstance(want[0], torch.Tensor), want
    before = shardweave.stats().traced.total()
    torch._dynamo.reset()
    got = outcome(torch.compile(function, fullgraph=True, backend="aot_eager"), x)
    assert same(got, want), (got, want)
    assert shardweave.stats().traced.total() - before == redistributions
    assert not shardweave.stats().delegations
    return got


def all_of(calls: list[Function], x: torch.Tensor) -> torch.Tensor:
    """A number for each result, whose gradients differ."""
    return torch.stack([call(x).square().sum() for call in calls])


def every_collective(rank: int) -> None:
    shardweave.install(spmd_types=True)
    n, group = 2, dist.group.WORLD
    to = {"axis": group, "backward_options": {"op_dtype": torch.float32}}
    half = {"op_dtype": torch.bfloat16, "out_dtype": torch.float32}
    one = [(P, R), (P, I), (P, S(0)), (P, S(-1)), (P, V), (S(0), R), (S(1), I), (V, R), (S(0), S(1)), (I, S(0))]
    redistributions = [partial(spmd.redistribute, src=src, dst=dst, **to) for src, dst in one]
    assert_carried(partial(all_of, redistributions), values(rank, n, 2 * n), 17)
    reductions = [
        partial(spmd.all_reduce, dst=R, axis=group),
        partial(spmd.all_reduce, dst=I, **to, **half),
        partial(spmd.reduce_scatter, dst=V, scatter_dim=1, axis=group),
        partial(spmd.reduce_scatter, dst=S(1), **to, **half),
        partial(spmd.reduce_scatter, dst=S(0), split_sizes=[2, 1], axis=group),
    ]
    assert_carried(partial(all_of, reductions), values(rank, 3, n, 4), 9)
    moves = [
        partial(spmd.all_gather, src=V, dst=R, gather_dim=2, axis=group),
        partial(spmd.all_gather, src=S(1), dst=R, axis=group),
        partial(spmd.all_gather, src=S(2), dst=I, axis=group),
        partial(spmd.all_to_all, split_dim=1, concat_dim=0, axis=group),
        partial(spmd.all_to_all, src=S(2), dst=S(1), axis=group),
    ]
    assert_carried(partial(all_of, moves), values(rank, 3, n, 4), 9)


def test_every_collective() -> None:
    run_ranks(every_collective, 2)


class Axis(Enum):
    A, B = "a", "b"


def of_several_axes(rank: int) -> None:
    shardweave.install()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    redistribute, group = redistribute_spmd, mesh.get_group("a")
    x = values(rank // 2, 4, 4)
    assert_carried(lambda x: redistribute(x, mesh, {"a": P, "b": S(0)}, {"a": S(1), "b": R}), x, 2)
    assert_carried(lambda x: redistribute(x, mesh, {group: R, Axis.B: S(0)}, {group: P, Axis.B: S(1)}), x, 2)
    src, dst = {"a": I, "b": V}, {"a": S(-1), "b": V}
    low = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float64}
    assert_carried(lambda x: redistribute(x, mesh, src, dst, **low) * 1, x, 2)
    varying = dict.fromkeys("ab", V)
    ab, ba = (SpmdType(varying, PartitionSpec(None, axes)) for axes in (("a", "b"), ("b", "a")))
    assert_carried(lambda x: redistribute(x, mesh, ab, ba), x, 2)
    rows = 3 if rank < 2 else 2
    uneven = {"shape": (5, 4), "reduction": "ordered"}
    assert_carried(lambda x: redistribute(x, mesh, {"a": S(0)}, {"a": R}, **uneven), values(rank, rows, 4), 2)


def test_several_axes() -> None:
    run_ranks(of_several_axes, 4)


def collectives_of(function: Function, x: torch.Tensor) -> list[tuple[str, ...]]:
    """The collectives of the forward and the backward graph, in their order; all results are used in the graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for node in module.graph.nodes if str(node.target).startswith("_c10d_functional.")]
        assert all(node.users for node in nodes), module.code
        graphs.append(tuple(str(node.target) for node in nodes))
        return make_boxed_func(module.forward)

    # As Inductor traces and divides graphs.
    backend = aot_autograd(
        fw_compiler=compiler, decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    want = outcome(function, x)
    assert same(outcome(torch.compile(function, backend=backend, fullgraph=True), x), want)
    return graphs


def graphs_of_ranks(rank: int) -> list[list[tuple[str, ...]]]:
    """Collectives in which some ranks receive nothing."""
    shardweave.install(spmd_types=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ab, ba = (SpmdType(dict.fromkeys("ab", V), PartitionSpec(axes)) for axes in (("a", "b"), ("b", "a")))

    def reordered(x: torch.Tensor) -> torch.Tensor:
        y = redistribute_spmd(x * 2, mesh, ab, ba).square()
        return redistribute_spmd(y, mesh, ba, dict.fromkeys("ab", R))

    uneven = {"axis": dist.group.WORLD, "split_sizes": [1, 1, 0, 0]}
    return [
        collectives_of(reordered, values(rank, 2, 3)),
        collectives_of(partial(spmd.reduce_scatter, dst=S(0), **uneven), values(rank, 2, 3)),
        collectives_of(partial(spmd.all_gather, src=S(0), dst=R, **uneven), values(rank, 1 if rank < 2 else 0, 3)),
    ]


def test_graphs_of_all_ranks_have_the_same_collectives() -> None:
    first, *others = run_ranks(graphs_of_ranks, 4)
    assert all(len(graphs) == 2 and all(graphs) for graphs in first)
    assert others == [first] * 3
