"""A rank of `calibrate`: times exchanges inside a node and between nodes, as `redistribute` runs them."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave

from ..bench.harness.gather_json import all_gather_json
from ..bench.harness.interleaved import rotated, rotating
from ..bench.harness.ranks import Send
from ..errors import ArgumentError
from ..runtime.environment import pretended_node_size
from ..runtime.transports.select import current_transports
from ..runtime.transports.shared_memory.transport import machine_name
from .link_fit import Sample

ROUNDS = 7
SMALLEST = 64
_GROWTH = 8
_KEPT = 2  # calls for which an output is kept
_TURN_SECONDS = 0.03  # at least: many times as long as a rank that shares a core waits for it
_MOST_CALLS = 4096
_MOST_GROUPS = 3


def sizes_up_to(largest: int) -> list[int]:
    """The sizes that are measured: bytes that a rank sends, up to `largest`."""
    count = int(math.log(largest / SMALLEST, _GROWTH) + 1e-9)
    sizes = [SMALLEST * _GROWTH**i for i in range(count + 1)]
    return sizes if sizes[-1] == largest else [*sizes, largest]


def node_size_of(machines: Sequence[str], requested: int | None) -> int:
    """Ranks of a node: consecutive ones that share a machine, or as many as are requested, on one machine.

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
    if requested is None or requested == runs[0]:
        return runs[0]
    if len(runs) > 1:
        raise ArgumentError(
            f"--node-size: {requested}, and the ranks are on {len(runs)} machines with {runs[0]} each; "
            f"allowed: {runs[0]}, or nodes pretended on one machine"
        )
    if requested < 1 or runs[0] % requested:
        raise ArgumentError(f"--node-size: {requested}; allowed: a divisor of {runs[0]}, the number of ranks")
    return requested


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """Measure calls of ranks by themselves, then the links that there are; rank 0 sends each, the others take part.

    `config`: "device", "transport" (inside a node; None: as the ranks share), "node_size" (None: as they share),
    "largest" (bytes). On CUDA devices this waits for the device around each turn, and nowhere else; not tried on any
    yet.
    """
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    device = torch.device(config["device"])
    pretended = pretended_node_size()
    machines = all_gather_json(f"{machine_name()}/{rank // pretended if pretended else 0}")
    node_size = node_size_of(machines, config["node_size"])
    nodes, sizes = size // node_size, sizes_up_to(config["largest"])

    def report(kind: str, samples: Sequence[Sample], **more: Any) -> None:
        if rank == 0:
            shape = {"nodes": nodes, "node_size": node_size}
            send({"kind": kind, "samples": [asdict(sample) for sample in samples], **shape, **more})

    report("local", _locals(device, (nodes, node_size), config["transport"], sizes))
    inside = None
    if node_size > 1:
        inside, samples = _link(device, (nodes, node_size), False, config["transport"], sizes)
        report("node", samples, transport=inside)
    if nodes > 1 or inside != "process_group":
        _, samples = _link(device, (nodes, node_size), nodes > 1, "process_group", sizes)
        report("network", samples, transport="process_group")


def _link(
    device: torch.device, nodes: tuple[int, int], across: bool, transport: str | None, sizes: Sequence[int]
) -> tuple[str, list[Sample]]:
    """The transport that ranks of a node, or of the same place in each node, meet in, and times of their exchanges.

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
        chosen, _ = current_transports().choose(tuple(mesh.mesh.flatten().tolist()), device, transport)
        name = chosen.name
        _check(_Swap(mesh, SMALLEST, name, device))
        for nbytes in sizes:
            swap = _Swap(mesh, nbytes, name, device)
            copied = swap.kept_bytes + (0 if chosen.one_sided else 2 * swap.nbytes)
            samples.append(Sample(group - 1, swap.nbytes, copied, microseconds(swap.rotating(), device)))
    return name, samples


class _Swap:
    """An exchange of all ranks of a mesh dim with each other, S1 → S2.

    [2, 2 n, n k] float32: what goes to a peer is strided where it comes from and where it belongs, so that a transport
    that is not one-sided packs and unpacks all of it, as the price of a step supposes.
    """

    def __init__(self, mesh: DeviceMesh, nbytes: int, transport: Any, device: torch.device) -> None:
        n = mesh.size()
        k = max(1, round(nbytes / (16 * (n - 1))))
        self.mesh, self.transport, self.shape = mesh, transport, (2, 2 * n, n * k)
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

    def __call__(self, source: DTensor) -> DTensor:
        return shardweave.redistribute(source, [Shard(2)], transport=self.transport)

    def rotating(self) -> Callable[[], DTensor]:
        """The exchange on rotating sources, none of which is in a cache."""
        return rotating(self, rotated(self.source)[0])


def _check(swap: _Swap) -> None:
    """Check the result of an exchange before anything is timed."""
    whole = torch.arange(math.prod(swap.shape), dtype=torch.float32).reshape(swap.shape)
    expected = whole.chunk(swap.mesh.size(), 2)[swap.mesh.get_local_rank()]
    assert torch.equal(swap(swap.source).to_local().cpu(), expected), f"a wrong exchange on {swap.transport}"


def _locals(device: torch.device, nodes: tuple[int, int], transport: Any, sizes: Sequence[int]) -> list[Sample]:
    """Calls of all ranks at once that move nothing between them, R → S1 in each node, or among all ranks where a node
    has one: each copies its part of [2, n k] float32, of up to so many bytes.
    """
    mesh = init_device_mesh(device.type, nodes, mesh_dim_names=("node", "place"))["place" if nodes[1] > 1 else "node"]
    n = mesh.size()
    call = partial(
        shardweave.redistribute, placements=[Shard(1)], transport=transport if nodes[1] > 1 else "process_group"
    )
    samples = []
    for nbytes in sizes:
        k = max(1, round(nbytes / (8 * n)))
        whole = torch.arange(2 * n * k, dtype=torch.float32, device=device).reshape(2, n * k)
        source = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        expected = whole.chunk(n, 1)[mesh.get_local_rank()]
        assert torch.equal(call(source).to_local(), expected), f"a wrong part on {transport}"
        samples.append(Sample(0, 0, 8 * k, microseconds(rotating(call, rotated(source)[0]), device)))
    return samples


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The microseconds of a call: the median over rounds of the slowest rank."""
    kept: deque[Any] = deque(maxlen=_KEPT)

    def turn(calls: int) -> float:
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        for _ in range(calls):
            kept.append(call())
        _finish(device)
        return (time.perf_counter() - start) / calls

    calls = 2 * _KEPT
    turn(calls)  # binds programs, opens connections, touches pages
    while calls < _MOST_CALLS and _slowest([turn(calls)], device)[0] * calls < _TURN_SECONDS:
        calls *= 2
    return statistics.median(_slowest([turn(calls) for _ in range(ROUNDS)], device)) * 1e6


def _slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The seconds of the slowest rank, by round."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
