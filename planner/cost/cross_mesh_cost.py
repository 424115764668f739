"""The cost model of steps between two meshes, counted box by box, beside that of steps on one mesh (`step_cost`)."""

from __future__ import annotations

import math

import numpy as np

from ..exchange.layout_change import LayoutChange
from ..exchange.node_change import NodeChange, layout_change
from ..exchange.senders import tables_of_ranks
from ..exchange.transfer_table import TransferTable
from ..layouts.distinct import distinct
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
    """The price of a change between meshes, by the rules of `step_cost.step_price`.

    Counted box by box, on the ranks of `priced_ranks`.
    """
    union, size = change.positions, ITEMSIZE[change.dtype]
    ranks = priced_ranks(union, topology)
    sampled = ranks.positions[ranks.receivers]
    received, sent = tables_of_ranks(change, shape, None if ranks.whole else sampled.tolist())
    nodes = topology.nodes_of(union.rank_array)
    index = np.full(union.size, -1)  # of each position among the priced ones
    index[sampled] = np.arange(len(sampled))

    def sums(rank: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """[priced ranks] the sums of weights, or the number of entries."""
        return np.bincount(index[rank], weights, minlength=len(sampled))

    def near_and_far(table: TransferTable, of_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[priced ranks] the bytes that each of them exchanges with its node, and with other nodes."""
        sender, nbytes = table.sender[:, 0], table.elements * size
        near = nodes[sender] == nodes[table.receiver]
        inside, across = near & (sender != table.receiver), ~near
        return sums(of_rank[inside], nbytes[inside]), sums(of_rank[across], nbytes[across])

    receiver, sender = received.receiver, received.sender[:, 0]
    near_in, far_in = near_and_far(received, receiver)
    near_out, far_out = near_and_far(sent, sent.sender[:, 0])
    kept = sender == receiver
    own = sums(receiver[kept], received.elements[kept] * size)
    to, by = np.divmod(distinct(receiver[~kept] * union.size + sender[~kept]), union.size)
    far = nodes[to] != nodes[by]
    node, network = topology.node, topology.network
    over_node = node.us(np.maximum(near_in, near_out), sums(to[~far], None))
    over_network = network.us(ranks.on_nic(far_in, far_out), sums(to[far], None))
    packed = (0 if node.one_sided else near_in + near_out) + (0 if network.one_sided else far_in + far_out)
    us = np.maximum(over_node, over_network) + topology.copy_us(own + packed)
    ends = (change.source_mesh, change.source), (change.target_mesh, change.target)
    elements = [
        sum(
            math.prod(held_sizes(shape, layout, mesh.shape, at))
            for mesh, layout in ends
            if (at := mesh.coordinate_of(rank, union)) is not None
        )
        for rank in sampled.tolist()
    ]
    return StepPrice(float(us.max()), 0.0, int((np.array(elements) * size + packed).max()))
