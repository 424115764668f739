"""`python -m shardweave.bench.gpu.host_work`: host time of cached redistributions as ranks on GPUs run them, as JSON.

Of the loop inside `DTensor.redistribute`, from a local tensor and two specs to a local tensor, by rank 0 of four that
are not there: through symmetric windows, with launches and without; by messages, without launches and sending; and by
stock on torch's fake process group. Without a GPU it needs TRITON_INTERPRET=1, and only times without launches mean
anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from shardweave.bench.suites.suite_host import KINDS, RANKS, TIMEOUT, Alone, alone_among, microseconds, source_of
from shardweave.kernels.channel import SLOT
from shardweave.kernels.compare_words import WordComparison
from shardweave.kernels.launch import PreparedLaunch
from shardweave.kernels.signal import PreparedSignal
from shardweave.kernels.window_boxes import WindowLaunch
from shardweave.runtime.dtensor.local import run_redistribution
from shardweave.runtime.dtensor.redistribute_options import RedistributeOptions
from shardweave.runtime.transports import process_group
from shardweave.runtime.transports.process_group import GroupRanks, ProcessGroupTransport
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

_QUEUED_CALLS = 100  # of a few launches each; CUDA queues about 1,024
SIDES = ("windows", "launched", "messages", "stock")


class Mirror:
    """Memory of rank 0 in which the others' lies as well: what it sends to a peer arrives in its own pad, as if from
    that peer, so that signals are sent and awaited on one GPU, and none of them waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], *rest: Any) -> dict[int, torch.Tensor]:
        row = SLOT * 8
        longer = torch.zeros(own.numel() + row * len(handles), dtype=torch.uint8, device=self.device)
        # Rank 0 is everyone's first peer; the row of peer i in its pad is the one before the i-th.
        return {rank: longer[row * max(i - 1, 0) :][: own.numel()] for i, rank in enumerate(handles)}


class MirrorTransport(SymmetricMemoryTransport):
    """Rank 0 through windows, among peers that are itself."""

    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        return dict.fromkeys(ranks, text)


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


def measure(device: torch.device, rounds: int, calls: int, measured: Collection[str] = SIDES) -> list[dict[str, Any]]:
    """The median microseconds of a call, by side, for each of `KINDS`."""
    transports: dict[str | None, Any] = {
        "symmetric_memory": MirrorTransport(0, RANKS, TIMEOUT, Mirror(device), Alone())
    }
    alone_among(transports)
    assert dist.group.WORLD is not None
    world = GroupRanks.of(dist.group.WORLD, range(RANKS), 0)
    transports["process_group"] = ProcessGroupTransport(0, RANKS, TIMEOUT, "nccl", Alone(), world)
    found, done = [], _Done()
    with (
        mock.patch.object(dist, "batch_isend_irecv", lambda operations: [done] * len(operations)),
        mock.patch.object(process_group, "_started", lambda request, group: done),
    ):
        for kind, (_, _, target) in KINDS.items():
            x = source_of(kind, device.type)
            request = x.to_local(), x._spec, DTensorSpec(x.device_mesh, (target,), x._spec.tensor_meta)
            windows, messages = (
                partial(run_redistribution, *request, RedistributeOptions(transport=transport))
                for transport in ("symmetric_memory", "process_group")
            )
            sides = windows, windows, messages, partial(redistribute_local_tensor, *request)
            times: dict[str, list[float]] = {side: [] for side in measured}
            for number in range(rounds + 1):  # the first round, in which calls are planned, does not count
                for side, call in zip(SIDES, sides, strict=True):
                    if side not in measured:
                        continue
                    took = _timed(call, calls, device, launches=side in ("launched", "stock"))
                    times[side] += [took] * (number > 0)
            found.append({"kind": kind, **{side: median(samples) for side, samples in times.items()}})
    return found


def _timed(call: Callable[[], object], calls: int, device: torch.device, launches: bool) -> float:
    if launches:
        return _launched(call, calls, device)
    with ExitStack() as patches:
        for launch in (PreparedLaunch, PreparedSignal, WindowLaunch, WordComparison):
            patches.enter_context(mock.patch.object(launch, "__call__", _nothing))
        return microseconds(call, calls)


def _launched(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """As `microseconds`, some calls at a time: the queue of launches has an end, at which the host would wait."""
    took = 0.0
    for first in range(0, calls, _QUEUED_CALLS):
        number = min(_QUEUED_CALLS, calls - first)
        took += microseconds(call, number) * number
        if device.type == "cuda":
            torch.cuda.synchronize()
    return took / calls


def _nothing(*_: Any) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.host_work", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=400, help="of each round")
    given = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(json.dumps(measure(device, given.rounds, given.calls)))


if __name__ == "__main__":
    main()
