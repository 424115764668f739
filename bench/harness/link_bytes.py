"""Bytes that enter hosts: as the link counts them, and the least there can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..baselines.stock_dtensor import held
from .namespaces import INTERFACE

RUNS = 3
"""TCP sends a packet, of up to 64 KiB here, again if its receiver is busy: the least of so many runs counts."""


def bytes_received(action: Callable[[], Any]) -> int:
    """The bytes that the host of this rank receives while all ranks of the default group run `action`, headers
    included, without packets that were sent twice. All ranks call it together; they run it `1 + RUNS` times."""
    action()  # connections are made, programs bound
    idle, running = (min(_bytes_during(run) for _ in range(RUNS)) for run in (lambda: None, action))
    return max(running - idle, 0)


def _bytes_during(run: Callable[[], Any]) -> int:
    dist.barrier()  # nothing moves until all have read
    before = _counted()
    dist.barrier()
    run()
    dist.barrier()
    counted = _counted() - before
    dist.barrier()
    return counted


def _counted() -> int:
    return int(Path("/sys/class/net", INTERFACE, "statistics", "rx_bytes").read_text(encoding="ascii"))


def least_bytes(
    mesh: tuple[int, ...], host_of: Sequence[int], shape: tuple[int, ...], source: str, target: str, itemsize: int
) -> list[int]:
    """The bytes that enter each host at least: every element that its ranks want and that no rank there holds comes
    once, and of a sum with terms elsewhere the sum of these comes once.

    Args:
        host_of: the host of each mesh position.
        source, target: layouts in text form; the target has no partial placement.
    """
    coordinates = list(product(*map(range, mesh)))
    summed = [m for m, token in enumerate(source.split()) if token == "P"]
    terms: dict[tuple[int, ...], list[int]] = {}  # positions whose contributions make a sum
    for position, coordinate in enumerate(coordinates):
        terms.setdefault(tuple(0 if m in summed else at for m, at in enumerate(coordinate)), []).append(position)
    result = []
    for host in range(max(host_of) + 1):
        wanted, there = (np.zeros(shape, dtype=bool) for _ in range(2))
        for position, coordinate in enumerate(coordinates):
            if host_of[position] == host:
                wanted[tuple(held(target, mesh, coordinate, shape))] = True
        for positions in terms.values():
            if all(host_of[position] == host for position in positions):
                there[tuple(held(source, mesh, coordinates[positions[0]], shape))] = True
        result.append(int((wanted & ~there).sum()) * itemsize)
    return result


def least_token_bytes(ids: Sequence[torch.Tensor], host_of: Sequence[int], experts: int, row: int) -> list[int]:
    """The bytes that enter each host at least in one dispatch and combine: each token once for each other host that has
    an expert of it, and one sum of each back.

    Args:
        ids: [T, K] the experts of each rank's tokens. Each rank has as many experts.
        row: bytes of a token.
    """
    hosts = torch.tensor(host_of)
    into = [0] * (max(host_of) + 1)
    for rank, chosen in enumerate(ids):
        at = hosts[chosen // (experts // len(host_of))]
        for host in set(host_of) - {host_of[rank]}:
            tokens = int((at == host).any(1).sum())
            into[host] += tokens * row
            into[host_of[rank]] += tokens * row
    return into
