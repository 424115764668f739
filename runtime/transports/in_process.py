"""A transport of simulated ranks in one process on one device."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ...errors import DisagreementError
from .backend_limits import assumed_node
from .comm_requests import (
    AllGather,
    AllReduce,
    AllToAll,
    AwaitTransfer,
    Barrier,
    Collective,
    CommRequest,
    ReduceScatter,
    StartTransfer,
    Transfer,
)

_NOT_ARRIVED = 0xAB
"""Bytes in place of data that a rank does not await yet."""

_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class InProcessTransport:
    """A transport whose ranks are run by `run_all`, with plain tensors as the buffers of peers.

    Args:
        one_sided: ranks write output each other's buffers; if False, they send and receive.
        backend: with `one_sided=False`, any ranks have a process group with this backend.
        node_size: with `one_sided=False`, ranks of nodes of this size still write output each other's buffers.
    """

    recycles = False
    windows = None
    answer = None  # `run_all` answers the requests of all ranks

    def __init__(self, one_sided: bool = True, backend: str | None = None, node_size: int | None = None) -> None:
        self.one_sided, self.backend, self.node_size = one_sided, backend or "", node_size

    def node_of(self, rank: int) -> int:
        return assumed_node(rank, self.one_sided, self.node_size)

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

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def check(self) -> None:
        pass


def run_all(runs: Mapping[int, Generator[CommRequest, Any, Any]]) -> dict[int, Any]:
    """Run all ranks: each continues as soon as its peers have posted what it waits for. Returns the outputs by rank.

    Raises:
        DisagreementError: ranks exchange at different points of a program, expect other sizes than are sent, or wait
            for each other.
    """
    outputs: dict[int, Any] = {}
    posted: dict[tuple[int, int], deque[Any]] = defaultdict(deque)  # from one rank to another
    waiting: dict[int, CommRequest] = {}

    def resume(rank: int, result: Any) -> None:
        try:
            waiting[rank] = runs[rank].send(result)
        except StopIteration as end:
            outputs[rank] = end.value
            return
        _post(rank, waiting[rank], posted)

    for rank in runs:
        resume(rank, None)
    while waiting:
        ready = [
            r
            for r, request in waiting.items()
            if all(len(posted[peer, r]) >= number for peer, number in _awaited(request, r).items())
        ]
        if not ready:
            raise DisagreementError(f"ranks {sorted(waiting)} wait for peers that post nothing more")
        for rank in ready:
            # The request, and the tensors it holds, are released before the rank continues.
            resume(rank, _answered(rank, waiting.pop(rank), posted))
    return outputs


class _Started:
    """A transfer that has started. `arrived`: the messages, from the first wait on; the memory for those that are not
    awaited yet holds something else."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, self.arrived = transfer, list[torch.Tensor]()


def _awaited(request: CommRequest, rank: int) -> dict[int, int]:
    """The number of messages, or of arrivals at a barrier, that a request waits for, by peer."""
    if isinstance(request, StartTransfer):
        return {}
    if isinstance(request, AwaitTransfer):
        return {} if request.started.arrived else _awaited(request.started.transfer, rank)
    if isinstance(request, Barrier):
        return dict.fromkeys(request.peers, 1)
    if isinstance(request, Collective):
        return {peer: 1 for peer in request.group if peer != rank}  # including those that send nothing
    return Counter(peer for peer, _ in request.receives)


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


def _post(rank: int, request: CommRequest, posted: dict[tuple[int, int], deque[Any]]) -> None:
    if isinstance(request, StartTransfer):
        _post(rank, request.transfer, posted)
        return
    if isinstance(request, AwaitTransfer):
        return
    if isinstance(request, Barrier):
        for peer in request.peers:
            posted[rank, peer].append((request.fingerprint, request.offer))
        if request.during_wait is not None:
            request.during_wait()
        return
    for i, (peer, buffer) in enumerate(_sends(request)):
        if isinstance(request, Transfer) and request.before_send is not None:
            request.before_send(i)
        posted[rank, peer].append((request.fingerprint, buffer.clone()))
    if isinstance(request, Transfer) and request.during_wait is not None:
        request.during_wait()


def _answered(rank: int, request: CommRequest, posted: dict[tuple[int, int], deque[Any]]) -> Any:
    if isinstance(request, StartTransfer):
        return _Started(request.transfer)
    if isinstance(request, AwaitTransfer):
        started = request.started
        if not started.arrived:
            _answered(rank, started.transfer, posted)
            started.arrived = [buffer.clone() for _, buffer in started.transfer.receives]
            for _, buffer in started.transfer.receives:
                buffer.fill_(_NOT_ARRIVED)
        for (_, buffer), data in list(zip(started.transfer.receives, started.arrived, strict=True))[: request.receives]:
            buffer.copy_(data)
        return None
    own = {rank: 1} if isinstance(request, Collective) else {}
    received: dict[int, deque[Any]] = defaultdict(deque)
    for peer, number in {**_awaited(request, rank), **own}.items():
        for _ in range(number):
            fingerprint, message = posted[peer, rank].popleft()
            if fingerprint != request.fingerprint:
                raise DisagreementError(f"rank {rank} and rank {peer} are at different points of the program")
            received[peer].append(message)
    if isinstance(request, Barrier):
        return [received[peer].popleft() for peer in request.peers]
    if isinstance(request, ReduceScatter | AllReduce):
        output = request.receives if isinstance(request, ReduceScatter) else request.values
        terms = [received[peer].popleft() for peer in request.group]
        if len(terms) != len(request.group) or any(t.shape != output.shape or t.dtype != output.dtype for t in terms):
            raise DisagreementError(f"rank {rank} expects {output.numel()} values of ranks {request.group} each")
        output.copy_(reduce(_OPS[request.op], terms))
        return None
    for peer, buffer in _receives(request):
        sent = received[peer].popleft()
        if isinstance(request, AllToAll):
            buffer = buffer[: sent.numel()]
        if sent.shape != buffer.shape:
            raise DisagreementError(
                f"rank {rank} expects {buffer.numel()} bytes of rank {peer}, which sends something else"
            )
        buffer.copy_(sent)
    return None
