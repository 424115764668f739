"""Whole programs on one GPU: a step's packing and unpacking beside torch's own ops for it, and an N-rank program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_inner

from shardweave.bench.gpu.graph_timing import GraphTimer, HostTimer, Times, kernel_seconds
from shardweave.bench.gpu.kernel_cases import random_buffer, rotation
from shardweave.planner import plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.executor.simulate import bind_in_process, simulate
from shardweave.runtime.executor.step_sendrecv import SendRecvStep
from shardweave.runtime.transports.in_process import InProcessTransport

if TYPE_CHECKING:
    from shardweave.bench.gpu.target_rows import Row

RANKS = 4
Timer = GraphTimer | HostTimer


def pack_and_unpack(row: Row, shape: tuple[int, int], device: torch.device, timer: Timer, cache: int) -> None:
    """What rank 0 does around the exchange of `S0 → S1`: torch's inner loop on a group that moves nothing, and ours on
    NCCL's program, of which the messages are left out."""
    program = plan((RANKS,), shape, "bfloat16", "S0", "S1")
    transport = InProcessTransport(one_sided=False, backend="nccl")
    _verify(shape, device)
    held = program.source_shape(0)
    bound = BoundProgram(program, 0, contiguous_strides(held), transport, torch.bfloat16, device)
    (step,) = bound.steps
    assert isinstance(step, SendRecvStep)
    calls, stock = [], []
    group = _fake_group(device)
    try:
        for _ in range(rotation(4 * math.prod(held) * 2, cache)):
            x = random_buffer(math.prod(held), torch.bfloat16, device).view(held)
            calls.append(_around(step, x))
            stock.append(_stock(group, shape, x))
        _warm(calls, stock)
        ours, theirs = timer.time(calls), timer.time(stock)
    finally:
        dist.destroy_process_group()
    least = 4 * math.prod(held) * 2  # read and written once before, once after
    row.rounds = {"ours": ours, "torch": theirs}
    row.value = theirs.seconds / ours.seconds
    row.detail = {
        "microseconds": ours.seconds * 1e6,
        "stock_microseconds": theirs.seconds * 1e6,
        "gigabytes_per_s": least / ours.seconds / 1e9,
        "spread": max(ours.spread, theirs.spread),
    }


def _warm(*calls: list[Callable[[], object]]) -> None:
    for call in (c for several in calls for c in several):
        call()


def _verify(shape: tuple[int, int], device: torch.device) -> None:
    whole = random_buffer(math.prod(shape), torch.bfloat16, device).view(shape)
    program = plan((RANKS,), shape, "bfloat16", "S0", "S1")
    shards = [x.contiguous() for x in whole.chunk(RANKS, 0)]
    found = simulate(program, shards, one_sided=False, backend="nccl")
    if not all(a.equal(b) for a, b in zip(found, whole.chunk(RANKS, 1), strict=True)):
        raise AssertionError("the program's result is wrong")


def _around(step: SendRecvStep, x: torch.Tensor) -> Callable[[], object]:
    def call() -> torch.Tensor:
        packed = torch.empty(step.packed, dtype=x.dtype, device=x.device)
        step.pack([x], [packed])
        received = torch.empty(step.received, dtype=x.dtype, device=x.device)
        out = step.empty()
        step.finish([x, received], [out])
        return out

    return call


def _fake_group(device: torch.device) -> torch.distributed.DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    return init_device_mesh(device.type, (RANKS,))


def _stock(mesh: torch.distributed.DeviceMesh, shape: tuple[int, int], x: torch.Tensor) -> Callable[[], object]:
    given = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    target = DTensorSpec(mesh, (Shard(1),), given._spec.tensor_meta)
    return lambda: stock_inner(x, given._spec, target)


def whole_program(row: Row, side: int, device: torch.device, timer: Timer, dry: bool) -> None:
    """All ranks' work of a program, replayed from a graph, beside the sum of its kernels."""
    program = plan((4, 4), (side, side), "bfloat16", "S0 S1", "S1 S0")
    whole = random_buffer(side * side, torch.bfloat16, device).view(side, side)
    shards = [part.contiguous() for rows in whole.chunk(4, 0) for part in rows.chunk(4, 1)]
    run = bind_in_process(program, shards, InProcessTransport())
    found = run(shards)
    # Rank (i, j) ends with rows j and columns i.
    for i in range(4):
        for j in range(4):
            if not found[4 * i + j].equal(whole.chunk(4, 0)[j].chunk(4, 1)[i]):
                raise AssertionError("the program's result is wrong")
    del found
    times = timer.time([lambda: run(shards)])
    kernels, number = (times.seconds, 0) if dry else kernel_seconds(lambda: run(shards))
    moved = 2 * 2 * side * side
    row.rounds = {"ours": times, "its kernels' sum": Times((kernels,))}
    row.value = times.seconds / kernels
    row.detail = {
        "microseconds": times.seconds * 1e6,
        "kernels_microseconds": kernels * 1e6,
        "kernels": number,
        "moved_bytes": moved,
        "gigabytes_per_s": moved / times.seconds / 1e9,
        "spread": times.spread,
    }
