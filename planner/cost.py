"""What a step costs on a topology: bytes over each link, messages, copies, and the microseconds that follow.

Priced from index sets alone, before any box is made, and many steps at a time, so that a search can compare them. Where
several ranks could send a box, each is priced for its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from .dtypes import ITEMSIZE
from .exchange import Change
from .layout import Layout, receivers_contribute
from .ranks import Ranks, lengths, overlap, ranks_of, shares
from .topology import Topology

K = TypeVar("K", bound=Hashable)

_MOST_AT_ONCE = 1 << 16  # numbers in a table of receivers and holders: such tables stay in a core's own cache


class Price(NamedTuple):
    """Of one step, in microseconds, on the rank that takes longest.

    Attributes:
        us: what the step takes.
        least_us: what no sequence of steps between its two layouts can beat.
        peak_bytes: what a rank holds at most while it runs: source, target, contributions, packed bytes.
    """

    us: float
    least_us: float
    peak_bytes: int


def price(change: Change, shape: tuple[int, ...], topology: Topology) -> Price:
    """The price of doing `change` to a tensor of a shape in one step."""
    return prices([change], shape, topology)[0]


def prices(changes: Sequence[Change], shape: tuple[int, ...], topology: Topology, unbounded: int = 0) -> list[Price]:
    """The price of each of some changes of one tensor on one mesh; the first `unbounded` have 0 for `least_us`."""
    if not changes:
        return []
    at = ranks_of(changes[0].mesh, topology)
    at_once = max(1, _MOST_AT_ONCE // at.near.size)
    found: list[Price] = []
    for first in range(0, len(changes), at_once):
        found += _prices(changes[first : first + at_once], shape, topology, at, max(0, unbounded - first))
    return found


def elements(at: Ranks, shape: Sequence[int], layouts: Sequence[Layout]) -> np.ndarray:
    """[layouts, q] elements of the shards of the ranks that are looked at."""
    found = np.ones((len(layouts), len(at.positions)), dtype=np.int64)
    cuts = [dict(layout.all_cuts) for layout in layouts]
    for d, extent in enumerate(shape):
        found *= _rows([by_dim.get(d, ()) for by_dim in cuts], partial(lengths, at, extent))
    return found


def _overlaps(at: Ranks, shape: tuple[int, ...], changes: Sequence[Change]) -> np.ndarray:
    """[k, r, q] elements that receiver r wants and rank q holds."""
    found = np.ones((len(changes), *at.near.shape))
    by_dim = [(dict(change.target.all_cuts), dict(change.source.all_cuts)) for change in changes]
    for d, extent in enumerate(shape):
        cuts = [(wanted.get(d, ()), held.get(d, ())) for wanted, held in by_dim]
        found *= _rows(cuts, partial(overlap, at, extent))
    return found


def _senders(at: Ranks, shape: tuple[int, ...], changes: Sequence[Change]) -> np.ndarray:
    """[k, r] ranks that receiver r takes something from, itself counted, where shards are even: the shards that its own
    meets, of each as many as there are terms."""
    found = np.array([[change.contributors] for change in changes]) * np.ones(len(at.receivers))
    by_dim = [(dict(change.target.all_cuts), dict(change.source.all_cuts)) for change in changes]
    for d, extent in enumerate(shape):
        wanted, held = (_rows([x[i].get(d, ()) for x in by_dim], partial(lengths, at, extent)) for i in (0, 1))
        found *= np.ceil(wanted[:, at.receivers] / np.maximum(held.max(axis=1, keepdims=True), 1))
    return found


def _rows(keys: Sequence[K], make: Callable[[K], np.ndarray]) -> np.ndarray:
    """[keys, …] the row [1, …] that `make` gives for each key, or [1, …] where all are the same; most keys repeat."""
    places: dict[K, int] = {}
    index = [places.setdefault(key, len(places)) for key in keys]
    found = [make(key) for key in places]
    return found[0] if len(found) == 1 else np.concatenate(found).take(index, axis=0)


def _prices(
    changes: Sequence[Change], shape: tuple[int, ...], topology: Topology, at: Ranks, unbounded: int
) -> list[Price]:
    """Arrays are [k, r]: of each change, on each receiver; bytes unless said otherwise."""
    size, node, network = ITEMSIZE[changes[0].dtype], topology.node, topology.network
    contributors = np.array([[change.contributors] for change in changes])
    layouts = {layout: i for i, layout in enumerate(dict.fromkeys([x for c in changes for x in (c.source, c.target)]))}
    held = elements(at, shape, list(layouts))[:, at.receivers] * size
    before, after = held[[layouts[c.source] for c in changes]], held[[layouts[c.target] for c in changes]]
    common = _overlaps(at, shape, changes)
    shared = [shares(at, change) for change in changes]
    near_shares = np.concatenate([x.near for x in shared])
    near = common * near_shares
    own = near[:, np.arange(len(at.receivers)), at.receivers] * size
    near_in = near.sum(axis=2) * size - own
    near_out = near.sum(axis=1) * size - own if at.whole else near_in
    far_in = far_out = near_peers = far_peers = np.zeros_like(own)
    if node.message_us:
        peers = (common > 0) * near_shares
        near_peers = peers.sum(axis=2) - peers[:, np.arange(len(at.receivers)), at.receivers]
    if at.whole and not at.one_node:
        far_shares = np.concatenate([x.far for x in shared])
        far = common * far_shares
        far_in, far_out = far.sum(axis=2) * size, far.sum(axis=1) * size
        if network.message_us:
            far_peers = ((common > 0) * far_shares).sum(axis=2)
    if not at.whole:
        # Only the receivers' nodes were looked at: what these have not comes from elsewhere.
        owned = np.array([[math.prod(c.mesh.shape[m] for m in c.shards_split)] for c in changes])
        keeps = np.concatenate([x.keeps for x in shared])
        missing = np.maximum(after * contributors / owned - own - near_in, 0) * keeps
        if at.one_node:
            near_in = near_out = near_in + missing
        else:
            far_in = far_out = missing
            others = _senders(at, shape, changes) - (near > 0).sum(axis=2)
            far_peers = (missing > 0) * np.maximum(others, 1)

    over_node = node.us(np.maximum(near_in, near_out), near_peers)
    over_network = network.us(np.maximum(far_in, far_out), far_peers)
    came = near_in + far_in
    packed = (0 if node.one_sided else near_in + near_out) + (0 * own if network.one_sided else far_in + far_out)
    terms = [(c.contributors, c.contributors > 1 and receivers_contribute(c.source, c.target)) for c in changes]
    slabs = np.array([[0 if number == 1 else number - own] for number, own in terms])
    staged = packed + slabs * after
    split = np.array([[bool(change.split)] for change in changes])
    filled = split * (after - (own + came) / contributors)
    copies = topology.copy_us(own + packed + (contributors - 1) * after + filled / 2)
    us = (np.maximum(over_node, over_network) + copies).max(axis=1)
    peak = np.ceil((before + after + staged).max(axis=1))
    least = np.zeros(len(changes))
    if last := changes[unbounded:]:
        bytes_ = common[unbounded:] if len(common) > 1 else common
        least[unbounded:] = _least_us(last, shape, topology, at, bytes_ * size, after[unbounded:], own[unbounded:])
    return [Price(a, b, int(c)) for a, b, c in zip(us.tolist(), least.tolist(), peak.tolist(), strict=True)]


def _least_us(
    changes: Sequence[Change],
    shape: tuple[int, ...],
    topology: Topology,
    at: Ranks,
    common: np.ndarray,
    wanted: np.ndarray,
    own: np.ndarray,
) -> np.ndarray:
    """[k] a bound from below on any steps that communicate. 0 where a value is split into terms, and where not every
    rank is looked at.

    What a rank lacks comes in over both links at once at best, what its node lacks over the network. Of a value that is
    reduced, n terms take n - 1 additions, each of something that came in, and who does not add up a sum that it wants
    receives it; so much is an average over the ranks.
    """
    if not at.whole:
        return np.zeros(len(changes))
    node, network, ranks = topology.node, topology.network, len(at.positions)
    whole = math.prod(shape) * ITEMSIZE[changes[0].dtype]
    terms = np.array([[change.contributors] for change in changes])
    lacking = np.where(terms > 1, wanted, wanted - own).max(axis=1)
    added = whole * (terms[:, 0] - 1) / ranks
    received = np.maximum(lacking, added + (terms[:, 0] > 1) * (wanted.sum(axis=1) - whole) / ranks)
    if at.one_node:
        least = (received > 0) * node.latency_us + received / (node.gigabytes_per_s * 1e3)
    else:
        both = (node.gigabytes_per_s + network.gigabytes_per_s) * 1e3
        least = (received > 0) * min(node.latency_us, network.latency_us) + received / both
        # Of ranks of a node that want the same one can bring it in, and of those that hold the same each has it all.
        first = {x: at.first_of_shard(x) for x in {*(c.source for c in changes), *(c.target for c in changes)}}
        first_held = np.stack([first[change.source] for change in changes])
        first_wanted = np.stack([first[change.target] for change in changes])
        on_node = np.array([[at.terms_on_node(change.reduced)] for change in changes])
        held = (common * (at.near & first_held[:, None])).sum(axis=2)
        missing = np.where(terms > on_node, wanted, np.maximum(wanted - held, 0)) * first_wanted
        by_node = (missing[:, None] * at.members).sum(axis=2)
        entering = (by_node / at.members.sum(axis=1)).max(axis=1)
        sums = np.ceil(terms / on_node)[:, 0]
        entered = np.where(sums > 1, whole * (sums - 2) + by_node.sum(axis=1), by_node.sum(axis=1)) / ranks
        over_network = np.maximum(entering, entered) / (network.gigabytes_per_s * 1e3)
        entry = (entering > 0) * (network.latency_us + network.message_us)
        least = np.maximum(least, over_network + entry)
    return least * [not change.split for change in changes]
