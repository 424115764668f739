"""`python -m shardweave.bench.gpu.host_work`: host time of cached redistributions as ranks on GPUs run them, as JSON.

Of the loop inside `DTensor.redistribute`, from a local tensor and two specs to a local tensor, by rank 0 of four that
are not there: through symmetric windows, without launches; and by messages, without launches and sending. Without a GPU
it needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardweave.bench.gpu.lone_rank import RANKS, TIMEOUT, Alone, Mirror, MirrorTransport, alone_among
from shardweave.kernels.compare_words import WordComparison
from shardweave.kernels.launch import PreparedLaunch
from shardweave.kernels.signal import PreparedSignal
from shardweave.kernels.window_boxes import WindowLaunch
from shardweave.runtime.dtensor.local import run_redistribution
from shardweave.runtime.dtensor.redistribute_options import RedistributeOptions
from shardweave.runtime.transports import process_group
from shardweave.runtime.transports.choose_transport import TransportName
from shardweave.runtime.transports.process_group import GroupRanks, ProcessGroupTransport

KINDS: dict[str, tuple[tuple[int, int], Placement, Placement]] = {
    "S0 → R": ((64, 64), Shard(0), Replicate()),
    "S0 → S1": ((64, 64), Shard(0), Shard(1)),
    "P → S0": ((64, 64), Partial(), Shard(0)),
    "P → R": ((64, 64), Partial(), Replicate()),
    "S0 → R, uneven": ((63, 61), Shard(0), Replicate()),
}
TRANSPORTS: dict[str, TransportName] = {"windows": "symmetric_memory", "messages": "process_group"}


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


def measure(device: torch.device, rounds: int, calls: int) -> list[dict[str, Any]]:
    """The median microseconds of a call, by side, for each of `KINDS`."""
    transports: dict[str | None, Any] = {
        "symmetric_memory": MirrorTransport(0, RANKS, TIMEOUT, Mirror(device), Alone())
    }
    alone_among(transports)
    assert dist.group.WORLD is not None
    world = GroupRanks.of(dist.group.WORLD, range(RANKS), 0)
    transports["process_group"] = ProcessGroupTransport(0, RANKS, TIMEOUT, "nccl", Alone(), world)
    mesh, found, done = init_device_mesh(device.type, (RANKS,)), [], _Done()
    with ExitStack() as patches:
        for launch in (PreparedLaunch, PreparedSignal, WindowLaunch, WordComparison):
            patches.enter_context(mock.patch.object(launch, "__call__", lambda *_: None))
        patches.enter_context(mock.patch.object(dist, "batch_isend_irecv", lambda ones: [done] * len(ones)))
        patches.enter_context(mock.patch.object(process_group, "_started", lambda request, group: done))
        for kind, (shape, source, target) in KINDS.items():
            whole = torch.ones(shape, device=device)
            local = whole.chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else whole
            x = DTensor.from_local(local, mesh, [source], run_check=False, shape=whole.shape, stride=whole.stride())
            specs = x._spec, DTensorSpec(mesh, (target,), x._spec.tensor_meta)
            times = {}
            for side, transport in TRANSPORTS.items():
                call = partial(run_redistribution, local, *specs, RedistributeOptions(transport=transport))
                # The first round, in which calls are planned, does not count.
                times[side] = median([_microseconds(call, calls) for _ in range(rounds + 1)][1:])
            found.append({"kind": kind, **times})
    return found


def _microseconds(call: Callable[[], object], calls: int) -> float:
    began = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - began) / calls * 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.host_work", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=400, help="of each round")
    given = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(json.dumps(measure(device, given.rounds, given.calls)))


if __name__ == "__main__":
    main()
