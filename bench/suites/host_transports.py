"""The transports that ranks on GPUs use, with nobody else in them: a call does all the host's work, and waits for
nothing.

On a GPU their launches can be made as well. Without one nothing is compiled or launched, and all else is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardweave.kernels.channel import SLOT, Channel
from shardweave.kernels.launch import PreparedLaunch
from shardweave.kernels.signal import PreparedSignal
from shardweave.runtime.executor import copies
from shardweave.runtime.transports import process_group
from shardweave.runtime.transports.process_group import ProcessGroupTransport
from shardweave.runtime.transports.rendezvous import Rendezvous
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

TIMEOUT = 10.0
_LAUNCHED = (PreparedLaunch, PreparedSignal)


class _Mirror:
    """Memory of rank 0 in which the others' lies as well: what it sends to a peer arrives in its own pad, as if from
    that peer, so that signals are sent and awaited on one GPU, and none of them waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), ""

    def join(self, own: torch.Tensor, told: Mapping[int, str], *rest: Any) -> dict[int, torch.Tensor]:
        row = SLOT * 8
        longer = torch.zeros(own.numel() + row * len(told), dtype=torch.uint8, device=self.device)
        # Rank 0 is everyone's first peer; the row of peer i in its pad is the one before the i-th.
        return {rank: longer[row * max(i - 1, 0) :][: own.numel()] for i, rank in enumerate(told)}


class Alone(Rendezvous):
    """Of a rank that takes all others to be there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(dist.HashStore(), rank, TIMEOUT, lambda rank: False)

    def _new_session(self, ranks: tuple[int, ...]) -> str:
        return ""


class MirrorTransport(SymmetricMemoryTransport):
    """Rank 0 through windows, among peers that are itself."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(0, size, TIMEOUT, _Mirror(device), Alone(0, size))

    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        return dict.fromkeys(ranks, text)


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


_DONE = _Done()


class SilentTransport(ProcessGroupTransport):
    """Rank 0 by messages that are not sent."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, TIMEOUT, "nccl", Alone(0, size))


def nothing_is_sent() -> ExitStack:
    """In this block torch.distributed sends nothing, and is done at once."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", lambda operations: [_DONE] * len(operations)))
    stack.enter_context(mock.patch.object(process_group, "_started", lambda request, group: _DONE))
    return stack


@contextmanager
def as_on_a_gpu(device: torch.device) -> Iterator[None]:
    """In this block programs are bound on the CPU as they are on a GPU, but for compiling. On a GPU they are anyway."""
    if device.type == "cuda":
        yield
        return
    made = Channel.__init__

    def by_kernels(self: Channel, *arguments: Any) -> None:
        made(self, *arguments)
        self.cpu_path = False

    def refuse(*arguments: Any) -> None:
        raise AssertionError("without a GPU nothing can be launched")

    with ExitStack() as stack:
        # Modules by their names: functions of the same names hide them.
        for name, attribute, value in (
            ("copy_boxes", "runs_on", lambda device: True),
            ("reduce_boxes", "runs_on", lambda device: True),
            ("launch", "prepared", lambda *_: refuse),
            ("signal", "prepared", lambda *_: refuse),
        ):
            module = import_module(f"shardweave.kernels.{name}")
            stack.enter_context(mock.patch.object(module, attribute, value))
        stack.enter_context(mock.patch.object(copies, "is_plain_memory", lambda device: False))
        stack.enter_context(mock.patch.object(Channel, "__init__", by_kernels))
        yield


@contextmanager
def without_launches() -> Iterator[None]:
    """In this block a call does all the host's work but that of launches."""
    with _in_place_of_launches(lambda kind: lambda self, *arguments: None):
        yield


def counted_launches(call: Callable[[], Any]) -> Counter[str]:
    """How many launches of boxes and of signals a call makes; none of them is made."""
    counts: Counter[str] = Counter()

    def counting(kind: type) -> Callable[..., None]:
        return lambda self, *arguments: counts.update([kind.__name__])

    with _in_place_of_launches(counting):
        call()
    return counts


@contextmanager
def _in_place_of_launches(made: Callable[[type], Callable[..., None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in _LAUNCHED:
            stack.enter_context(mock.patch.object(kind, "__call__", made(kind)))
        yield
