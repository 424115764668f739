"""How long links carry messages that share them equally."""

from __future__ import annotations

import numpy as np
import pytest

from shardweave.planner.cost.link_time import equal_rates, fair_rates, link_time

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("seed", range(200))
def test_rates_are_max_min_fair(seed: int) -> None:
    """No link carries more than it can, and each message is on a full link on which none is faster: so no rate can rise
    unless a lower one, or an equal one, falls."""
    random = np.random.default_rng(seed)
    number = int(random.integers(2, 13))
    links = random.integers(0, number, (2, int(random.integers(1, 40))))
    links[1] = (links[0] + random.integers(1, number, links.shape[1])) % number
    rates = fair_rates(links, number)
    carried = np.bincount(links.ravel(), np.tile(rates, 2), number)
    assert (carried <= 1 + 1e-6).all()
    fastest = np.zeros(number)
    np.maximum.at(fastest, links.ravel(), np.tile(rates, 2))
    is_bottleneck = (carried[links] >= 1 - 1e-6) & (rates >= fastest[links] - 1e-6)
    assert is_bottleneck.any(axis=0).all()


# The node of each rank; elements by sender and receiver; the time.
@pytest.mark.parametrize(
    ("node", "sent", "time"),
    [
        ([0, 0], {(0, 1): 9}, 0),  # inside a node
        ([0, 1], {}, 0),
        ([0, 1], {(0, 1): 9, (1, 0): 9}, 9),  # both directions at once
        ([0, 1, 1], {(0, 1): 4, (0, 2): 6}, 10),
        # Half of node 0's link each until one ends.
        ([0, 1, 2], {(0, 1): 2, (0, 2): 8}, 10),
        # Node 2 sends a third each to ranks 0, 1 and 3, so that node 1 receives 1/3 of what its link carries until the
        # others have ended, and only then all.
        ([0, 0, 2, 1], {(2, 0): 3, (2, 1): 3, (2, 3): 9}, 15),
        # What each rank of 1, 2 and 2 holds to all other nodes, in halves to the two ranks of a node: all six messages
        # to, or from, nodes 1 and 2 take a sixth of a link, so that node 0 receives 4/6 for the first 12, then all.
        (
            [0, 1, 1, 2, 2],
            {
                **{(0, r): 2 for r in (1, 2, 3, 4)},
                **{(s, 0): 4 for s in (1, 2, 3, 4)},
                **dict.fromkeys(((1, 3), (1, 4), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2)), 2),
            },
            20,
        ),
    ],
    ids=str,
)
def test_time_of_known_messages(node: list[int], sent: dict[tuple[int, int], int], time: float) -> None:
    elements = np.zeros((len(node), len(node)), dtype=np.int64)
    for (sender, receiver), number in sent.items():
        elements[sender, receiver] = number
    for scale in (1, 10**6):
        assert link_time(elements * scale, np.array(node)) == pytest.approx(time * scale, rel=0.02)


def test_time_where_messages_do_not_take_up_what_others_leave() -> None:
    """Node 2 receives three messages, a third of its link each. Those of node 0 leave a third of its link, which the
    other message of node 0 takes up, or does not."""
    elements = np.zeros((5, 5), dtype=np.int64)
    elements[0, 1], elements[[0, 3, 4], 2] = 6000, 3000
    assert link_time(elements, np.arange(5)) == pytest.approx(9000, rel=0.02)
    assert link_time(elements, np.arange(5), equal_rates) == pytest.approx(10500, rel=0.02)


@pytest.mark.parametrize("seed", range(50))
def test_time_is_at_least_that_of_busiest_link(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 12))
    node = random.integers(0, 4, ranks)
    elements = random.integers(0, 1000, (ranks, ranks)) * (random.random((ranks, ranks)) < 0.7)
    between = np.where(node[:, None] == node, 0, elements)
    carried = [np.bincount(node, between.sum(axis=axis)).max() for axis in (0, 1)]
    for rates_of in (fair_rates, equal_rates):
        time = link_time(elements, node, rates_of)
        assert 0.999 * max(carried) <= time <= between.sum() * 1.02
