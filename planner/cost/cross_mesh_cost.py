"""The cost model of steps between two meshes, counted box by box, beside that of steps on one mesh (`cost`)."""

from __future__ import annotations

import math

import numpy as np

from ..exchange.layout_change import LayoutChange
from ..exchange.node_change import NodeChange, layout_change
from ..exchange.senders import transfer_table
from ..exchange.steps import Traffic
from ..layouts.dtypes import ITEMSIZE
from ..layouts.index_sets import held_sizes
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from .node_cost import node_step_price
from .priced_ranks import priced_ranks
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
    change = layout_change(source_mesh, dtype, source, target, topology.rank_nodes, target_mesh)
    if isinstance(change, NodeChange):
        return node_step_price(change, shape, topology)
    return cross_mesh_price(change, shape, topology) if change.is_cross_mesh else step_price(change, shape, topology)


def cross_mesh_price(change: LayoutChange, shape: tuple[int, ...], topology: Topology) -> StepPrice:
    """The price of a change between meshes, by the rules of `cost.step_price`.

    Counted box by box, on the ranks of `priced_ranks`.
    """
    union, size, us, peak = change.positions, ITEMSIZE[change.dtype], 0.0, 0
    ranks = priced_ranks(union, topology)
    whole = transfer_table(change, shape) if ranks.whole else None
    sampled = ranks.positions[ranks.receivers].tolist()
    nodes = None if topology.rank_nodes is None else topology.nodes_of(union.rank_array)
    node, network = topology.node, topology.network
    tables = [whole or transfer_table(change, shape, rank) for rank in sampled]
    traffics = [Traffic.of(table, rank, nodes) for table, rank in zip(tables, sampled, strict=True)]
    all_in, all_out = (np.array([getattr(x, name) for x in traffics], dtype=np.float64) * size
                       for name in ("received_far", "sent_far"))  # fmt: skip
    busiest = ranks.on_nic(all_in, all_out).tolist()
    for rank, table, traffic, on_nic in zip(sampled, tables, traffics, busiest, strict=True):
        sender = table.sender[:, 0]
        own = int(table.elements[(table.receiver == rank) & (sender == rank)].sum()) * size
        senders = np.unique(sender[(table.receiver == rank) & (sender != rank)])
        far_senders = 0 if nodes is None else int((nodes[senders] != nodes[rank]).sum())
        near_in, near_out = traffic.received_near * size, traffic.sent_near * size
        far_in, far_out = traffic.received_far * size, traffic.sent_far * size
        over_node = node.us(max(near_in, near_out), len(senders) - far_senders)
        over_network = network.us(on_nic, far_senders)
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
