"""The cost model of steps between two meshes, counted box by box, beside that of steps on one mesh (`cost`)."""

from __future__ import annotations

import numpy as np

from .cost import StepPrice, step_price
from .cross_mesh_exchange import CrossMeshExchange
from .dtypes import ITEMSIZE
from .exchange import layout_change
from .layout import Layout
from .mesh import Mesh
from .priced_ranks import PRICED_WHOLE, SAMPLED
from .topology import Topology


def step_price_between(
    source_mesh: Mesh,
    source: Layout,
    target_mesh: Mesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: str,
    topology: Topology,
) -> StepPrice:
    """The price of one step, on one mesh or between two."""
    if source_mesh == target_mesh:
        return step_price(layout_change(source_mesh, dtype, source, target, topology.node_size), shape, topology)
    return _cross_mesh_price(
        CrossMeshExchange(shape, source_mesh, source, target_mesh, target, topology.node_size), dtype, topology
    )


def _cross_mesh_price(exchange: CrossMeshExchange, dtype: str, topology: Topology) -> StepPrice:
    """The price of an exchange between meshes, by the rules of `cost.step_price`.

    Counted box by box: on every rank up to `PRICED_WHOLE` ranks, above on `SAMPLED` ranks spread over them.
    """
    union, size, us, peak = exchange.union, ITEMSIZE[dtype], 0.0, 0
    whole = exchange.boxes() if union.size <= PRICED_WHOLE else None
    sampled = (
        range(union.size) if whole else np.unique(np.linspace(0, union.size - 1, SAMPLED).astype(np.int64)).tolist()
    )
    nodes = union.rank_array // (topology.node_size or union.rank_array.max() + 1)
    node, network = topology.node, topology.network
    for rank in sampled:
        boxes = whole or exchange.boxes(rank)
        nbytes, sender = boxes.elements * size, boxes.sender[:, 0]
        own = int(nbytes[(boxes.receiver == rank) & (sender == rank)].sum())
        moved = {}
        for direction, mine, other in (("in", boxes.receiver, sender), ("out", sender, boxes.receiver)):
            rows = (mine == rank) & (other != rank)
            near = rows & (nodes[other] == nodes[rank])
            for reach, selected in (("near", near), ("far", rows & ~near)):
                moved[reach, direction] = int(nbytes[selected].sum()), len(np.unique(other[selected]))
        over = [
            link.us(max(moved[reach, "in"][0], moved[reach, "out"][0]), moved[reach, "in"][1])
            for link, reach in ((node, "near"), (network, "far"))
        ]
        packed = sum(
            0 if link.one_sided else moved[reach, "in"][0] + moved[reach, "out"][0]
            for link, reach in ((node, "near"), (network, "far"))
        )
        us = max(us, float(max(over) + topology.copy_us(own + packed)))
        held = exchange.elements(exchange.source_mesh, exchange.source, rank)
        wanted = exchange.elements(exchange.target_mesh, exchange.target, rank)
        peak = max(peak, (held + wanted) * size + packed)
    return StepPrice(us, 0.0, peak)
