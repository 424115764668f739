"""A rank that runs out of descriptors, address space or file size says so, with the limit, and its peers name it. No
living rank is taken for dead."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import TransportError

MIB = 1 << 20


@contextmanager
def limited(which: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def descriptors(more: int) -> int:
    return max(map(int, os.listdir("/proc/self/fd"))) + 1 + more


def address_space(more: int) -> int:
    with open("/proc/self/status") as file:
        (size,) = [line.split()[1] for line in file if line.startswith("VmSize")]
    return int(size) * 1024 + more


LIMITS: dict[str, tuple[int, Callable[[int], int]]] = {
    "ulimit -n": (resource.RLIMIT_NOFILE, descriptors),
    "ulimit -v": (resource.RLIMIT_AS, address_space),
    "ulimit -f": (resource.RLIMIT_FSIZE, lambda more: more),
}


def one_is_limited(rank: int, transport: str, name: str, more: int) -> list[str]:
    """The first calls of all, with a limit on rank 1 from after the process group was made."""
    mesh, outcomes = DeviceMesh("cpu", [0, 1]), []
    which, limit = LIMITS[name]
    with limited(which, limit(more) if rank == 1 else resource.getrlimit(which)[0]):
        for rows in (8, 40_000):
            x = DTensor.from_local(torch.full((rows, 64), float(rank)), mesh, [Shard(0)], run_check=False)
            start = time.monotonic()
            try:
                y = shardweave.redistribute(x, [Replicate()], transport=transport).to_local()
                outcomes.append("right" if y[:rows].eq(0).all() and y[rows:].eq(1).all() else "wrong")
            except TransportError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            assert time.monotonic() - start < 30  # not the timeout
    return outcomes


@pytest.mark.multi
@pytest.mark.parametrize(
    ("transport", "name", "more"),
    [
        ("shared_memory", "ulimit -n", 0), ("shared_memory", "ulimit -n", 2), ("shared_memory", "ulimit -n", 4),
        ("hierarchical", "ulimit -n", 4), ("symmetric_memory", "ulimit -n", 1),
        ("shared_memory", "ulimit -v", 90 * MIB), ("shared_memory", "ulimit -f", 1000),
    ],
)  # fmt: skip
def test_rank_out_of_a_resource_names_its_limit(transport: str, name: str, more: int) -> None:
    environment = {"SHARDWEAVE_TIMEOUT": "40", "SHARDWEAVE_NODE_SIZE": "2" if transport == "hierarchical" else ""}
    of_peer, own = run_ranks(one_is_limited, 2, transport, name, more, environment=environment)
    errors = [text for text in own if text != "right"]
    assert errors and all(text.startswith("TransportError: ") and name in text for text in errors), own
    failed = [text for text in of_peer if text != "right"]
    assert failed and all(text.startswith("PeerError: ") and "rank 1 failed: " in text for text in failed), of_peer
    assert all(name in text for text in failed), of_peer


def limited_between_calls(rank: int) -> str:
    """Rank 1 cannot allocate the output of a combine, which it does before the call that rank 0 waits in."""
    hidden = 3 * MIB
    d = shardweave.TokenDispatcher(
        None, num_experts=2, top_k=1, hidden=hidden, max_tokens=2, dtype=torch.float32, transport="shared_memory"
    )
    routed = d.dispatch(torch.ones(2, hidden), torch.tensor([[0], [1]]), torch.ones(2, 1))
    start, which = time.monotonic(), resource.RLIMIT_FSIZE
    with limited(which, 0 if rank == 1 else resource.getrlimit(which)[0]):
        try:
            d.combine(routed.x, routed)
        except TransportError as error:
            assert time.monotonic() - start < 30  # not the timeout
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.multi
def test_peers_learn_of_a_failure_before_a_call() -> None:
    of_peer, own = run_ranks(limited_between_calls, 2, environment={"SHARDWEAVE_TIMEOUT": "40"})
    assert own.startswith("TransportError: ") and "ulimit -f" in own, own
    assert of_peer.startswith("PeerError: ") and "rank 1 failed: " in of_peer and "ulimit -f" in of_peer, of_peer
