"""How long the links of nodes carry the messages of a step, which share them as TCP connections do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_TOGETHER = 0.01  # messages that end within this part of the time so far are taken to end at once


def fair_rates(links: np.ndarray, number: int) -> np.ndarray:
    """[messages] the max-min fair rates of messages, by progressive filling: all rates rise together until a link is
    full, where those on it stop.

    Args:
        links: [2, messages] the indices of the two links that each message takes. A link carries 1.
        number: of the links.
    """
    rates, free = np.zeros(links.shape[1]), np.ones(number)
    rising = np.ones(links.shape[1], dtype=bool)
    while rising.any():
        carried = np.bincount(links[:, rising].ravel(), minlength=number)
        most = np.full(number, np.inf)
        np.divide(free, carried, out=most, where=carried > 0)
        rate = most.min()
        stopped = rising & (most <= rate * (1 + 1e-9))[links].any(axis=0)
        rates[stopped] = rate
        free = np.maximum(free - rate * np.bincount(links[:, stopped].ravel(), minlength=number), 0)
        rising &= ~stopped
    return rates


def equal_rates(links: np.ndarray, number: int) -> np.ndarray:
    """[messages] the rates of messages that get an equal part of the more crowded of their links, and do not take up
    what others leave of it. Args as for `fair_rates`."""
    return 1 / np.bincount(links.ravel(), minlength=number)[links].max(axis=0)  # type: ignore[no-any-return]


def link_time(
    elements: np.ndarray, node: np.ndarray, rates_of: Callable[[np.ndarray, int], np.ndarray] = fair_rates
) -> float:
    """The time until all messages between nodes have arrived, in elements that a link carries in one direction.

    It is at least the elements that the busiest link carries in the direction in which it carries more. It is more
    where messages that share a link get equal parts of it although one of them has more to carry, or goes on to a link
    that is busier.

    Args:
        elements: [ranks, ranks] from sender to receiver.
        node: [ranks] the index of the node of each rank. The ranks of a node share its link.
        rates_of: returns the rates of the messages under way.

    Reference: D. Bertsekas and R. Gallager, Data Networks, second edition, section 6.5.2.
    """
    sender, receiver = np.nonzero((elements > 0) & (node[:, None] != node))
    left = elements[sender, receiver].astype(np.float64)
    links, time = np.array([node[sender], node.max() + 1 + node[receiver]]), 0.0
    number = 2 * (int(node.max()) + 1)
    while len(left):
        rates = rates_of(links, number)
        times = left / rates
        first = times.min()
        step = times[times <= first + _TOGETHER * (time + first)].max()
        time += step
        going = times > step
        left, links = (left - step * rates)[going], links[:, going]
    return time
