"""Virtual ranks in one process on one device: programs proved without a process group."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ..errors import ArgumentError, DisagreementError, shown
from ..planner import Batch, Program, check_local_shape
from .batches import BatchRun, BoundBatch
from .bound_step import Run
from .dtypes import name_of
from .executor import BoundProgram
from .lowering import BACKENDS, Reduction, check_reduction, node_of
from .meeting import AllGather, AllReduce, AllToAll, Ask, Collective, Meet, Mixed, ReduceScatter, Transfer
from .streams import captured

_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class InProcessWorld:
    """Peers are plain buffers of this process. With `one_sided=False` ranks send and receive, as over a network, except
    to those of their node if there are nodes; with a `backend` any of them have a process group of it."""

    recycles = False
    windows = None

    def __init__(self, one_sided: bool = True, backend: str | None = None, node_size: int | None = None) -> None:
        self.one_sided, self.backend, self.node_size = one_sided, backend or "", node_size

    def node_of(self, rank: int) -> int:
        return node_of(rank, self.one_sided, self.node_size)

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        return tuple(ranks) if self.backend else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def addressable(self, tensor: torch.Tensor) -> bool:
        return True

    def address(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def open(self, address: torch.Tensor, nbytes: int) -> torch.Tensor:
        return address.view(-1).view(torch.uint8)

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Sequence[torch.Tensor | None], object]:
        return buffers, None

    def offered(self, address: Sequence[torch.Tensor], number: int) -> Sequence[torch.Tensor]:
        return address

    def landings(self, ranks: tuple[int, ...]) -> None:
        return None

    def check(self) -> None:
        pass


def simulate(
    program: Program | Batch,
    locals_: Sequence[Any],
    *,
    one_sided: bool = True,
    backend: str | None = None,
    reduction: Reduction = "ordered",
    node_size: int | None = None,
) -> list[Any]:
    """Carry out a whole program, or a batch of them, in this process, every rank in turn.

    Args:
        program: the program of all ranks (`plan(..., rank=None)`), or a batch of such.
        locals_: one tensor per rank in the order of the program's mesh, each of the shape that layout `src` gives it
            (`Program.source_shape`), all of the program's dtype and on one device; any strides. Of a batch a list of
            these for each of its programs.
        one_sided: ranks push into each other's buffers; False: they pack, send, receive and unpack.
        backend: with `one_sided=False`, any ranks that meet have a process group of it, "gloo" or "nccl", and steps
            take the collectives that they take there.
        reduction: "fast" also lets the backend reduce (here in the order of ranks). Not of batches.
        node_size: with `one_sided=False`, ranks of a node of so many consecutive ones push all the same.

    Returns:
        One tensor per rank, of the shape that layout `dst` gives it; of a batch a list of these for each program. The
        inputs themselves where nothing is to be done. No gradients are recorded.

    Raises:
        ArgumentError: a program of one rank; a tensor too many or too few; a shape, dtype or device that does not fit.
    """
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ArgumentError(f"backend: {shown(backend)}; allowed: {', '.join(map(repr, BACKENDS))}, or None")
    if node_size is not None and (type(node_size) is not int or node_size < 1):
        raise ArgumentError(f"node_size: {shown(node_size)}; allowed: a whole number above 0, or None")
    reduction, world = check_reduction(reduction), InProcessWorld(one_sided, backend, node_size)
    if isinstance(program, Batch):
        return _simulate_batch(program, locals_, world)
    if not isinstance(program, Program):
        raise ArgumentError(f"program: {shown(program)}; allowed: a Program or a Batch")
    _check_locals(program, locals_, "locals_")
    return bind_in_process(program, locals_, world, reduction)(locals_)


def bind_in_process(
    program: Program, like: Sequence[torch.Tensor], world: InProcessWorld, reduction: Reduction = "ordered"
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """The program of all ranks, bound once and called many times, with tensors of the forms of `like`.

    On CUDA a call only allocates and launches: it waits for nothing, and may be captured in a graph.
    """
    if program.is_identity:
        return list
    bound = [
        BoundProgram(program, position, x.stride(), world, x.dtype, x.device, reduction)
        for position, x in enumerate(map(_plain, like))
    ]

    def call(locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if bound[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            captured.update(bound)
        ranks = [program.mesh.rank_at(position) for position in range(program.mesh.size)]
        inputs = map(_plain, locals_)
        outputs = run_all({rank: b.run(x) for rank, b, x in zip(ranks, bound, inputs, strict=True)})
        return [outputs[rank] for rank in ranks]

    return call


def _simulate_batch(batch: Batch, locals_: Sequence[Sequence[torch.Tensor]], world: InProcessWorld) -> list[Any]:
    if not isinstance(locals_, Sequence) or len(locals_) != len(batch.programs):
        number = len(locals_) if isinstance(locals_, Sequence) else shown(locals_)
        raise ArgumentError(
            f"locals_: {number} for a batch of {len(batch.programs)} programs; allowed: a list for each"
        )
    for i, (program, given) in enumerate(zip(batch.programs, locals_, strict=True)):
        _check_locals(program, given, f"locals_[{i}]")
    runs = {}
    for rank in batch.everyone:
        positions = [batch.position(i, rank) for i in range(len(batch.programs))]
        # A rank that is not in a program's mesh has nothing of it.
        xs = [
            torch.empty(0, dtype=given[0].dtype, device="cpu") if p is None else _plain(given[p])
            for p, given in zip(positions, locals_, strict=True)
        ]
        strides, dtypes = [x.stride() for x in xs], [x.dtype for x in xs]
        runs[rank] = BoundBatch(batch, rank, strides, world, dtypes, locals_[0][0].device).run(xs)
    outputs = run_all(runs)
    found: list[list[torch.Tensor]] = []
    for i, program in enumerate(batch.programs):
        found.append([outputs[program.mesh.rank_at(position)][i] for position in range(program.mesh.size)])
    return found


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Programs move bytes: lazy views are made what they say first. No gradient is recorded."""
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
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
            what = f"a {x.layout} tensor on {x.device}" if isinstance(x, torch.Tensor) else shown(x)
            raise ArgumentError(f"{here}: {what}; allowed: a strided tensor with memory")
        check_local_shape(program, position, x.shape, here)
        if name_of(x.dtype) != program.dtype:
            raise ArgumentError(f"{here}: dtype {name_of(x.dtype)}; the program allows {program.dtype}")
        if x.device != locals_[0].device:
            raise ArgumentError(f"{here}: device {x.device}; allowed: that of the others, {locals_[0].device}")


