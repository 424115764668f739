"""Whole programs on one GPU: a step's packing and unpacking beside torch's own ops for it, an N-rank program, and a
direct push beside windows."""

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
from shardweave.bench.gpu.lone_rank import TIMEOUT, Alone, LoneTransport, SeparateMemory
from shardweave.bench.gpu.measuring import Measuring
from shardweave.planner import plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.executor.simulate import bind_in_process, simulate
from shardweave.runtime.executor.step_direct import DirectStep
from shardweave.runtime.executor.step_sendrecv import SendRecvStep
from shardweave.runtime.transports.in_process import InProcessTransport

RANKS, NODE_RANKS = 4, 8
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
        measuring.time(case, sides, moved, measuring.sets(moved))
    finally:
        dist.destroy_process_group()


def _around(step: SendRecvStep, x: torch.Tensor) -> Callable[[], object]:
    def call() -> torch.Tensor:
        packed = torch.empty(step.send_elements, dtype=x.dtype, device=x.device)
        step.pack([x], [packed])
        received = torch.empty(step.receive_elements, dtype=x.dtype, device=x.device)
        out = step.empty()
        step.finish([x, received], [out])
        return out

    return call


def _stock(mesh: DeviceMesh, shape: tuple[int, int], x: torch.Tensor) -> Callable[[], object]:
    source = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    target = DTensorSpec(mesh, (Shard(1),), source._spec.tensor_meta)
    return lambda: stock_inner(x, source._spec, target)


def virtual_program(device: torch.device, side: int) -> Made:
    """All ranks' work of `S0 S1 → S1 S0`."""
    program = plan((4, 4), (side, side), "bfloat16", "S0 S1", "S1 S0")
    whole = random_buffer(side * side, torch.bfloat16, device).view(side, side)
    shards = [part.contiguous() for rows in whole.chunk(4, 0) for part in rows.chunk(4, 1)]
    run = bind_in_process(program, shards, InProcessTransport())

    def right() -> bool:
        outputs = run(shards)  # rank (i, j) ends with rows j and columns i
        wanted = (whole.chunk(4, 0)[j].chunk(4, 1)[i] for i in range(4) for j in range(4))
        return all(a.equal(b) for a, b in zip(outputs, wanted, strict=True))

    return lambda: run(shards), right


def whole_program(measuring: Measuring, side: int, case: str) -> None:
    """All ranks' work of a program, replayed from a graph, beside the sum of its kernels."""
    made, moved = virtual_program(measuring.device, side), 2 * 2 * side * side
    ours = measuring.time(case, {"ours": lambda: made}, moved, 1)["ours"]
    seconds = median(ours) if measuring.dry else kernel_seconds(made[0])
    measuring.sink.row(case, "its kernels' sum", "µs", [seconds * 1e6], bytes=moved)


def direct_push(measuring: Measuring, side: int, case: str) -> None:
    """The work of rank 0 of 8 for an all-gather, whose peers' memory is on this GPU and whose own signals come back to
    it: directly into outputs, and through windows."""
    device, ranks = measuring.device, tuple(range(NODE_RANKS))
    transport = LoneTransport(0, NODE_RANKS, TIMEOUT, SeparateMemory(device), Alone())
    transport._watchdog = None  # GPUs have none
    program = plan((NODE_RANKS,), (side, side), "bfloat16", "S0", "R")
    shape = program.source_shape(0)
    x = random_buffer(math.prod(shape), torch.bfloat16, device).view(shape)

    def bound() -> BoundProgram:
        return BoundProgram(program, 0, contiguous_strides(shape), transport, torch.bfloat16, device)

    windows = bound()
    transport.pool_outputs(ranks, side * side * 2, 1)
    (step,) = bound().steps
    assert isinstance(step, DirectStep)
    out, number = step.outputs.take(step.shape, torch.bfloat16, device)

    def push() -> None:
        turn = transport.turn(windows.fingerprint, out=out)._replace(buffer=number)
        step.write.in_window([x], step._targets(out), turn)

    def pushed() -> bool:
        written = [step.outputs.buffer(number, rank, torch.bfloat16)[: x.numel()] for rank in ranks]
        transport.check()
        return all(buffer.equal(x.view(-1)) for buffer in written)

    results: list[torch.Tensor] = []

    def exchange() -> None:
        run = windows.run(x, windows.fingerprint)
        try:
            next(run)
        except StopIteration as end:
            results[:] = [end.value]
        else:
            raise AssertionError("a request to the host")

    moved = (NODE_RANKS + 1) * 2 * x.numel()
    sides: dict[str, Callable[[], Made]] = {
        "ours": lambda: (push, pushed),
        "through windows": lambda: (exchange, lambda: bool(results[0][: len(x)].equal(x))),
    }
    measuring.time(case, sides, moved, 1)
