"""The cost model: the estimated time of a step from the bytes over each link, messages and copies.

Prices follow from index sets alone, before any box is made, and are computed for many steps at a time, so that a search
can compare them. If several ranks could send a box, each is charged an equal share of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..exchange.layout_change import LayoutChange
from ..layouts.dtypes import ITEMSIZE
from ..layouts.layout import Cuts, Layout
from .priced_ranks import (
    PricedRanks,
    SendShares,
    common_lengths,
    held_lengths,
    priced_ranks,
    receiver_lengths,
    send_shares,
)
from .topology import Topology

_MAX_AT_ONCE = 1 << 16  # entries of a [changes, receivers, peers] table, so that it stays in the core's cache
_UNCUT: tuple[Cuts, Cuts] = (), ()
_LARGE_ROW = 512  # entries of a row from which on rows are multiplied one by one, without a table of them


class StepPrice(NamedTuple):
    """The estimated cost of one step, on the slowest rank.

    Attributes:
        us: microseconds of the step.
        lower_bound_us: microseconds that any sequence of steps between its two layouts takes at least.
        peak_bytes: the bytes that a rank holds at most during the step: source, target, staged partial terms, packed
            bytes.
    """

    us: float
    lower_bound_us: float
    peak_bytes: int


def step_price(change: LayoutChange, shape: tuple[int, ...], topology: Topology) -> StepPrice:
    """The price of performing `change` on a tensor of `shape` in one step."""
    return step_prices([change], shape, topology)[0]


def step_prices(
    changes: Sequence[LayoutChange], shape: tuple[int, ...], topology: Topology, with_lower_bound: bool = True
) -> list[StepPrice]:
    """The prices of several changes of one tensor on one mesh; faster than one at a time.

    Args:
        with_lower_bound: whether `lower_bound_us` is computed; otherwise it is 0.
    """
    if not changes:
        return []
    ranks = priced_ranks(changes[0].source_mesh, topology)
    at_once = max(1, _MAX_AT_ONCE // ranks.near.size)
    prices: list[StepPrice] = []
    for first in range(0, len(changes), at_once):
        prices += _prices(changes[first : first + at_once], shape, topology, ranks, with_lower_bound)
    return prices


def shard_elements(ranks: PricedRanks, shape: Sequence[int], layout: Layout) -> np.ndarray:
    """[q] the elements of the shards of the priced ranks."""
    elements, cuts = np.ones(len(ranks.positions), dtype=np.int64), dict(layout.all_cuts)
    for d, extent in enumerate(shape):
        elements *= held_lengths(ranks, extent, cuts.get(d, ()))
    return elements


class _Numbers(NamedTuple):
    """Numbers of each of several changes: float64 [k, 1] each, as operations on arrays of one dtype are faster.

    Attributes:
        contributors: the number of terms that are reduced.
        staged: those of them that are staged: of a reduction where every rank has its own term, that one is not.
        is_split: 1 if a shard becomes a partial term, otherwise 0.
        split_shards: the number of shards that do.
    """

    contributors: np.ndarray
    staged: np.ndarray
    is_split: np.ndarray
    split_shards: np.ndarray

    @classmethod
    def of(cls, changes: Sequence[LayoutChange]) -> _Numbers:
        rows = [
            (
                c.contributors,
                c.contributors - c.is_local if c.contributors > 1 else 0,
                bool(c.split),
                math.prod([c.source_mesh.shape[m] for m in c.shards_split]),
            )
            for c in changes
        ]
        return cls(*np.array(rows, dtype=np.float64).T[..., None])


class _Elements(NamedTuple):
    """The elements of the shards of several changes.

    Attributes:
        common: [k, r, p] those that receiver r wants and its peer holds.
        before, after: [k, r] those that receiver r holds before and after the change.
        senders: [k, r] the number of ranks that receiver r receives from, itself included, if shards are even: of
            source shards that its target shard meets, times the number of terms. None where all ranks are priced.
    """

    common: np.ndarray
    before: np.ndarray
    after: np.ndarray
    senders: np.ndarray | None


def _elements(
    ranks: PricedRanks, shape: tuple[int, ...], changes: Sequence[LayoutChange], numbers: _Numbers
) -> _Elements:
    number, receivers = len(changes), len(ranks.receivers)
    common, of_receivers = np.ones((number, *ranks.near.shape)), np.ones((number, 3, receivers))
    by_dim = [(dict(change.target.all_cuts), dict(change.source.all_cuts)) for change in changes]
    for d, extent in enumerate(shape):
        pairs: dict[tuple[Cuts, Cuts], int] = {}  # of wanted and held cuts
        index = [pairs.setdefault((wanted.get(d, ()), held.get(d, ())), len(pairs)) for wanted, held in by_dim]
        if pairs.keys() == {_UNCUT}:  # usual; all ranks have all of this dim
            common *= extent
            of_receivers[:, :2] *= extent
            continue
        tables = [common_lengths(ranks, extent, pair) for pair in pairs]
        common = _times(common, tables if len(tables) == 1 else [tables[i] for i in index], common)
        of_receivers *= np.stack([receiver_lengths(ranks, extent, pair) for pair in pairs])[index]
    wanted, held, met = of_receivers.swapaxes(0, 1)
    return _Elements(common, held, wanted, None if ranks.whole else met * numbers.contributors)


def _times(table: np.ndarray, rows: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """[k, …] a table times `rows`: [1, …] for each k, or a single one for all."""
    if len(rows) == 1 or rows[0].size < _LARGE_ROW:
        return np.multiply(table, np.concatenate(rows), out=out)
    product = np.empty(table.shape) if out is None else out
    for of_table, row, to in zip(table, rows, product, strict=True):
        np.multiply(of_table, row[0], out=to)
    return product


class _Traffic(NamedTuple):
    """What receivers exchange in several changes: [k, r] each, in bytes but for the numbers of peers.

    Attributes:
        own: what a receiver takes from itself.
        near_in, near_out: what it receives from other ranks of its node, and sends to them.
        far_in, far_out: the same of ranks on other nodes.
        near_peers, far_peers: the number of ranks that it receives from; 0 where messages have no price.
    """

    own: np.ndarray
    near_in: np.ndarray
    near_out: np.ndarray
    far_in: np.ndarray
    far_out: np.ndarray
    near_peers: np.ndarray
    far_peers: np.ndarray


def _traffic_of_all(
    ranks: PricedRanks, shares: Sequence[SendShares], elements: _Elements, size: int, topology: Topology
) -> _Traffic:
    """The traffic where all ranks are priced, of elements of `size` bytes."""
    common, near_shares = elements.common, [x.near for x in shares]
    near = _times(common, near_shares)
    own = near[:, np.arange(len(ranks.receivers)), ranks.own_at] * size
    near_in, near_out = near.sum(axis=2) * size - own, near.sum(axis=1) * size - own
    far_in = far_out = near_peers = far_peers = np.zeros_like(own)
    if topology.node.message_us:
        near_peers = _senders(ranks, common, near_shares)[1]
    if not ranks.one_node:
        far_shares = [x.far for x in shares]
        far = _times(common, far_shares)
        far_in, far_out = far.sum(axis=2) * size, far.sum(axis=1) * size
        if topology.network.message_us:
            far_peers = _times(common > 0, far_shares).sum(axis=2)
    return _Traffic(own, near_in, near_out, far_in, far_out, near_peers, far_peers)


def _traffic_of_sample(
    ranks: PricedRanks,
    shares: Sequence[SendShares],
    elements: _Elements,
    size: int,
    topology: Topology,
    numbers: _Numbers,
) -> _Traffic:
    """The traffic where only sampled receivers and the ranks of their nodes are known.

    Everything that a receiver's node does not hold comes from other nodes. What a rank sends is estimated: of what it
    holds as much as ranks do on average, to other nodes the share that comes from there.
    """
    common, before, after, senders = elements
    assert senders is not None
    near_shares = [x.near for x in shares]
    near = _times(common, near_shares)
    own = near[:, np.arange(len(ranks.receivers)), ranks.own_at] * size
    from_node = near.sum(axis=2) * size - own
    keeps = np.concatenate([x.keeps for x in shares])
    wanted = after * size * numbers.contributors / numbers.split_shards * keeps
    missing = np.maximum(wanted - own - from_node, 0)
    received = from_node + missing
    average = wanted.sum(axis=1, keepdims=True) / np.maximum(before.sum(axis=1, keepdims=True) * size, 1)
    sent = np.maximum(before * size * average - own, 0) * received.any(axis=1, keepdims=True)
    nothing = np.zeros_like(own)
    if ranks.one_node:
        near_peers = (received > 0) * np.maximum(senders - (own > 0), 1) if topology.node.message_us else nothing
        return _Traffic(own, received, sent, nothing, nothing, near_peers, nothing)
    entering = missing.sum(axis=1, keepdims=True) / np.maximum(received.sum(axis=1, keepdims=True), 1)
    on_node, near_peers = _senders(ranks, common, near_shares)
    far_peers = (missing > 0) * np.maximum(senders - on_node, 1)
    near_peers = near_peers if topology.node.message_us else nothing
    return _Traffic(own, from_node, sent * (1 - entering), missing, sent * entering, near_peers, far_peers)


def _senders(
    ranks: PricedRanks, common: np.ndarray, near_shares: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """[k, r] the number of ranks of its node that each receiver takes elements from, and that without itself."""
    senders = _times(common > 0, near_shares)
    number = senders.sum(axis=2)
    return number, number - senders[:, np.arange(len(ranks.receivers)), ranks.own_at]


def _prices(
    changes: Sequence[LayoutChange],
    shape: tuple[int, ...],
    topology: Topology,
    ranks: PricedRanks,
    with_lower_bound: bool,
) -> list[StepPrice]:
    """`step_prices` of one chunk. Arrays are [k, r], per change and receiver, and in bytes unless noted."""
    size, node, network = ITEMSIZE[changes[0].dtype], topology.node, topology.network
    numbers = _Numbers.of(changes)
    elements = _elements(ranks, shape, changes, numbers)
    shares = [send_shares(ranks, change) for change in changes]
    if ranks.whole:
        traffic = _traffic_of_all(ranks, shares, elements, size, topology)
    else:
        traffic = _traffic_of_sample(ranks, shares, elements, size, topology, numbers)
    own, near_in, near_out, far_in, far_out, near_peers, far_peers = traffic
    before, after = elements.before * size, elements.after * size

    over_node = node.us(np.maximum(near_in, near_out), near_peers)
    over_network = network.us(ranks.on_nic(far_in, far_out), far_peers)
    received = near_in + far_in
    packed = (0 if node.one_sided else near_in + near_out) + (0 * own if network.one_sided else far_in + far_out)
    staged = packed + numbers.staged * after
    filled = numbers.is_split * (after - (own + received) / numbers.contributors)
    copies = topology.copy_us(own + packed + (numbers.contributors - 1) * after + filled / 2)
    us = (np.maximum(over_node, over_network) + copies).max(axis=1)
    peak = np.ceil((before + after + staged).max(axis=1))
    bound = np.zeros(len(changes))
    if with_lower_bound:
        bound = _lower_bound_us(changes, numbers, shape, topology, ranks, elements.common * size, after, own)
    return [StepPrice(a, b, int(c)) for a, b, c in zip(us.tolist(), bound.tolist(), peak.tolist(), strict=True)]


def _lower_bound_us(
    changes: Sequence[LayoutChange],
    numbers: _Numbers,
    shape: tuple[int, ...],
    topology: Topology,
    ranks: PricedRanks,
    common: np.ndarray,
    wanted: np.ndarray,
    own: np.ndarray,
) -> np.ndarray:
    """[k] a lower bound on the time of any sequence of steps; 0 if the target has new partials.

    At best a rank receives what it lacks over both links at once, and a node receives what it lacks over the network.
    Reducing n terms takes n - 1 additions of received terms, and a rank that wants a sum without computing it receives
    it; these bytes are averaged over the ranks. If receivers are sampled, averages over them stand for those over all
    ranks, and a node receives at least what one of its receivers lacks.

    Args:
        common: [k, r, p] bytes that receiver r wants and its peer holds.
        wanted: [k, r] bytes of the target shards.
        own: [k, r] bytes of the target shards that the receiver already holds.
    """
    node, network = topology.node, topology.network
    whole = math.prod(shape) * ITEMSIZE[changes[0].dtype]
    terms = numbers.contributors
    lacking = np.where(terms > 1, wanted, wanted - own).max(axis=1)
    added = whole * (terms[:, 0] - 1) / ranks.mesh.size
    received = np.maximum(lacking, added + (terms[:, 0] > 1) * (wanted.mean(axis=1) - whole / ranks.mesh.size))
    if ranks.one_node:
        bound = (received > 0) * node.latency_us + received / (node.gigabytes_per_s * 1e3)
    else:
        both = (node.gigabytes_per_s + network.gigabytes_per_s) * 1e3
        bound = (received > 0) * min(node.latency_us, network.latency_us) + received / both
        # One rank per node receives what several ranks of the node want; ranks that hold the same shard count once.
        first_held = [ranks.first_peers(change.source) for change in changes]
        first_wanted = np.stack([ranks.first_receivers(change.target) for change in changes])
        on_node = np.array([[ranks.terms_on_node(change.reduced)] for change in changes])
        held = _times(common, first_held).sum(axis=2)
        missing = np.where(terms > on_node, wanted, np.maximum(wanted - held, 0)) * first_wanted
        if ranks.whole:
            entering = ((missing[:, None] * ranks.members).sum(axis=2) / ranks.nics_on).max(axis=1)
        else:
            entering = (missing / ranks.nics_on[ranks.nodes[ranks.receivers]]).max(axis=1)
        sums, nics = np.ceil(terms / on_node)[:, 0], ranks.nics_on.sum() * ranks.mesh.size / len(ranks.positions)
        entered = (missing.mean(axis=1) * ranks.mesh.size + whole * np.maximum(sums - 2, 0)) / nics
        over_network = np.maximum(entering, entered) / (network.gigabytes_per_s * 1e3)
        entry = (entering > 0) * (network.latency_us + network.message_us)
        bound = np.maximum(bound, over_network + entry)
    return bound * (1 - numbers.is_split[:, 0])
