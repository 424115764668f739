"""The host time of a cached `DTensor.redistribute` of a small tensor: stock on a process group that moves nothing,
shardweave on a transport that moves nothing.

torch's fake process group returns at once and sums nothing; the null transport has no peers, and nothing is written to
them or summed for them. What is left is the host's work: specs, dispatch, lookup of plans, buffers, and the copies that
stay on the rank. Rows have no bytes, since tensors are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardweave
from shardweave.bench.harness.measure import Sink
from shardweave.runtime.dtensor import drop_in
from shardweave.runtime.executor import call as call_module
from shardweave.runtime.executor import copies
from shardweave.runtime.executor.step_put import PutStep
from shardweave.runtime.transports.comm_requests import Barrier
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous

SUITE = "host"
RANKS, TIMEOUT = 4, 10.0
ROUNDS = {"full": 15, "quick": 7, "dry": 1}
CALLS = {"full": 400, "quick": 200, "dry": 3}
KINDS: dict[str, tuple[tuple[int, ...], Placement, Placement]] = {
    "R → S0": ((64, 64), Replicate(), Shard(0)),
    "S0 → R": ((64, 64), Shard(0), Replicate()),
    "S0 → S1": ((64, 64), Shard(0), Shard(1)),
    "P → S0": ((64, 64), Partial(), Shard(0)),
    "P → R": ((64, 64), Partial(), Replicate()),
    "S0 → R, uneven": ((63, 61), Shard(0), Replicate()),
    "P → S1, uneven": ((63, 61), Partial(), Shard(1)),
    "nothing to do": ((64, 64), Shard(0), Shard(0)),
}


class Alone(Rendezvous):
    """The rendezvous of a rank that takes all others to be there."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, TIMEOUT, lambda rank: False)

    def _new_session(self, ranks: tuple[int, ...]) -> str:
        return ""


class NullTransport:
    """Hands out memory that recycles, as a pool does whose tensors die soon, and has no peers."""

    one_sided = recycles = True
    windows = None
    name, backend, error, busy, pending, rank = "null", "", None, False, None, 0

    def __init__(self) -> None:
        self.rendezvous = Alone()
        self._kept: dict[Any, list[torch.Tensor]] = {}
        self._bytes: dict[int, torch.Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self._kept.setdefault((tuple(shape), dtype), [])
        if len(kept) < 2:
            kept.append(torch.empty(tuple(shape), dtype=dtype, device=device))
            self._bytes[kept[-1].data_ptr()] = kept[-1].view(-1).view(torch.uint8)
        kept.reverse()
        return kept[0].detach()

    def address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr()

    def open(self, address: int, nbytes: int) -> torch.Tensor:
        return self._bytes[address]

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def answer(self, request: Barrier) -> list[int | None]:
        if request.during_wait is not None:
            request.during_wait()
        return [None] * len(request.peers)


def alone_among(transports: Mapping[str | None, Any]) -> None:
    """Make this process rank 0 of torch's fake process group, and its programs find these transports, by the name that
    is requested; for good."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = mock.Mock(
        choose=lambda ranks, device, requested, groups: (transports[requested], "the only one"),
        machines=mock.Mock(find_topology=lambda ranks, device: None),
        rendezvous=Alone(),
    )
    call_module.current_transports = lambda: found
    call_module.transports_of = lambda *_: found
    for module in (call_module, drop_in):
        module.why_not_backend = lambda *arguments: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def source_of(kind: str, device: str) -> DTensor:
    shape, source, _ = KINDS[kind]
    whole = torch.ones(shape, device=device)
    local = whole.chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else whole
    mesh = init_device_mesh(device, (RANKS,))
    return DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def microseconds(call: Callable[[], object], calls: int) -> float:
    began = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - began) / calls * 1e6


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    names = {"full": [*KINDS], "quick": [*KINDS][1:6], "dry": [*KINDS][:2]}[scale]
    return dict.fromkeys(names, ("ours", "stock"))


def test_host(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    alone_among({None: NullTransport()})
    push, detail = PutStep.push, {"ranks": RANKS, "calls": CALLS[scale]}

    def push_to_itself(step: PutStep, x: torch.Tensor, done: Any, address: Any, nbytes: int) -> None:
        if address is not None:
            push(step, x, done, address, nbytes)

    for kind in names:
        sink.begin(kind)
        call = partial(source_of(kind, "cpu").redistribute, placements=[KINDS[kind][2]])
        times: dict[str, list[float]] = {"ours": [], "stock": []}
        with (
            mock.patch.object(PutStep, "push", push_to_itself),
            mock.patch.object(copies.Reduction, "__call__", lambda *_: None),
        ):
            for number in range(ROUNDS[scale] + 1):  # the first round, in which calls are planned, does not count
                for side in times:
                    with shardweave.installed() if side == "ours" else nullcontext():
                        took = microseconds(call, CALLS[scale])
                    times[side] += [took] * (number > 0)
        for side, samples in times.items():
            sink.row(kind, side, "µs", samples, detail=detail)
    if delegated := shardweave.stats().delegations:
        raise AssertionError(f"left to torch: {delegated}")
