"""Whole programs on one GPU: a step's packing and unpacking beside torch's own ops for it, and an N-rank program."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_inner

from shardweave.bench.gpu.graph_timing import kernel_seconds
from shardweave.bench.gpu.kernel_cases import Made, random_buffer
from shardweave.bench.gpu.measuring import Measuring
from shardweave.planner import plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.executor.simulate import bind_in_process, simulate
from shardweave.runtime.executor.step_sendrecv import SendRecvStep
from shardweave.runtime.transports.in_process import InProcessTransport

RANKS = 4
_WRONG = "the program's result is wrong"


def pack_and_unpack(measuring: Measuring, shape: tuple[int, int], case: str) -> None:
    """What rank 0 does around the exchange of `S0 → S1`: torch's inner loop on a group that moves nothing, and ours on
    NCCL's program, without its messages."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = measuring.device
    program = plan((RANKS,), shape, "bfloat16", "S0", "S1")
    whole = random_buffer(math.prod(shape), torch.bfloat16, device).view(shape)
    outputs = simulate(program, [x.contiguous() for x in whole.chunk(RANKS, 0)], one_sided=False, backend="nccl")
    if not all(a.equal(b) for a, b in zip(outputs, whole.chunk(RANKS, 1), strict=True)):
        raise AssertionError(_WRONG)
    held = program.source_shape(0)
    transport = InProcessTransport(one_sided=False, backend="nccl")
    (step,) = BoundProgram(program, 0, contiguous_strides(held), transport, torch.bfloat16, device).steps
    assert isinstance(step, SendRecvStep)
    moved = 4 * math.prod(held) * 2  # read and written once before, once after
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh(device.type, (RANKS,))

        def source() -> torch.Tensor:
            return random_buffer(math.prod(held), torch.bfloat16, device).view(held)

        # Nothing is exchanged, so there is no result to check: the whole program's was, above.
        sides: dict[str, Callable[[], Made]] = {
            "ours": lambda: (_around(step, source()), lambda: True),
            "torch": lambda: (_stock(mesh, shape, source()), lambda: True),
        }
        measuring.time(case, sides, moved, measuring.sets(moved, 2 * moved))
    finally:
        dist.destroy_process_group()


def _around(step: SendRecvStep, x: torch.Tensor) -> Callable[[], object]:
    def call() -> torch.Tensor:
        packed = torch.empty(step.packed, dtype=x.dtype, device=x.device)
        step.pack([x], [packed])
        received = torch.empty(step.received, dtype=x.dtype, device=x.device)
        out = step.empty()
        step.finish([x, received], [out])
        return out

    return call


def _stock(mesh: DeviceMesh, shape: tuple[int, int], x: torch.Tensor) -> Callable[[], object]:
    source = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    target = DTensorSpec(mesh, (Shard(1),), source._spec.tensor_meta)
    return lambda: stock_inner(x, source._spec, target)


def whole_program(measuring: Measuring, side: int, case: str) -> None:
    """All ranks' work of `S0 S1 → S1 S0`, replayed from a graph, beside the sum of its kernels."""
    program = plan((4, 4), (side, side), "bfloat16", "S0 S1", "S1 S0")
    whole = random_buffer(side * side, torch.bfloat16, measuring.device).view(side, side)
    shards = [part.contiguous() for rows in whole.chunk(4, 0) for part in rows.chunk(4, 1)]
    run = bind_in_process(program, shards, InProcessTransport())

    def right() -> bool:
        outputs = run(shards)  # rank (i, j) ends with rows j and columns i
        wanted = (whole.chunk(4, 0)[j].chunk(4, 1)[i] for i in range(4) for j in range(4))
        return all(a.equal(b) for a, b in zip(outputs, wanted, strict=True))

    moved = 2 * 2 * side * side
    ours = measuring.time(case, {"ours": lambda: (lambda: run(shards), right)}, moved, 1)["ours"]
    seconds, kernels = (median(ours), 0) if measuring.dry else kernel_seconds(lambda: run(shards))
    measuring.sink.row(case, "its kernels' sum", "µs", [seconds * 1e6], bytes=moved, detail={"kernels": kernels})
