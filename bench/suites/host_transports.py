"""Transports without peers: a call does all the host's work, waits for nobody and moves nothing.

The null transport takes the place of any other. Those that ranks on GPUs use have rank 0 alone in them; on a GPU their
launches can be made as well, and without one nothing is compiled or launched, and all else is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardweave.kernels.channel import SLOT, Channel
from shardweave.kernels.launch import PreparedLaunch
from shardweave.kernels.signal import PreparedSignal
from shardweave.runtime.executor import copies
from shardweave.runtime.executor.step_put import PutStep
from shardweave.runtime.transports import process_group
from shardweave.runtime.transports.process_group import ProcessGroupTransport
from shardweave.runtime.transports.rendezvous import Rendezvous
from shardweave.runtime.transports.requests import Barrier
from shardweave.runtime.transports.select import AnyTransport
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

TIMEOUT = 10.0
SCRATCH = 1 << 20  # bytes; more than any shard here
_PATCHED = ("copy_boxes", "reduce_boxes", "launch", "signal")


class Alone(Rendezvous):
    """Of a rank that takes all others to be there."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, TIMEOUT, lambda rank: False)

    def _new_session(self, ranks: tuple[int, ...]) -> str:
        return ""


class NullTransport:
    """Hands out memory that recycles, as a pool does whose tensors die soon, and has no peers.

    Args:
        scratch: the device of a buffer that stands for the buffers of all peers: pushes to it cost the host of a GPU
            what real ones do. None: peers have no buffers.
    """

    one_sided = recycles = True
    windows = None
    name, backend, error, busy, pending, rank = "null", "", None, False, None, 0

    def __init__(self, scratch: torch.device | None = None) -> None:
        self.rendezvous = Alone()
        self._kept: dict[Any, list[torch.Tensor]] = {}
        self._bytes: dict[int, torch.Tensor] = {}
        self._peers: int | None = None
        if scratch is not None:
            buffer = torch.empty(SCRATCH, dtype=torch.uint8, device=scratch)
            self._peers = buffer.data_ptr()
            self._bytes[self._peers] = buffer

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self._kept.setdefault((tuple(shape), dtype), [])
        if len(kept) < 2:
            kept.append(torch.empty(tuple(shape), dtype=dtype, device=device))
            self._bytes[kept[-1].data_ptr()] = kept[-1].view(-1).view(torch.uint8)
        kept.reverse()
        return kept[0].detach()

    def address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr()

    def open(self, address: int, nbytes: int) -> torch.Tensor:
        return self._bytes[address]

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def answer(self, request: Barrier) -> list[int | None]:
        if request.during_wait is not None:
            request.during_wait()
        return [self._peers] * len(request.peers)


class NullTransports:
    """In place of the transports of a process group: the null transport, or by its name one that GPUs use."""

    named: Mapping[str, AnyTransport] = {}

    def choose(self, ranks: tuple[int, ...], device: torch.device, requested: str | None) -> tuple[Any, str]:
        if requested is not None:
            return self.named[requested], "requested"
        return NullTransport(None if copies.is_plain_memory(device) else device), "nothing is to be moved"


class _Mirror:
    """Memory of rank 0 in which the others' lies as well: what it sends to a peer arrives in its own pad, as if from
    that peer, so that signals are sent and awaited on one GPU, and none of them waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], *rest: Any) -> dict[int, torch.Tensor]:
        row = SLOT * 8
        longer = torch.zeros(own.numel() + row * len(handles), dtype=torch.uint8, device=self.device)
        # Rank 0 is everyone's first peer; the row of peer i in its pad is the one before the i-th.
        return {rank: longer[row * max(i - 1, 0) :][: own.numel()] for i, rank in enumerate(handles)}


class _MirrorTransport(SymmetricMemoryTransport):
    """Rank 0 through windows, among peers that are itself."""

    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        return dict.fromkeys(ranks, text)


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


def device_transports(device: str, size: int) -> dict[str, AnyTransport]:
    """What ranks on GPUs use, by name: windows among `size` peers that are rank 0 itself, and NCCL."""
    with as_on_a_gpu(device):
        windows = _MirrorTransport(0, size, TIMEOUT, _Mirror(_here(device)), Alone())
        return {
            "symmetric_memory": windows,
            "process_group": ProcessGroupTransport(0, size, TIMEOUT, "nccl", Alone()),
        }


def _here(device: str) -> torch.device:
    return torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())


@contextmanager
def on_device_transports(device: str, transports: Mapping[str, AnyTransport]) -> Iterator[None]:
    """In this block programs find these transports, and torch.distributed sends nothing and is done at once."""
    done = _Done()
    with (
        as_on_a_gpu(device),
        mock.patch.object(dist, "batch_isend_irecv", lambda operations: [done] * len(operations)),
        mock.patch.object(process_group, "_started", lambda request, group: done),
        mock.patch.object(NullTransports, "named", transports),
    ):
        yield


@contextmanager
def nothing_is_moved(device: str) -> Iterator[None]:
    """In this block nothing is written to peers, nor reduced that they would have sent. On a GPU launches are made all
    the same."""
    push = PutStep.push

    def push_to_buffers(step: PutStep, x: torch.Tensor, done: Any, address: Any, nbytes: int) -> None:
        if address is not None:
            push(step, x, done, address, nbytes)

    if not copies.is_plain_memory(torch.device(device)):
        yield
        return
    with (
        mock.patch.object(PutStep, "push", push_to_buffers),
        mock.patch.object(copies.Reduction, "__call__", lambda *_: None),
    ):
        yield


@contextmanager
def as_on_a_gpu(device: str) -> Iterator[None]:
    """In this block programs are bound on the CPU as they are on a GPU, except for compiling."""
    make = Channel.__init__

    def without_cpu_path(self: Channel, *arguments: Any) -> None:
        make(self, *arguments)
        self.cpu_path = False

    def refuse(*arguments: Any) -> None:
        raise AssertionError("without a GPU nothing can be launched")

    if device != "cpu":
        yield
        return
    # Modules by their names: functions of the same names hide them.
    kernels = {name: import_module(f"shardweave.kernels.{name}") for name in _PATCHED}
    with (
        mock.patch.object(kernels["copy_boxes"], "runs_on", lambda device: True),
        mock.patch.object(kernels["reduce_boxes"], "runs_on", lambda device: True),
        mock.patch.object(kernels["launch"], "prepared", lambda *_: refuse),
        mock.patch.object(kernels["signal"], "prepared", lambda *_: refuse),
        mock.patch.object(copies, "is_plain_memory", lambda device: False),
        mock.patch.object(Channel, "__init__", without_cpu_path),
    ):
        yield


@contextmanager
def without_launches(counts: Counter[str] | None = None) -> Iterator[None]:
    """In this block a call does all the host's work except launches, which are counted by class."""

    def replaced(kind: type) -> Callable[..., None]:
        return (lambda *_: None) if counts is None else (lambda *_: counts.update([kind.__name__]))

    with (
        mock.patch.object(PreparedLaunch, "__call__", replaced(PreparedLaunch)),
        mock.patch.object(PreparedSignal, "__call__", replaced(PreparedSignal)),
    ):
        yield


def counted_launches(call: Callable[[], Any]) -> Counter[str]:
    """The launches of boxes and of signals of a call; none of them is made."""
    counts: Counter[str] = Counter()
    with without_launches(counts):
        call()
    return counts
