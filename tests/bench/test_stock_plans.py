"""torch's plans: counts of their collectives, plans without a process group, prices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave
from shardweave import Layout, Mesh
from shardweave.bench.baselines.stock_plans import planned, stock_layouts, stock_received, stock_us
from shardweave.runtime.convert_specs import spec_of_layout

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    ("mesh", "source", "target", "elements"),
    [
        ((4, 2), "S0 S1", "R S1", 3 * 4 * 3),
        ((4, 2), "S0 S1", "R R", 4 * 3 + 3 * 4 * 6),  # the inner mesh dim first
        ((4, 2), "P R", "S0 R", 3 * 4 * 6),
        ((1, 2), "S0 R", "R R", 0),
    ],
)
def test_stock_received(mesh: tuple[int, ...], source: str, target: str, elements: int) -> None:
    """(n - 1) padded parts in each collective."""
    layouts = Layout.parse(source), Layout.parse(target)
    assert stock_received(Mesh(mesh), (16, 6), "bfloat16", *layouts) == 2 * elements
    assert stock_received(Mesh(mesh), (16, 6), "float32", *layouts) == 4 * elements


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_stock_layouts_without_process_group(shape: tuple[int, ...]) -> None:
    """They are those of a mesh with a process group, in any order of shards."""
    more = " R" * (len(shape) - 2)
    texts = [
        text.replace("|", more) for text in ("S0 S0|", "R S0|", "S0 R|", "P S0|", "S0 S1|", "S1 S0|", "S0 S0| @ 0:1,0",
                                             "P R|")
    ]  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", shape)
        meta = TensorMeta(torch.Size((64, 32)), (32, 1), torch.float32)
        for a, b, graph in product(texts, texts, (False, True)):
            if a == b or "P" in b:
                continue
            source, target = Layout.parse(a), Layout.parse(b)
            specs = (spec_of_layout(layout, mesh, meta) for layout in (source, target))
            real = _gen_transform_infos_non_cached(*specs, use_graph_based_transform=graph)
            layouts = planned(shape, (64, 32), source, target, graph)
            assert layouts[0] == source and layouts[-1] == target
            changed = [
                [m for m in range(len(shape)) if x.placements[m] != y.placements[m]] for x, y in pairwise(layouts)
            ]
            assert changed == [[step.mesh_dim] for step in real]
    finally:
        dist.destroy_process_group()


def test_stock_us_counts_one_call() -> None:
    request = Mesh((4, 2)), (1024, 64), "float32", Layout.parse("S0 S1"), Layout.parse("S1 S0")
    layouts = stock_layouts(request[0], request[1], *request[3:])
    assert layouts is not None and len(layouts) > 2
    free, dear = (stock_us(*request, replace(shardweave.NVLINK_NODE, call_us=us)) for us in (0.0, 500.0))
    assert free is not None and dear == pytest.approx(free + 500)
