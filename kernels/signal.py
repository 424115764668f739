"""signal: the barrier between ranks, in parts. Kernels that do more wait and signal by `fused_signals`.

A signal is sent to, or awaited from, all peers of a `Channel`. Patterns of use, on two channels `arrived` and
`released` that all ranks of a group have for one window:

    signal(arrived, send=True, wait=True)     a barrier: peers' writes before their signal are visible to later kernels
    signal(released, send=True)               this rank no longer uses what peers wrote here, nor what it read of theirs
    signal(released, wait=True, credit=1)     wait until every peer has released the last use; the first does not wait
    signal(…, send=True, wait=True, credit=UNLIMITED)     skip this use without waiting

Every rank of a group issues the same sequence on a channel. Kernels before and after a signal are ordered by the
stream. Data pushed without a credit may be read torn: a rank whose wait times out signals its failure to its peers
before its next kernel runs, and a rank that signals after reading sees it, so such a read ends in an error and not in
wrong data.

Waits are bounded by the device's global timer, or by a number of polls where Triton has none (AMD). The first wait that
fails stores its code, which names rank, peer and channel, in a word on the device and in one on the host. From then on
this rank's signals do not wait, tell every peer that it failed, and overwrite the output they are given. Nothing resets
this state.
"""

from __future__ import annotations

import functools
import math
import os
import time
from typing import Any

import torch
import triton
import triton.language as tl

from .channel import DISAGREES, FAILED, LATE, SLOT, UNLIMITED, Channel
from .current_device import on_device
from .dtypes import WORDS, poison_word
from .fused_signals import ABOVE, COUNTED, FAILED_COUNT, give_way, overwrite
from .launch import interpreted, prepared
from .store_word import PTX, store_word

_LATE, _PEER_FAILED, _DISAGREES = (tl.constexpr(kind << 60) for kind in (LATE, FAILED, DISAGREES))
_UNLIMITED = tl.constexpr(UNLIMITED)
_EAGER, _NAP = 100_000, 1e-4  # of signal_cpu: nanoseconds of polling before naps; seconds of a nap
_SHORTEST_POLL = 1.5e-7
"""Seconds; a lower bound for any GPU: a load that bypasses the first cache, broadcast to all lanes by shared memory."""
TIMED = torch.version.hip is None
"""Whether waits are bounded by time."""


@triton.jit
def nanoseconds():
    """The device's global timer."""
    return tl.extra.cuda.globaltimer()


if interpreted(nanoseconds):
    nanoseconds = time.monotonic_ns


