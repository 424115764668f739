"""Step prices of large meshes, for which ranks are sampled, against prices of all ranks."""

from __future__ import annotations

import pytest

from shardweave import NVLINK_INFINIBAND, Layout, Mesh
from shardweave.planner.cost import priced_ranks
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.layout_change import LayoutChange

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((256, 64), "S0 S0 @ 0:1,0", "R S0"),  # half of the ranks hold nothing
        ((7, 8192), "S0 S1", "R S1"),  # most ranks hold nothing
        ((7, 8192), "S0 S1", "S1 S0"),
        ((4096, 64), "S0 S0", "R S0"),
        ((4096, 64), "P S0", "S0 S0"),
    ],
)
def test_step_price_of_sampled_ranks(
    shape: tuple[int, ...], source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh((64, 8))
    change = LayoutChange(mesh, "bfloat16", Layout.parse(source), Layout.parse(target), NVLINK_INFINIBAND.node_size)
    sampled = step_price(change, shape, NVLINK_INFINIBAND).us
    monkeypatch.setattr(priced_ranks, "PRICED_WHOLE", mesh.size)
    priced_ranks.priced_ranks.cache_clear()
    exact = step_price(change, shape, NVLINK_INFINIBAND).us
    priced_ranks.priced_ranks.cache_clear()
    assert exact / 2 < sampled < exact * 2
