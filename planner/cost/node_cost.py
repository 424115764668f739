"""The cost model of steps from or to a `NodeLayout`, counted box by box, by the rules of `step_cost`."""

from __future__ import annotations

import numpy as np

from ..exchange.node_change import NodeChange, held_elements, node_transfer_table
from ..exchange.transfer_table import FILL
from ..layouts.dtypes import ITEMSIZE
from .priced_ranks import priced_ranks
from .step_cost import StepPrice
from .topology import Topology


def node_step_price(change: NodeChange, shape: tuple[int, ...], topology: Topology) -> StepPrice:
    """The price of performing `change` on a tensor of `shape` in one step, with up to `PRICED_WHOLE` ranks in all. It
    has no lower bound."""
    mesh, size = change.positions, ITEMSIZE[change.dtype]
    table = node_transfer_table(change, shape)
    nodes, ranks = topology.nodes_of(mesh.rank_array), mesh.size
    receiver = np.broadcast_to(table.receiver[:, None], table.sender.shape)
    elements = np.broadcast_to(table.elements[:, None], table.sender.shape)
    terms = table.sender != FILL
    receiver, sender, nbytes = receiver[terms], table.sender[terms], elements[terms] * size
    own, near = sender == receiver, nodes[sender] == nodes[receiver]

    def by_rank(of: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.bincount(of[rows], weights=nbytes[rows], minlength=ranks)

    def peers(rows: np.ndarray) -> np.ndarray:
        pairs = np.zeros((ranks, ranks), dtype=bool)
        pairs[receiver[rows], sender[rows]] = True
        return pairs.sum(axis=1)

    inside, across = near & ~own, ~near
    near_in, near_out = by_rank(receiver, inside), by_rank(sender, inside)
    far_in, far_out = by_rank(receiver, across), by_rank(sender, across)
    node, network = topology.node, topology.network
    over_node = node.us(np.maximum(near_in, near_out), peers(inside))
    over_network = network.us(priced_ranks(mesh, topology).on_nic(far_in, far_out), peers(across))
    packed = (0 if node.one_sided else near_in + near_out) + (0 if network.one_sided else far_in + far_out)
    before, after = np.zeros((2, ranks), dtype=np.int64)
    for held, (on, layout) in (
        (before, (change.source_mesh, change.source)),
        (after, (change.target_mesh, change.target)),
    ):
        held[mesh.positions_of(on.rank_array)] = held_elements(on, layout, shape) * size
    reduced = np.bincount(table.receiver, weights=(terms.sum(axis=1) - 1) * table.elements, minlength=ranks) * size
    us = np.maximum(over_node, over_network) + topology.copy_us(by_rank(receiver, own) + packed + reduced)
    staged = packed + (change.contributors if change.contributors > 1 else 0) * after
    return StepPrice(float(us.max()), 0.0, int((before + after + staged).max()))
