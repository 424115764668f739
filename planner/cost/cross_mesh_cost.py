"""The cost model of steps between two meshes, counted box by box, beside that of steps on one mesh (`cost`)."""

from __future__ import annotations

import math

import numpy as np

from ..exchange.layout_change import LayoutChange, layout_change
from ..exchange.senders import transfer_table
from ..exchange.steps import Traffic
from ..layouts.dtypes import ITEMSIZE
from ..layouts.index_sets import held_sizes
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .priced_ranks import PRICED_WHOLE, SAMPLED
from .step_cost import StepPrice, step_price
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
    change = layout_change(source_mesh, dtype, source, target, topology.node_size, target_mesh)
    return _cross_mesh_price(change, shape, topology) if change.is_cross_mesh else step_price(change, shape, topology)


def _cross_mesh_price(change: LayoutChange, shape: tuple[int, ...], topology: Topology) -> StepPrice:
    """The price of a change between meshes, by the rules of `cost.step_price`.

    Counted box by box: on every rank up to `PRICED_WHOLE` ranks, above on `SAMPLED` ranks spread over them.
    """
    union, size, us, peak = change.positions, ITEMSIZE[change.dtype], 0.0, 0
    whole = transfer_table(change, shape) if union.size <= PRICED_WHOLE else None
    sampled = (
        range(union.size) if whole else np.unique(np.linspace(0, union.size - 1, SAMPLED).astype(np.int64)).tolist()
    )
    nodes = None if topology.node_size is None else union.rank_array // topology.node_size
    node, network = topology.node, topology.network
    for rank in sampled:
        table = whole or transfer_table(change, shape, rank)
        traffic, sender = Traffic.of(table, rank, nodes), table.sender[:, 0]
        own = int(table.elements[(table.receiver == rank) & (sender == rank)].sum()) * size
        senders = np.unique(sender[(table.receiver == rank) & (sender != rank)])
        far_senders = 0 if nodes is None else int((nodes[senders] != nodes[rank]).sum())
        near_in, near_out = traffic.received_near * size, traffic.sent_near * size
        far_in, far_out = traffic.received_far * size, traffic.sent_far * size
        over_node = node.us(max(near_in, near_out), len(senders) - far_senders)
        over_network = network.us(max(far_in, far_out), far_senders)
        packed = (0 if node.one_sided else near_in + near_out) + (0 if network.one_sided else far_in + far_out)
        us = max(us, float(max(over_node, over_network) + topology.copy_us(own + packed)))
        ends = (change.source_mesh, change.source), (change.target_mesh, change.target)
        shards = [
            math.prod(held_sizes(shape, layout, mesh.shape, at))
            for mesh, layout in ends
            if (at := mesh.coordinate_of(rank, union)) is not None
        ]
        peak = max(peak, sum(shards) * size + packed)
    return StepPrice(us, 0.0, peak)
