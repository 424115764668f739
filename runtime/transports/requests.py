"""What a rank asks of its transport while a program runs: the executor yields it, transports and the simulator answer.

Where nothing is asked after a request, its `output` is the tensor that the run returns: a caller may have it at once,
and wait for it later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Address = Any
"""What `Transport.address` makes of a buffer."""


class Barrier(NamedTuple):
    """Wait until every peer has come to the same point. One-sided transports only.

    Safe after it: peers' writes made before their own `Barrier` are visible here. The answer is one address per peer,
    in the order of `peers`: of the buffer it offers, None if it offers none.
    """

    peers: tuple[int, ...]
    fingerprint: int
    """Equal on all ranks that run the same point of the same request."""
    offer: Address | None
    """The address of a buffer from `Transport.empty` that peers may write into from now on."""
    meanwhile: Callable[[], None] | None = None
    """Work that no peer waits for: done between telling peers and waiting for them."""
    output: torch.Tensor | None = None


class Transfer(NamedTuple):
    """Send flat byte tensors to some peers and fill flat byte tensors from others. Two-sided transports only."""

    sends: tuple[tuple[int, torch.Tensor], ...]
    receives: tuple[tuple[int, torch.Tensor], ...]
    fingerprint: int
    """Equal on all ranks that run the same point of the same request, as of `Barrier`; of collectives as well."""
    output: torch.Tensor | None = None
    group: tuple[int, ...] | None = None
    """The ranks of the process group whose members all exchange, in its order; None: some of everyone."""


class HierarchicalExchange(NamedTuple):
    """Exchange with ranks of other nodes and push to those of this one meanwhile. Transports that mix both only.

    The transfer begins; `push` writes into what the peers of `meet` have offered; then these meet, and both are waited
    for. The answer is that of the meeting; it has no peers where they meet on the device.
    """

    transfer: Transfer
    push: Callable[[], None]
    meet: Barrier
    output: torch.Tensor | None = None


HEADER = 16
"""Bytes before the data of each message of an `AllToAll`, for the transport's own use."""


class AllToAll(NamedTuple):
    """Every rank of a process group sends some bytes to every other. Two-sided transports only, as the collectives
    below.

    Buffers are flat bytes, in the order of `group`; sizes are bytes for each rank of it, 0 for this one. They include a
    header. What is received may be shorter than there is room for, so that nothing of another request is too long.
    """

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    send_sizes: list[int]
    receive_sizes: list[int]
    fingerprint: int
    output: torch.Tensor | None = None


class AllGather(NamedTuple):
    """Every rank of a process group sends the same number of bytes to all; `receives` has them in its order.

    Buffers are flat bytes.
    """

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    fingerprint: int
    output: torch.Tensor | None = None


class ReduceScatter(NamedTuple):
    """`sends` has a term for each rank of a process group, in its order; each gets the reduced one that is its own."""

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    op: str
    fingerprint: int
    output: torch.Tensor | None = None


class AllReduce(NamedTuple):
    """Flat values, a term on every rank of a process group, reduced in place on all of them."""

    group: tuple[int, ...]
    values: torch.Tensor
    op: str
    fingerprint: int
    output: torch.Tensor | None = None


Collective = AllToAll | AllGather | ReduceScatter | AllReduce
CommRequest = Barrier | Transfer | HierarchicalExchange | Collective


class PendingCall(Protocol):
    """A call whose last exchange has begun, and which a transport finishes before its next one."""

    def finish(self) -> None: ...