def run_all(runs: Mapping[int, Run | BatchRun]) -> dict[int, Any]:
    """Each rank goes on as soon as its peers have posted what it waits for; their outputs.

    Raises:
        DisagreementError: ranks meet at different points, expect other sizes than are sent, or wait for each other.
    """
    outputs: dict[int, Any] = {}
    posted: dict[tuple[int, int], deque[Any]] = defaultdict(deque)  # from one rank to another
    waiting: dict[int, Ask] = {}

    def go_on(rank: int, reply: Any) -> None:
        try:
            waiting[rank] = runs[rank].send(reply)
        except StopIteration as end:
            outputs[rank] = end.value
            return
        _post(rank, waiting[rank], posted)

    for rank in runs:
        go_on(rank, None)
    while waiting:
        ready = [r for r, request in waiting.items() if all(posted[peer, r] for peer in _awaited(request, r))]
        if not ready:
            raise DisagreementError(f"ranks {sorted(waiting)} wait for peers that post nothing more")
        for rank in ready:
            # What a request holds is let go before the rank goes on.
            go_on(rank, _answered(rank, waiting.pop(rank), posted))
    return outputs


def _awaited(request: Ask, rank: int) -> list[int]:
    if isinstance(request, Mixed):
        return _awaited(request.transfer, rank) + _awaited(request.meet, rank)
    if isinstance(request, Meet):
        return list(request.peers)
    if isinstance(request, Collective):
        return [peer for peer in request.group if peer != rank]  # also those that send nothing
    return list(dict.fromkeys(peer for peer, _ in request.receives))


def _receives(request: Transfer | AllToAll | AllGather) -> Sequence[tuple[int, torch.Tensor]]:
    if isinstance(request, Transfer):
        return request.receives
    if isinstance(request, AllToAll):
        return list(zip(request.group, request.receives.split(request.receive_sizes), strict=True))
    return list(zip(request.group, request.receives.chunk(len(request.group)), strict=True))


def _sends(request: Transfer | Collective) -> Sequence[tuple[int, torch.Tensor]]:
    if isinstance(request, Transfer):
        return request.sends
    if isinstance(request, AllGather):
        return [(peer, request.sends) for peer in request.group]
    if isinstance(request, AllReduce):
        return [(peer, request.values) for peer in request.group]
    if isinstance(request, AllToAll):
        return list(zip(request.group, request.sends.split(request.send_sizes), strict=True))
    return list(zip(request.group, request.sends.chunk(len(request.group)), strict=True))


def _post(rank: int, request: Ask, posted: dict[tuple[int, int], deque[Any]]) -> None:
    if isinstance(request, Mixed):
        _post(rank, request.transfer, posted)
        request.push()
        _post(rank, request.meet, posted)
        return
    if isinstance(request, Meet):
        for peer in request.peers:
            posted[rank, peer].append((request.token, request.offer))
        if request.meanwhile is not None:
            request.meanwhile()
        return
    messages: dict[int, list[torch.Tensor]] = defaultdict(list)
    for peer, buffer in _sends(request):
        messages[peer].append(buffer.clone())
    for peer, buffers in messages.items():
        posted[rank, peer].append((request.token, buffers))


def _answered(rank: int, request: Ask, posted: dict[tuple[int, int], deque[Any]]) -> Any:
    if isinstance(request, Mixed):
        _answered(rank, request.transfer, posted)
        return _answered(rank, request.meet, posted)
    own = [rank] if isinstance(request, Collective) else []
    came = {peer: posted[peer, rank].popleft() for peer in (*_awaited(request, rank), *own)}
    for peer, (token, _) in came.items():
        if token != request.token:
            raise DisagreementError(f"rank {rank} met rank {peer} at another point of the program")
    if isinstance(request, Meet):
        return [came[peer][1] for peer in request.peers]
    if isinstance(request, ReduceScatter | AllReduce):
        into = request.receives if isinstance(request, ReduceScatter) else request.values
        terms = [term for peer in request.group for term in came[peer][1]]
        if len(terms) != len(request.group) or any(t.shape != into.shape or t.dtype != into.dtype for t in terms):
            raise DisagreementError(f"rank {rank} expects {into.numel()} values of ranks {request.group} each")
        into.copy_(reduce(_OPS[request.op], terms))
        return None
    for peer, buffer in _receives(request):
        sent = came[peer][1].pop(0) if isinstance(came[peer][1], list) and came[peer][1] else None
        if sent is not None and isinstance(request, AllToAll):
            buffer = buffer[: sent.numel()]  # there may be room for more
        if sent is None or sent.shape != buffer.shape:
            raise DisagreementError(
                f"rank {rank} expects {buffer.numel()} bytes of rank {peer}, which sends something else"
            )
        buffer.copy_(sent)
    return None
