"""A rank's side of `calibrate`: exchanges between ranks of a node and of several, timed as `redistribute` runs them."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardweave

from ..errors import ArgumentError
from ..runtime.shared_memory import machine_name
from ..runtime.worlds import current_worlds, pretended_node_size
from .link_fit import Sample
from .ranks import Send

ROUNDS = 7
SMALLEST = 64
_GROWTH = 8
_KEPT = 2  # calls for which an output is kept
_TURN_SECONDS = 0.02
_MOST_CALLS = 200
_MOST_GROUPS = 3
_LEAST_COPY = 16 << 20


def sizes_up_to(largest: int) -> list[int]:
    """Bytes that a rank sends, from a few to `largest`."""
    count = int(math.log(largest / SMALLEST, _GROWTH) + 1e-9)
    sizes = [SMALLEST * _GROWTH**i for i in range(count + 1)]
    return sizes if sizes[-1] == largest else [*sizes, largest]


def node_size_of(machines: Sequence[str], asked: int | None) -> int:
    """Ranks of a node: consecutive ones that share a machine, or as many as are asked for, on one machine.

    Raises:
        ArgumentError: machines with different numbers of ranks, or whose ranks are not consecutive; nodes that are
            pretended on several machines, or that do not divide the ranks.
    """
    runs = [len(list(run)) for _, run in groupby(machines)]
    if len(set(runs)) > 1 or len(runs) > len(set(machines)):
        raise ArgumentError(
            f"ranks: in the order of ranks, {', '.join(map(str, runs))} of them share a machine; allowed: nodes of "
            f"equally many consecutive ranks"
        )
    if asked is None or asked == runs[0]:
        return runs[0]
    if len(runs) > 1:
        raise ArgumentError(
            f"--node-size: {asked}, and the ranks are on {len(runs)} machines with {runs[0]} each; allowed: {runs[0]}, "
            f"or nodes pretended on one machine"
        )
    if asked < 1 or runs[0] % asked:
        raise ArgumentError(f"--node-size: {asked}; allowed: a divisor of {runs[0]}, the number of ranks")
    return asked


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """Measure memory, then the links that there are; rank 0 sends each, the others take part.

    `config`: "device", "world" (inside a node; None: as the ranks share), "node_size" (None: as they share), "largest"
    (bytes). On CUDA devices this waits for the device around each turn, and nowhere else; not tried on any yet.
    """
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    device = torch.device(config["device"])
    machines: list[Any] = [None] * size
    pretended = pretended_node_size()
    dist.all_gather_object(machines, f"{machine_name()}/{rank // pretended if pretended else 0}")
    node_size = node_size_of(machines, config["node_size"])
    nodes, sizes = size // node_size, sizes_up_to(config["largest"])

    def found(kind: str, samples: Sequence[Sample], **more: Any) -> None:
        if rank == 0:
            shape = {"nodes": nodes, "node_size": node_size}
            send({"kind": kind, "samples": [asdict(sample) for sample in samples], **shape, **more})

    found("memory", _copies(max(sizes[-1], _LEAST_COPY), device))
    inside = None
    if node_size > 1:
        inside, samples = _link(device, (nodes, node_size), False, config["world"], sizes)
        found("node", samples, world=inside)
    if nodes > 1 or inside != "collective":
        _, samples = _link(device, (nodes, node_size), nodes > 1, "collective", sizes)
        found("network", samples, world="collective")


def _link(
    device: torch.device, nodes: tuple[int, int], across: bool, world: str | None, sizes: Sequence[int]
) -> tuple[str, list[Sample]]:
    """The world that ranks of a node, or of the same place in each node, meet in, and times of their exchanges.

    Groups of different sizes tell what a message costs. All ranks take part at once, each in one group.
    """
    samples = []
    most = nodes[0] if across else nodes[1]
    groups = [n for n in range(2, most + 1) if most % n == 0]
    if len(groups) > _MOST_GROUPS:
        groups = [groups[0], groups[len(groups) // 2], groups[-1]]
    name = ""
    for group in groups:
        shape = (most // group, group, nodes[1]) if across else (nodes[0], most // group, group)
        names = ("apart", "group", "place") if across else ("node", "apart", "group")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["group"]
        chosen, _ = current_worlds().choose(tuple(mesh.mesh.flatten().tolist()), device, world)
        name = chosen.name
        _check(_Swap(mesh, SMALLEST, name, device))
        for nbytes in sizes:
            swap = _Swap(mesh, nbytes, name, device)
            copied = swap.kept_bytes + (0 if chosen.one_sided else 2 * swap.nbytes)
            samples.append(Sample(group - 1, swap.nbytes, copied, microseconds(swap, device)))
    return name, samples


class _Swap:
    """An exchange of all ranks of a mesh dim with each other, S1 → S2.

    [2, 2 n, n k] float32: what goes to a peer is strided where it comes from and where it belongs, so that a world that
    is not one-sided packs and unpacks all of it, as the price of a step supposes.
    """

    def __init__(self, mesh: DeviceMesh, nbytes: int, world: str, device: torch.device) -> None:
        n = mesh.size()
        k = max(1, round(nbytes / (16 * (n - 1))))
        self.mesh, self.world, self.shape = mesh, world, (2, 2 * n, n * k)
        self.nbytes, self.kept_bytes = 16 * k * (n - 1), 16 * k
        first = 2 * mesh.get_local_rank() * n * k
        rows = torch.arange(2 * n * k, dtype=torch.float32, device=device).reshape(2, n * k)
        local = torch.stack([rows + first, rows + first + 2 * n * n * k])  # [2, 2, n k] of the whole's arange
        self.source = DTensor.from_local(
            local,
            mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=(2 * n * n * k, n * k, 1),
        )

    def __call__(self) -> DTensor:
        return shardweave.redistribute(self.source, [Shard(2)], world=self.world)


def _check(swap: _Swap) -> None:
    """Before anything is timed."""
    whole = torch.arange(math.prod(swap.shape), dtype=torch.float32).reshape(swap.shape)
    wanted = whole.chunk(swap.mesh.size(), 2)[swap.mesh.get_local_rank()]
    assert torch.equal(swap().to_local().cpu(), wanted), f"a wrong exchange on {swap.world}"


def _copies(largest: int, device: torch.device) -> list[Sample]:
    """Copies of up to `largest` bytes, by all ranks at once, each of other memory than the last: caches are of no use,
    as they are of none to what is redistributed.
    """
    source, target = (torch.ones(2 * largest, dtype=torch.uint8, device=device) for _ in range(2))
    samples = []
    for nbytes in (largest // 64, largest // 16, largest // 4, largest):
        pairs = cycle(list(zip(target.split(nbytes), source.split(nbytes), strict=True)))
        samples.append(Sample(0, 0, nbytes, microseconds(partial(_copy_next, pairs), device)))
    return samples


def _copy_next(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    target, source = next(pairs)
    target.copy_(source)


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of a call: the median over rounds of the slowest rank."""
    kept: deque[Any] = deque(maxlen=_KEPT)

    def turn(calls: int) -> float:
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        for _ in range(calls):
            kept.append(call())
        _finish(device)
        return (time.perf_counter() - start) / calls

    turn(2 * _KEPT)  # binds programs, opens connections, touches pages
    (once,) = _slowest([turn(2 * _KEPT)], device)
    calls = max(1, min(_MOST_CALLS, math.ceil(_TURN_SECONDS / once)))
    return statistics.median(_slowest([turn(calls) for _ in range(ROUNDS)], device)) * 1e6


def _slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Each round's longest time over all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
