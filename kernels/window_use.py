"""WindowUse: writes to windows of peers, or reads from them, between a wait for the peers and a signal to them.

On a device both are done by the kernel that writes or reads (`fused_signals`); on the CPU by the functions here, which
take the same steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from .channel import DISAGREES, FAILED, LATE, SLOT, Channel
from .dtypes import WORDS, poison_word
from .fused_signals import give_way
from .launch import interpreted, processors_of
from .signal import TIMED, mixed, overwrite_cpu
from .store_word import PTX

HALVES = 2
"""Of a window; as many uses may be under way."""
_EAGER, _NAP = 100_000, 1e-4  # nanoseconds of polling before naps; seconds of a nap
_NOT_WATCHED = nullcontext()

Watch = Callable[[Callable[[], Sequence[int]]], AbstractContextManager[object]]
"""A context of waits, one after the other, from a function that returns the indices of the peers that are late."""


class Turn(NamedTuple):
    """What changes from call to call.

    Attributes:
        fingerprint: 63 bits that the ranks compare when they read.
        limit: of the wait, from `wait_limit`.
        send: whether this is the last launch of the use: it counts the use and signals the peers.
        out: a contiguous tensor to overwrite if this rank has failed: with NaN, or with the dtype's largest value where
            it has no NaN.
        buffer: where peers push directly, the number of this rank's buffer that they push into.
    """

    fingerprint: int
    limit: int
    send: bool = True
    out: torch.Tensor | None = None
    buffer: int = 0


class WindowUse:
    """How launches that write windows, or read them, wait and signal.

    Args:
        released: the channel on which ranks signal that they have read their windows.
        arrived: the channel on which ranks signal that they have written windows.
        writes: whether launches write windows; otherwise they read.
        stride: bytes from the first half of a window to the second. Uses take turns with the halves, so that a rank
            writes while its peers still read the half before.
        dtype: of outputs to overwrite; None: none is overwritten.
        pulls: whether all sources but the first are windows; otherwise only the second one is.
        watch: for CPU memory, around each wait.
        programs: the most of a launch; None: `waiting_programs`.

    Attributes:
        numbers: how many `arguments` there are.
        watched: the context of launches that wait.
    """

    numbers = 8

    def __init__(
        self,
        released: Channel,
        arrived: Channel,
        writes: bool,
        stride: int,
        dtype: torch.dtype | None = None,
        pulls: bool = False,
        watch: Watch | None = None,
        programs: int | None = None,
    ) -> None:
        self.awaited, self.signalled = (released, arrived) if writes else (arrived, released)
        self.credit = HALVES if writes else 0
        self.writes, self.pulls, self.stride, self.dtype = writes, pulls, stride, dtype
        awaited, signalled = self.awaited, self.signalled
        self.device, self.failure = awaited.pad.device, awaited.failure
        self.programs = programs or waiting_programs(processors_of(self.device))
        self.finished = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._filler, self._word = (0, 8) if dtype is None else poison_word(dtype)
        self.tensors = awaited.table, awaited.pad, signalled.table, self.failure.error, self.finished
        self.host_error = self.failure.host_error.data_ptr()
        self.watched = _NOT_WATCHED if watch is None else watch(self.late)

    def late(self) -> Sequence[int]:
        """The indices of the peers that a launch still waits for. CPU memory only; called from another thread."""
        return self.awaited.late(self.credit - 1)

    def arguments(self, turn: Turn, last: bool) -> tuple[int, ...]:
        """The arguments of a launch after `tensors`; `last`: of the launches of one call."""
        out, words = 0, 0
        if turn.out is not None and self.dtype is not None:
            out, words = turn.out.data_ptr(), turn.out.numel() * turn.out.itemsize // self._word
        send = int(turn.send and last)
        return self.host_error, turn.fingerprint, turn.limit, send, out, words, self._filler, self.stride

    def constants(self, num_warps: int) -> dict[str, Any]:
        """The constants of a kernel that waits and signals."""
        poison = self.dtype is not None
        return use_constants(self.awaited.peers, self.writes, self.pulls, poison, self._word, num_warps)

    def half(self) -> int:
        """Which half of the window the boxes of this call are in, as far as the caller has to choose: 0 where kernels
        do, as `fused_signals.half_of_use`."""
        if not self.awaited.cpu_path:
            return 0
        return (self.awaited.words[1][1][0] if self.writes else self.signalled.words[1][0][0]) & 1

    def begin_cpu(self, turn: Turn) -> bool:
        """Wait for the peers. Return whether this rank has not failed."""
        with self.watched:
            return not wait_cpu(self.awaited, self.credit, turn.fingerprint, turn.limit)

    def end_cpu(self, turn: Turn) -> None:
        """End what `begin_cpu` began."""
        out = None if self.dtype is None else turn.out
        end_use_cpu(self.awaited, self.signalled, turn.fingerprint, turn.send, out)


def waiting_programs(processors: int) -> int:
    """The most programs of a launch that waits: one for each SM, but for an eighth of the SMs.

    So a program of another stream, which the awaited signal may depend on, finds an SM.
    """
    return max(processors - max(processors // 8, 1), 1)


def use_constants(
    peers: int,
    writes: bool,
    pulls: bool = False,
    poison: bool = False,
    size: int = 8,
    num_warps: int = 4,
    timed: bool = TIMED,
    ptx: bool = PTX,
) -> dict[str, Any]:
    """The constants of a kernel that waits and signals; `size`: bytes of a word of the output to overwrite."""
    threads = 2 if interpreted(give_way) else (32 if ptx else 64) * num_warps
    return {
        "PEERS": peers,
        "CREDIT": HALVES if writes else 0,
        "TIMED": timed,
        "PTX": ptx,
        "WIDTH": max(threads, 1 << (peers - 1).bit_length()),
        "POISON": poison,
        "POISON_WORD": WORDS[size],
        "WRITES": writes,
        "PULLS": pulls,
    }


# The functions below rely on x86-64's store order.


def wait_cpu(awaited: Channel, credit: int, fingerprint: int, limit: int) -> bool:
    """`fused_signals.wait_for_peers` for CPU memory shared by processes."""
    pad, (_, counts, _, codes), _ = awaited.words
    failure = awaited.failure
    failed = int(failure.error[0]) != 0
    for peer in range(awaited.peers):
        if not failed:
            slot, goal, start = SLOT * peer, counts[peer] + 1 - credit, time.monotonic_ns()
            seen = pad[slot]
            while 0 <= seen < goal and (now := time.monotonic_ns()) < start + limit:
                os.sched_yield() if now < start + _EAGER else time.sleep(_NAP)
                seen = pad[slot]
            kind = 0
            if seen < 0:
                kind = FAILED
            elif seen < goal:
                kind = LATE
            elif credit == 0 and pad[slot + 1 + (goal & 1)] != mixed(fingerprint, goal):
                kind = DISAGREES
            if kind:
                failed = True
                failure.error[0] = failure.host_error[0] = codes[peer] + (kind << 60)
    return failed


def end_use_cpu(awaited: Channel, signalled: Channel, fingerprint: int, send: bool, out: torch.Tensor | None) -> None:
    """`fused_signals.end_use` for CPU memory shared by processes."""
    failed = int(awaited.failure.error[0]) != 0
    if failed and out is not None:
        overwrite_cpu(out)
    if send:
        counts = awaited.words[1][1]
        sent, slots = signalled.words[1][0], signalled.words[2]
        for peer in range(signalled.peers):
            counts[peer] += 1
            count = sent[peer] = sent[peer] + 1
            slots[peer][1 + (count & 1)] = mixed(fingerprint, count)
            slots[peer][0] = -1 if failed else count
