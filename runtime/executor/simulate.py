"""Simulation of programs in one process on one device, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, shown
from ...kernels import capturing, on_device
from ...planner import Batch, Program, check_local_shape
from ..convert_specs import name_of
from ..transports.backend_limits import BACKENDS
from ..transports.in_process import InProcessTransport, run_all
from ..transports.streams import captured
from .batch import BoundBatch
from .bind import BoundProgram
from .call import why_no_data
from .choose_algorithm import Reduction, check_reduction
from .dispatch_modes import below_modes_with_memory


def simulate(
    program: Program | Batch,
    locals_: Sequence[Any],
    *,
    one_sided: bool = True,
    backend: str | None = None,
    reduction: Reduction = "ordered",
    node_size: int | None = None,
) -> list[Any]:
    """Execute a program of all ranks, or a batch of them, in this process.

    Args:
        program: a program of all ranks (`plan(..., rank=None)`), or a batch of such programs.
        locals_: one tensor per rank in the order of the program's mesh, each of the shape that layout `source` gives it
            (`Program.source_shape`), all of the program's dtype and on one device, with any strides. For a batch, a
            list of these per program.
        one_sided: ranks push into each other's buffers; if False, they pack, send, receive and unpack.
        backend: with `one_sided=False`, any group of ranks has a process group with this backend, "gloo" or "nccl",
            and steps use its collectives.
        reduction: "fast" lets the backend reduce (here in the order of ranks). Not for batches.
        node_size: with `one_sided=False`, this many consecutive ranks are on one node and push to each other.

    Returns:
        One tensor per rank, of the shape that layout `target` gives it; for a batch, a list of these per program. The
        inputs themselves if there is nothing to do. No gradients are recorded.

    Raises:
        ArgumentError: a program of one rank, a wrong number of tensors, or a wrong shape, dtype or device.
        UnsupportedError: a fake tensor mode is active. Other dispatch modes see nothing of the call.
    """
    with below_modes_with_memory():
        return _simulate(program, locals_, one_sided, backend, reduction, node_size)


def _simulate(
    program: Program | Batch,
    locals_: Sequence[Any],
    one_sided: bool,
    backend: str | None,
    reduction: Reduction,
    node_size: int | None,
) -> list[Any]:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ArgumentError(f"backend: {shown(backend)}; allowed: {', '.join(map(repr, BACKENDS))}, or None")
    if node_size is not None and (type(node_size) is not int or node_size < 1):
        raise ArgumentError(f"node_size: {shown(node_size)}; allowed: a whole number above 0, or None")
    reduction, transport = check_reduction(reduction), InProcessTransport(one_sided, backend, node_size)
    if isinstance(program, Batch):
        return _simulate_batch(program, locals_, transport)
    if not isinstance(program, Program):
        raise ArgumentError(f"program: {shown(program)}; allowed: a Program or a Batch")
    _check_locals(program, locals_, "locals_")
    return bind_in_process(program, locals_, transport, reduction)(locals_)


def bind_in_process(
    program: Program, like: Sequence[torch.Tensor], transport: InProcessTransport, reduction: Reduction = "ordered"
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Bind the program of all ranks, for tensors with the shapes and strides of `like`. Returns a function of the
    tensors.

    On CUDA a call only allocates and launches, without synchronisation, and may be captured in a graph.
    """
    if program.is_identity:
        return list
    device = like[0].device
    with on_device(device):
        bound = [
            BoundProgram(program, position, x.stride(), transport, x.dtype, device, reduction)
            for position, x in enumerate(map(_plain, like))
        ]

    def call(locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with on_device(device):
            if capturing(device):
                captured.update(bound)
            ranks = [program.mesh.rank_at(position) for position in range(program.mesh.size)]
            inputs = map(_plain, locals_)
            outputs = run_all({rank: b.run(x, b.fingerprint) for rank, b, x in zip(ranks, bound, inputs, strict=True)})
            return [outputs[rank] for rank in ranks]

    return call


def _simulate_batch(
    batch: Batch, locals_: Sequence[Sequence[torch.Tensor]], transport: InProcessTransport
) -> list[Any]:
    if not isinstance(locals_, Sequence) or len(locals_) != len(batch.programs):
        number = len(locals_) if isinstance(locals_, Sequence) else shown(locals_)
        raise ArgumentError(
            f"locals_: {number} for a batch of {len(batch.programs)} programs; allowed: a list for each"
        )
    for i, (program, given) in enumerate(zip(batch.programs, locals_, strict=True)):
        _check_locals(program, given, f"locals_[{i}]")
    if not batch.programs:
        return []
    runs, device = {}, locals_[0][0].device
    for rank in batch.everyone:
        positions = [batch.position(i, rank) for i in range(len(batch.programs))]
        # A rank outside a program's mesh holds nothing.
        xs = [
            torch.empty(0, dtype=given[0].dtype, device="cpu") if p is None else _plain(given[p])
            for p, given in zip(positions, locals_, strict=True)
        ]
        strides, dtypes = [x.stride() for x in xs], [x.dtype for x in xs]
        with on_device(device):
            runs[rank] = BoundBatch(batch, rank, strides, transport, dtypes, device).run(xs)
    with on_device(device):
        outputs = run_all(runs)
    results: list[list[torch.Tensor]] = []
    for i, program in enumerate(batch.programs):
        results.append([outputs[program.mesh.rank_at(position)][i] for position in range(program.mesh.size)])
    return results


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Resolve lazy conjugate and negative views, because programs move bytes. No gradient is recorded."""
    return x.detach().resolve_conj().resolve_neg()


def _check_locals(program: Program, locals_: Sequence[torch.Tensor], name: str) -> None:
    if not isinstance(locals_, Sequence):
        raise ArgumentError(f"{name}: a {type(locals_).__name__}; allowed: a list of tensors, one per rank")
    if program.rank is not None:
        raise ArgumentError(f"program: it is rank {program.rank}'s alone; allowed: one of all ranks (rank=None)")
    if len(locals_) != program.mesh.size:
        raise ArgumentError(
            f"{name}: {len(locals_)} tensors for a mesh of {program.mesh.size} ranks; allowed: one each"
        )
    for position, x in enumerate(locals_):
        here = f"{name}[{position}]"
        obstacle = why_no_data(x) if isinstance(x, torch.Tensor) else shown(x)
        if obstacle is not None:
            raise ArgumentError(f"{here}: {obstacle}; allowed: a strided tensor with memory")
        check_local_shape(program, position, x.shape, here)
        if name_of(x.dtype) != program.dtype:
            raise ArgumentError(f"{here}: dtype {name_of(x.dtype)}; the program allows {program.dtype}")
        if x.device != locals_[0].device:
            raise ArgumentError(f"{here}: device {x.device}; allowed: that of the others, {locals_[0].device}")
