"""Prices of meshes so large that some ranks stand for all, against those of every rank."""

from __future__ import annotations

import pytest

from shardweave import NVLINK_INFINIBAND, Layout, Mesh
from shardweave.planner import ranks
from shardweave.planner.cost import price
from shardweave.planner.exchange import Change

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((256, 64), "S0 S0 @ 0:1,0", "R S0"),  # half of the ranks hold nothing
        ((7, 8192), "S0 S1", "R S1"),  # most of them do
        ((7, 8192), "S0 S1", "S1 S0"),
        ((4096, 64), "S0 S0", "R S0"),
        ((4096, 64), "P S0", "S0 S0"),
    ],
)
def test_some_ranks_stand_for_all(
    shape: tuple[int, ...], source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh((64, 8))
    change = Change(mesh, "bfloat16", Layout.parse(source), Layout.parse(target), NVLINK_INFINIBAND.node_size)
    some = price(change, shape, NVLINK_INFINIBAND).us
    monkeypatch.setattr(ranks, "PRICED_WHOLE", mesh.size)
    ranks.ranks_of.cache_clear()
    everyone = price(change, shape, NVLINK_INFINIBAND).us
    ranks.ranks_of.cache_clear()
    assert everyone / 2 < some < everyone * 2