# Peers are served in ascending order of rank, and a program signals before it waits. So programs that run one after
# another, as in the interpreter or on a small device, do not deadlock: both ranks of the lowest unfinished pair are
# serving it.
@triton.jit(do_not_specialize=["host_error", "fingerprint", "limit", "out", "words", "poison"])
def signal_kernel(
    table,  # int64 [4, peers]: counts sent, counts awaited, addresses of this rank's words in each peer's pad, codes
    pad,  # int64 [peers, SLOT]
    error,  # int64 [1]
    host_error: tl.int64,  # address of an int64 in host memory
    fingerprint: tl.int64,
    limit: tl.int64,  # of a wait: nanoseconds if TIMED, else polls
    out: tl.int64,  # address
    words: tl.int64,  # in out
    poison: tl.int64,  # 8 bytes
    SEND: tl.constexpr,
    WAIT: tl.constexpr,
    CREDIT: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    POISON: tl.constexpr,
    WORD: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
):
    """Program j serves peer j."""
    peer, peers = tl.program_id(0), tl.num_programs(0)
    there = tl.load(table + 2 * peers + peer).to(tl.pointer_type(tl.int64))
    slot = pad + peer * SLOT_WORDS
    # Without this barrier the release below does not order other warps' stores.
    tl.debug_barrier()
    failed = tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0
    if not failed:
        none = tl.full((), 0, tl.int64)
        kind = none
        seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
        if SEND:
            count = tl.atomic_add(table + peer, 1, sem="relaxed", scope="gpu") + 1
            if CREDIT < _UNLIMITED:
                # A skipped use leaves the fingerprint in place, which a peer may not have read yet.
                mixed = fingerprint.to(tl.int64) ^ ((count & COUNTED) << ABOVE)
                store_word(there + 1 + (count & 1), mixed, RELEASE=False, PTX=PTX)
            store_word(there, count, RELEASE=True, PTX=PTX)
        if WAIT:
            goal = tl.atomic_add(table + peers + peer, 1, sem="relaxed", scope="gpu") + 1 - CREDIT
            left = limit.to(tl.int64)
            if TIMED:
                # One warp, whose lanes read the timer at once, so that all of them leave the loop together.
                end = nanoseconds() + left
            while (seen < goal) & (seen >= 0) & (left > 0):
                give_way()
                seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
                if TIMED:
                    left = end - nanoseconds()
                else:
                    left -= 1
            if seen < goal:
                kind = tl.full((), _LATE, tl.int64)
            elif CREDIT == 0:
                theirs = tl.atomic_add(slot + 1 + (goal & 1), 0, sem="relaxed", scope="sys")
                if theirs != fingerprint.to(tl.int64) ^ ((goal & COUNTED) << ABOVE):
                    kind = tl.full((), _DISAGREES, tl.int64)
        if seen < 0:
            kind = tl.full((), _PEER_FAILED, tl.int64)
        if kind != 0:
            failed = True
            code = tl.load(table + 3 * peers + peer) + kind
            if tl.atomic_cas(error, none, code, sem="relaxed", scope="gpu") == 0:
                store_word(host_error.to(tl.int64).to(tl.pointer_type(tl.int64)), code, RELEASE=False, PTX=PTX)
    if failed:
        store_word(there, tl.full((), FAILED_COUNT, tl.int64), RELEASE=False, PTX=PTX)
        if POISON:
            overwrite(out, words, poison, WORD)


class PreparedSignal:
    """One use of a channel, compiled and loaded; a call supplies the arguments that change.

    Bypasses Triton's binder, as launches of boxes do.

    Attributes:
        word: bytes of a word of the output to overwrite.
    """

    def __init__(self, channel: Channel, send: bool, wait: bool, credit: int, dtype: torch.dtype | None) -> None:
        filler, self.word = (0, 8) if dtype is None else poison_word(dtype)
        constants = signal_constants(send, wait, credit, dtype is not None, self.word)
        failure = channel.failure
        self._before = channel.table, channel.pad, failure.error, failure.host_error.data_ptr()
        self._after = (filler, *(constants[name] for name in signal_kernel.arg_names if name in constants))
        arguments = (*self._before, 0, 0, 0, 0, *self._after)
        grid = (channel.peers, 1, 1)
        self._start = prepared(signal_kernel, grid, channel.pad.device, arguments, constants["num_warps"])

    def __call__(self, fingerprint: int, limit: int, out: int, words: int) -> None:
        """Launch; `out`: an address; `words`: the number of words to overwrite there."""
        self._start(*self._before, fingerprint, limit, out, words, *self._after)


def signal(
    channel: Channel,
    *,
    send: bool = False,
    wait: bool = False,
    credit: int = 0,
    fingerprint: int = 0,
    limit: int = 1 << 62,
    poison: torch.Tensor | None = None,
) -> None:
    """Signal every peer of a channel, then wait for as many signals of each peer as were awaited so far, less `credit`.

    Args:
        send: signal the peers.
        wait: wait for the peers.
        fingerprint: 63 bits that ranks compare at a barrier; ignored with a credit.
        limit: of the wait for each peer, from `wait_limit`; a peer that has not signalled by then is late.
        poison: a contiguous tensor to overwrite if this rank has failed: with NaN, or with the dtype's largest value
            where it has no NaN.
    """
    if not channel.peers:
        return
    if channel.cpu_path:
        signal_cpu(channel, send, wait, credit, fingerprint, limit, poison)
        return
    dtype = None if poison is None else poison.dtype
    launch = channel.launches.get((send, wait, credit, dtype)) or _prepare(channel, send, wait, credit, dtype)
    out, words = 0, 0
    if poison is not None:
        out, words = poison.data_ptr(), poison.numel() * poison.itemsize // launch.word
    with on_device(channel.pad.device):
        launch(fingerprint, limit, out, words)


