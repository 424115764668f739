"""Virtual ranks in one process on one device: programs proved without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, DisagreementError
from ..planner import Program, check_local_shape
from .dtypes import name_of
from .executor import BoundProgram
from .meeting import Meet, Transfer


class InProcessWorld:
    """Peers are plain buffers of this process. With `one_sided=False` ranks send and receive, as over a network."""

    recycles = False

    def __init__(self, one_sided: bool = True) -> None:
        self.one_sided = one_sided

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def address(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def open(self, address: torch.Tensor, nbytes: int) -> torch.Tensor:
        return address.view(-1).view(torch.uint8)

    def landings(self, ranks: tuple[int, ...]) -> None:
        return None


def simulate(program: Program, locals_: Sequence[torch.Tensor], *, one_sided: bool = True) -> list[torch.Tensor]:
    """Carry out a whole program in this process, every rank in turn.

    Args:
        program: the program of all ranks (`plan(..., rank=None)`).
        locals_: one tensor per rank in mesh row-major order, each of the shape that layout `src` gives it, all of the
            program's dtype and on one device; any strides.
        one_sided: ranks push into each other's buffers; False: they pack, send, receive and unpack.

    Returns:
        One tensor per rank, of the shape that layout `dst` gives it. The inputs themselves where nothing is to be done.
        No gradients are recorded.

    Raises:
        ArgumentError: a program of one rank; a tensor too many or too few; a shape, dtype or device that does not fit.
    """
    if not isinstance(program, Program):
        raise ArgumentError(f"program: {program!r}; allowed: a Program")
    if not isinstance(locals_, Sequence):
        raise ArgumentError(f"locals_: a {type(locals_).__name__}; allowed: a list of tensors, one per rank")
    if program.rank is not None:
        raise ArgumentError(f"program: it is rank {program.rank}'s alone; allowed: one of all ranks (rank=None)")
    if len(locals_) != program.mesh.size:
        raise ArgumentError(
            f"locals_: {len(locals_)} tensors for a mesh of {program.mesh.size} ranks; allowed: one each"
        )
    for position, x in enumerate(locals_):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
            what = f"a {x.layout} tensor on {x.device}" if isinstance(x, torch.Tensor) else repr(x)
            raise ArgumentError(f"locals_[{position}]: {what}; allowed: a strided tensor with memory")
        check_local_shape(program, position, x.shape, f"locals_[{position}]")
        if name_of(x.dtype) != program.dtype:
            raise ArgumentError(f"locals_[{position}]: dtype {name_of(x.dtype)}; the program allows {program.dtype}")
        if x.device != locals_[0].device:
            raise ArgumentError(
                f"locals_[{position}]: device {x.device}; allowed: that of the others, {locals_[0].device}"
            )
    if program.is_identity:
        return list(locals_)
    world = InProcessWorld(one_sided)
    runs = {}
    for position, x in enumerate(locals_):
        # Programs move bytes: lazy views are made what they say first. No gradient is recorded.
        x = x.detach().resolve_conj().resolve_neg()
        bound = BoundProgram(program, position, x.stride(), world, x.dtype, x.device)
        runs[program.mesh.rank_at(position)] = bound.run(x)
    outputs: dict[int, torch.Tensor] = {}
    replies: dict[int, Any] = dict.fromkeys(runs)
    while runs:
        asked: dict[int, Meet | Transfer] = {}
        for rank in list(runs):
            try:
                asked[rank] = runs[rank].send(replies.get(rank))
            except StopIteration as end:
                outputs[rank] = end.value
                del runs[rank]
        replies = {rank: _answer(rank, request, asked) for rank, request in asked.items()}
    return [outputs[program.mesh.rank_at(position)] for position in range(program.mesh.size)]


def _answer(rank: int, request: Meet | Transfer, asked: dict[int, Meet | Transfer]) -> Any:
    if isinstance(request, Meet):
        if request.meanwhile is not None:
            request.meanwhile()
        met = [asked.get(peer) for peer in request.peers]
        if not all(isinstance(m, Meet) and m.token == request.token for m in met):
            raise DisagreementError(f"rank {rank} met ranks {request.peers} at another point of the program")
        return [m.offer for m in met if isinstance(m, Meet)]
    for peer, buffer in request.receives:
        theirs = asked.get(peer)
        sent = dict(theirs.sends).get(rank) if isinstance(theirs, Transfer) else None
        if sent is None or sent.shape != buffer.shape:
            raise DisagreementError(
                f"rank {rank} expects {buffer.numel()} bytes of rank {peer}, which sends something else"
            )
        buffer.copy_(sent)
    return None
