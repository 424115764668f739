"""Protocols of transports, as the executor uses them: common, one-sided, two-sided, and with symmetric windows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from ...kernels import Turn
from .backend_limits import WindowPolicy
from .comm_requests import Address, CommRequest
from .shared_memory.receive_buffers import ReceiveBuffers
from .symmetric_memory.window import Use, Window


class Capabilities(Protocol):
    """Properties that the choice of an algorithm depends on. Equal on all ranks that run a step together."""

    @property
    def one_sided(self) -> bool:
        """Whether all ranks write into each other's memory. If False, some of them send and receive."""

    @property
    def windows(self) -> WindowPolicy | None:
        """How ranks use symmetric windows, where they synchronise on the device; otherwise None."""

    def node_of(self, rank: int) -> Hashable:
        """A key that is equal for ranks that write into each other's memory."""


class TwoSidedCapabilities(Capabilities, Protocol):
    """Capabilities of a transport of which some ranks send and receive."""

    @property
    def backend(self) -> str:
        """The process group backend, one of `backend_limits.BACKENDS`."""

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks of the process group of exactly these ranks, in its order; None if they do not all know one."""


class Transport(Capabilities, Protocol):
    """A set of ranks that can exchange data."""

    @property
    def answer(self) -> Callable[[CommRequest], Any] | None:
        """Carries out a request and returns its result; None if no step of this transport yields requests."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous tensor that no other tensor shares memory with."""

    def check(self) -> None:
        """Raise the error of an earlier call.

        Raises:
            TransportError: an earlier call failed, as far as the host knows.
        """


class OneSidedTransport(Transport, Protocol):
    """Ranks write into tensors of their peers and synchronise by `Barrier` requests. `empty` returns memory that peers
    can address."""

    @property
    def recycles(self) -> bool:
        """Whether an address refers to the same memory for ever, so that views of it may be cached."""

    def addressable(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor lies in memory from `empty`."""

    def address(self, buffer: torch.Tensor) -> Address:
        """The address of a tensor from `empty`, valid on every rank."""

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory at an address of this rank or a peer."""

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Address, object]:
        """What stands for the addresses of several buffers (None for missing ones) as `Barrier.offer`, and an object
        besides them that must stay alive until all peers have called `offered`, or None."""

    def offered(self, address: Address, number: int) -> Sequence[Address]:
        """The `number` addresses that an offer of this rank or a peer stands for."""

    def receive_buffers(self, ranks: tuple[int, ...]) -> ReceiveBuffers | None:
        """The buffers that a group of ranks keeps for its next run; None if the transport keeps none."""


class TwoSidedTransport(Transport, TwoSidedCapabilities, Protocol):
    """Ranks exchange messages by `Transfer` requests and by the collectives of process groups."""


class WindowedTransport(Transport, Protocol):
    """Ranks write into symmetric windows of their group and synchronise on the device."""

    def window(self, ranks: tuple[int, ...], nbytes: int, halves: int = 1, exact: bool = False) -> Window:
        """The smallest window with `halves` of at least `nbytes` of a group, given by its ascending ranks. Collective
        if it has to be allocated."""

    def signal(self, window: Window, use: Use, fingerprint: int = 0, poison: torch.Tensor | None = None) -> None:
        """Enqueue `Window.signal`, bounded by the transport's timeout."""

    def turn(self, fingerprint: int, send: bool = True, out: torch.Tensor | None = None) -> Turn:
        """The arguments of a launch that writes or reads a window, bounded by the transport's timeout. `send`: it is
        the last one that does so in this exchange; `out`: the output to overwrite on failure."""