def build_signal(channel: Channel, *, send: bool = False, wait: bool = False, credit: int = 0,
                 poison: torch.dtype | None = None) -> None:  # fmt: skip
    """Compile and load the launch of `signal` with these arguments and an output of dtype `poison`, ahead of a CUDA
    graph capture, which cannot."""
    if channel.peers and not channel.cpu_path:
        _prepare(channel, send, wait, credit, poison)


def _prepare(channel: Channel, send: bool, wait: bool, credit: int, dtype: torch.dtype | None) -> PreparedSignal:
    """Return the launch of one use of a channel, prepared once; `dtype` of the output to overwrite, None: none."""
    key = send, wait, credit, dtype
    launch = channel.launches.get(key)
    if launch is None:
        launch = channel.launches[key] = PreparedSignal(channel, *key)
    return launch


@functools.lru_cache
def signal_constants(
    send: bool,
    wait: bool,
    credit: int = 0,
    poison: bool = False,
    size: int = 8,
    timed: bool = TIMED,
    ptx: bool = PTX,
) -> dict[str, Any]:
    """The constants of signal_kernel, and num_warps; `size`: bytes of a word of the output to overwrite."""
    return {
        "SEND": send,
        "WAIT": wait,
        "CREDIT": credit,
        "TIMED": timed and wait,
        "PTX": ptx,
        "POISON": poison,
        "WORD": WORDS[size],
        "SLOT_WORDS": SLOT,
        "num_warps": 1,
    }


def signal_cpu(
    channel: Channel, send: bool, wait: bool, credit: int, fingerprint: int, limit: int, poison: torch.Tensor | None
) -> None:
    """signal for CPU memory shared by processes; relies on x86-64's store order."""
    pad, (sent, awaited, _, codes), theirs = channel.words
    failure = channel.failure
    failed = int(failure.error[0]) != 0
    for peer in range(channel.peers):
        if send and not failed:
            count = sent[peer] = sent[peer] + 1
            if credit < UNLIMITED:
                theirs[peer][1 + (count & 1)] = mixed(fingerprint, count)
            theirs[peer][0] = count
    for peer in range(channel.peers):
        slot = SLOT * peer
        if not failed:
            kind, seen = 0, pad[slot]
            if wait:
                awaited[peer] += 1
                goal, start = awaited[peer] - credit, time.monotonic_ns()
                while 0 <= seen < goal and (now := time.monotonic_ns()) < start + limit:
                    os.sched_yield() if now < start + _EAGER else time.sleep(_NAP)
                    seen = pad[slot]
                if seen < goal:
                    kind = LATE
                elif credit == 0 and pad[slot + 1 + (goal & 1)] != mixed(fingerprint, goal):
                    kind = DISAGREES
            if seen < 0:
                kind = FAILED
            if kind:
                failed = True
                failure.error[0] = failure.host_error[0] = codes[peer] + (kind << 60)
    if failed:
        for slots in theirs:
            slots[0] = -1
        if poison is not None:
            overwrite_cpu(poison)


def overwrite_cpu(out: torch.Tensor) -> None:
    """Overwrite a contiguous tensor as `signal` does."""
    filler, size = poison_word(out.dtype)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    out.view(-1).view(integers).copy_(torch.tensor(filler, device="cpu").to(integers))


def mixed(fingerprint: int, count: int) -> int:
    """The fingerprint with the count mixed in, so that it differs from the previous one in its place."""
    return fingerprint ^ (count & COUNTED.value) << ABOVE.value


def wait_limit(seconds: float, device: torch.device) -> int:
    """Return the `limit` of `signal` for a wait of `seconds`: nanoseconds, or polls where the device has no timer.

    Polls are counted as if each was the shortest possible, so such a wait may take several times as long. A measurement
    would not help: polls take longer where processes share the device or its clock is low.
    """
    return math.ceil(seconds * 1e9 if TIMED or device.type == "cpu" else seconds / _SHORTEST_POLL)
