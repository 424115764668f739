"""Requests for communication: a program that runs yields them, and transports and the simulator answer them.

The `output` of a request is the tensor that the run will return, and None before the last exchange. A caller may
receive this tensor at once and wait for it later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Address = Any
"""The address of a buffer, from `OneSidedTransport.address`."""


class Barrier(NamedTuple):
    """Wait until every peer has reached the same point. One-sided transports only.

    Writes that peers made before their own `Barrier` are visible afterwards. The result is a list of each peer's
    `offer`, in the order of `peers`.
    """

    peers: tuple[int, ...]
    fingerprint: int
    """Equal on all ranks that are at the same point of the same request."""
    offer: Address | None
    """The address of a buffer from `OneSidedTransport.empty` that peers may write into from now on, or what
    `OneSidedTransport.offer` returned for several; None: no buffer."""
    during_wait: Callable[[], None] | None = None
    """Called after peers have been notified and before waiting for them: work that no peer waits for."""
    output: torch.Tensor | None = None


class Transfer(NamedTuple):
    """Send flat byte tensors to peers and receive into flat byte tensors. Two-sided transports only."""

    sends: tuple[tuple[int, torch.Tensor], ...]
    receives: tuple[tuple[int, torch.Tensor], ...]
    fingerprint: int
    """Same as in `Barrier`; collectives have it as well."""
    output: torch.Tensor | None = None
    group: tuple[int, ...] | None = None
    """The ranks of the process group whose members all take part, in its order; None: some ranks of the world."""
    during_wait: Callable[[], None] | None = None
    """Called once the messages have started and before waiting for them: work that neither reads what is received nor
    writes what is sent."""
    before_send: Callable[[int], None] | None = None
    """Called with the index of each send before it starts: packs it."""


class StartTransfer(NamedTuple):
    """Start a transfer. The result is for `AwaitTransfer`, which has to follow; other requests may come before it."""

    transfer: Transfer
    output: torch.Tensor | None = None


class AwaitTransfer(NamedTuple):
    """Wait until receives of a started transfer have arrived, or until all of it is done."""

    started: Any
    receives: int | None = None
    """The number of receives to wait for, in their order; None: all, and the sends."""
    output: torch.Tensor | None = None


HEADER = 16
"""Bytes before the data of each message of an `AllToAll`, used by the transport."""


class AllToAll(NamedTuple):
    """Every rank of a process group sends bytes to every other rank. Two-sided transports only, as all collectives.

    Buffers are flat bytes in the order of `group`. Sizes are bytes per rank of the group, including the header; 0 for
    this rank. A receive size is an upper bound, so that a message of another request always fits.
    """

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    send_sizes: list[int]
    receive_sizes: list[int]
    fingerprint: int
    output: torch.Tensor | None = None


class AllGather(NamedTuple):
    """Every rank of a process group sends the same number of bytes to all; `receives` holds them in group order.

    Buffers are flat bytes.
    """

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    fingerprint: int
    output: torch.Tensor | None = None


class ReduceScatter(NamedTuple):
    """`sends` holds one term for each rank of a process group, in its order; each rank receives its reduced term."""

    group: tuple[int, ...]
    sends: torch.Tensor
    receives: torch.Tensor
    op: str
    fingerprint: int
    output: torch.Tensor | None = None


class AllReduce(NamedTuple):
    """Reduce a flat tensor over the ranks of a process group, in place on all of them."""

    group: tuple[int, ...]
    values: torch.Tensor
    op: str
    fingerprint: int
    output: torch.Tensor | None = None


Collective = AllToAll | AllGather | ReduceScatter | AllReduce
CommRequest = Barrier | Transfer | StartTransfer | AwaitTransfer | Collective


class PendingCall(Protocol):
    """An asynchronous call, which a transport finishes before its next one."""

    def finish(self) -> None: ...
