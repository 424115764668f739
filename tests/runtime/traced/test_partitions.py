"""Forward and backward graphs: ranks that exchange nothing keep every collective, where the others have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from traced_ranks import collectives_in, fake_rank, groups_of_rank, spec

import shardweave

MESH = (2, 2)


def collectives(
    rank: int, layouts: list[str], shape: tuple[int, int], partition: Callable[..., Any]
) -> list[list[tuple[str, tuple[int, ...], int]]]:
    """Those of the forward and of the backward graph of two redistributions, of which inputs are saved."""
    graphs: dict[str, Any] = {}

    def compiler(name: str) -> Callable[..., Any]:
        def compile_graph(graph: Any, _: Any) -> Any:
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compile_graph

    with fake_rank(rank, MESH) as mesh, shardweave.installed():
        specs = [spec(mesh, text, shape, torch.float32) for text in layouts]

        def function(local: torch.Tensor) -> torch.Tensor:
            given = {"shape": torch.Size(shape), "stride": (shape[1], 1)}
            x = DTensor.from_local(local, mesh, specs[0].placements, run_check=False, **given)
            y = (x * x).redistribute(placements=specs[1].placements).sin()
            return (y * y).redistribute(placements=specs[2].placements).cos().to_local()

        held = shardweave.plan(MESH, shape, "float32", layouts[0], "R R").source_shape(rank)
        with FakeTensorMode():
            compiled = aot_function(function, compiler("forward"), compiler("backward"), partition_fn=partition)
            compiled(torch.ones(held, requires_grad=True)).sum().backward()
        return [collectives_in(graphs[name], groups_of_rank(), rank) for name in ("forward", "backward")]


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_ranks_have_the_same_collectives(partition: Callable[..., Any]) -> None:
    draw = random.Random(0)
    for _ in range(3):
        layouts = [" ".join(draw.choice(["R", "S0", "S1"]) for _ in MESH) for _ in range(3)]
        shape = draw.choice([(5, 3), (3, 8), (1, 7), (2, 2), (13, 8)])
        of_ranks = [collectives(rank, layouts, shape, partition) for rank in range(4)]
        for graph in (0, 1):
            for rank, mine in enumerate(of_ranks):
                for peer, theirs in enumerate(of_ranks):
                    together = [(name, ranks) for name, ranks, _ in mine[graph] if peer in ranks]
                    assert together == [(name, ranks) for name, ranks, _ in theirs[graph] if rank in ranks], (
                        layouts, shape, rank, peer
                    )  # fmt: skip
