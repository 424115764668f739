"""signal: the barrier between ranks, in parts. The only kernel that waits.

A *channel* connects a rank with some peers. For each peer it holds, on this device, the number of signals sent and the
number awaited, and in this rank's pad a word that only this peer writes. The counts are on the device, so that a
replayed CUDA graph continues where the last replay ended. Patterns of use, on two channels `arrived` and `released`
that all ranks of a group have for one window:

    signal(arrived, send=True, wait=True)     a barrier: peers' writes before their signal are visible to later kernels
    signal(released, send=True)               this rank no longer uses what peers wrote here, nor what it read of theirs
    signal(released, wait=True, credit=1)     wait until every peer has released the last use; the first does not wait
    signal(…, send=True, wait=True, credit=UNLIMITED)     skip this use without waiting

Every rank of a group issues the same sequence on a channel. Kernels before and after a signal are ordered by the
stream. Data pushed without a credit may be read torn: a rank that runs out of polls signals its failure to its peers
before its next kernel runs, and a rank that signals after reading sees it, so such a read ends in an error and not in
wrong data.

Waits are bounded by a number of polls. The first wait that fails stores its code, which names rank, peer and channel,
in a word on the device and in one on the host. From then on this rank's signals do not wait, tell every peer that it
failed, and overwrite the output they are given. Nothing resets this state.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .pointers import WORDS, interpreted, on_device, pattern, pattern_word, prepared
from .reduce_views import real_dtype

SLOT = 4
"""Words of a pad per peer: its count, its fingerprints of even and of odd counts, one unused."""
KINDS = {1: "late", 2: "failed", 3: "disagrees"}
"""Kinds of failure: the peer did not signal in time, signalled that it failed, or sent another fingerprint."""
UNLIMITED = 1 << 40
"""A credit with which a signal does not wait; peers' signals count as awaited whenever they arrive."""
_FIELD, _MOST = 20, (1 << 20) - 1
_FAILED = tl.constexpr(-1)  # in place of a count
_LATE, _PEER_FAILED, _DISAGREES = (tl.constexpr(kind << 60) for kind in KINDS)
_BLOCK = tl.constexpr(1024)
_UNLIMITED = tl.constexpr(UNLIMITED)
_COUNTED, _ABOVE = tl.constexpr(0x7FFF), tl.constexpr(48)  # bits of a count, and their position in a fingerprint
_EAGER_POLLS, _NAP = 100, 1e-4  # of signal_cpu; a nap counts as a poll
SHORTEST_POLL = 1.5e-7
"""Seconds; a lower bound for any GPU: a load that bypasses the first cache, broadcast to all lanes by shared memory."""


@triton.jit
def give_way():
    """Yield between two polls; nothing to do on a device, where the peer runs on a device of its own."""
    pass


def _nap() -> None:
    time.sleep(_NAP)


if interpreted(give_way):
    give_way = _nap  # a peer may need this core


# Peers are served in ascending order of rank, and a program signals before it waits. So programs that run one after
# another, as in the interpreter or on a small device, do not deadlock: both ranks of the lowest unfinished pair are
# serving it.
@triton.jit(do_not_specialize=["host_error", "fingerprint", "polls", "out", "words", "poison"])
def signal_kernel(
    table,  # int64 [4, peers]: counts sent, counts awaited, addresses of this rank's words in each peer's pad, codes
    pad,  # int64 [peers, SLOT]
    error,  # int64 [1]
    host_error: tl.int64,  # address of an int64 in host memory
    fingerprint: tl.int64,
    polls: tl.int64,
    out: tl.int64,  # address
    words: tl.int64,  # in out
    poison: tl.int64,  # 8 bytes
    SEND: tl.constexpr,
    WAIT: tl.constexpr,
    CREDIT: tl.constexpr,
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
                mixed = fingerprint.to(tl.int64) ^ ((count & _COUNTED) << _ABOVE)
                tl.atomic_xchg(there + 1 + (count & 1), mixed, sem="relaxed", scope="sys")
            tl.atomic_xchg(there, count, sem="release", scope="sys")
        if WAIT:
            goal = tl.atomic_add(table + peers + peer, 1, sem="relaxed", scope="gpu") + 1 - CREDIT
            left = polls.to(tl.int64)
            while (seen < goal) & (seen >= 0) & (left > 0):
                give_way()
                seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
                left -= 1
            if seen < goal:
                kind = tl.full((), _LATE, tl.int64)
            elif CREDIT == 0:
                theirs = tl.atomic_add(slot + 1 + (goal & 1), 0, sem="relaxed", scope="sys")
                if theirs != fingerprint.to(tl.int64) ^ ((goal & _COUNTED) << _ABOVE):
                    kind = tl.full((), _DISAGREES, tl.int64)
        if seen < 0:
            kind = tl.full((), _PEER_FAILED, tl.int64)
        if kind != 0:
            failed = True
            code = tl.load(table + 3 * peers + peer) + kind
            if tl.atomic_cas(error, none, code, sem="relaxed", scope="gpu") == 0:
                tl.atomic_xchg(host_error.to(tl.int64).to(tl.pointer_type(tl.int64)), code, sem="relaxed", scope="sys")
    if failed:
        tl.atomic_xchg(there, _FAILED, sem="relaxed", scope="sys")
        if POISON:
            target = out.to(tl.int64).to(tl.pointer_type(WORD))
            filler = tl.full((_BLOCK,), 0, tl.int64) + poison
            for start in range(0, words, _BLOCK):
                at = start + tl.arange(0, _BLOCK)
                tl.store(target + at, filler.to(WORD), mask=at < words)


@dataclass(frozen=True)
class Code:
    """The first failed wait of a rank; `kind` is one of the values of `KINDS`."""

    kind: str
    rank: int
    peer: int
    channel: int

    @classmethod
    def unpack(cls, code: int) -> Code:
        """The inverse of `pack`, with the kind."""
        channel, rank, peer = (code >> shift & _MOST for shift in (2 * _FIELD, _FIELD, 0))
        return cls(KINDS[code >> 60], rank, peer, channel)


def pack(rank: int, peer: int, channel: int) -> int:
    """Encode rank, peer and channel as a code without a kind.

    Raises:
        ArgumentError: a number is negative or exceeds 20 bits.
    """
    for name, number in (("rank", rank), ("peer", peer), ("channel", channel)):
        if not 0 <= number <= _MOST:
            raise ArgumentError(f"{name}: {number}; allowed: 0..{_MOST}")
    return channel << 2 * _FIELD | rank << _FIELD | peer


class Failure:
    """The first failed wait on any channel of a rank: a word on the device for kernels, and one in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.error = torch.zeros(1, dtype=torch.int64, device=device)
        self.host_error = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self._seen = ctypes.c_int64.from_address(self.host_error.data_ptr())

    def read(self) -> Code | None:
        """Return the failure reported so far, if any; does not wait."""
        return Code.unpack(self._seen.value) if self._seen.value else None

    def fail(self) -> None:
        """Mark this rank as failed from here on in the stream."""
        self.error.fill_(1)


class Channel:
    """A connection between a rank and its peers.

    Args:
        pad: int64 [peers, SLOT], zeros; peer j writes row j.
        slots: addresses of the rows that this rank writes, one in each peer's pad.
        codes: `pack` of rank, peer and channel, one per peer. Peers are in ascending order on all ranks.
        failure: the rank's, shared by its channels.

    Raises:
        ArgumentError: the pad's shape or dtype does not match, or codes are not ascending.
    """

    def __init__(self, pad: torch.Tensor, slots: Sequence[int], codes: Sequence[int], failure: Failure) -> None:
        if pad.dtype is not torch.int64 or pad.shape != (len(slots), SLOT) or not pad.is_contiguous():
            raise ArgumentError(
                f"pad: {pad.dtype} of shape {tuple(pad.shape)}; allowed: contiguous int64 of shape {(len(slots), SLOT)}"
            )
        if list(codes) != sorted(set(codes)) or len(codes) != len(slots):
            raise ArgumentError(f"codes: {list(codes)}; allowed: one for each of {len(slots)} peers, ascending")
        self.peers, self.pad, self.failure = len(slots), pad, failure
        signed = [ctypes.c_int64(slot).value for slot in slots]
        nothing = [0] * self.peers
        self.table = torch.tensor([nothing, nothing, signed, list(codes)], dtype=torch.int64, device="cpu").to(
            pad.device
        )
        self.cpu_path = (pad.device.type == "cpu") != interpreted(signal_kernel)
        self.launches: dict[tuple[bool, bool, int, torch.dtype | None], PreparedSignal] = {}

    def launch(self, send: bool, wait: bool, credit: int, dtype: torch.dtype | None) -> PreparedSignal:
        """Return the prepared launch of one use, built once; `dtype` of the output to overwrite, None: none."""
        key = send, wait, credit, dtype
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = PreparedSignal(self, *key)
        return found

    @cached_property
    def words(self) -> tuple[ctypes.Array[ctypes.c_int64], list[list[int]], list[ctypes.Array[ctypes.c_int64]]]:
        """CPU memory as ctypes arrays: the own pad, the table, this rank's words in each peer's pad."""
        pad = (ctypes.c_int64 * (SLOT * self.peers)).from_address(self.pad.data_ptr())
        table = self.table.tolist()
        return pad, table, [(ctypes.c_int64 * SLOT).from_address(slot & (1 << 64) - 1) for slot in table[2]]

    def late(self, credit: int) -> list[int]:
        """Return the peers that have not signalled as often as awaited, while a wait with `credit` is in progress.

        Reads CPU memory; called from another thread.
        """
        pad, table = (self.words[0], self.words[1][1]) if self.cpu_path else (self.pad.view(-1), self.table[1])
        return [peer for peer in range(self.peers) if int(pad[SLOT * peer]) < int(table[peer]) - credit]


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

    def __call__(self, fingerprint: int, polls: int, out: int, words: int) -> None:
        """Launch; `out`: an address; `words`: the number of words to overwrite there."""
        self._start(*self._before, fingerprint, polls, out, words, *self._after)


def signal(
    channel: Channel,
    *,
    send: bool = False,
    wait: bool = False,
    credit: int = 0,
    fingerprint: int = 0,
    polls: int = 1 << 62,
    poison: torch.Tensor | None = None,
) -> None:
    """Signal every peer of a channel, then wait for as many signals of each peer as were awaited so far, less `credit`.

    Args:
        send: signal the peers.
        wait: wait for the peers.
        fingerprint: 63 bits that ranks compare at a barrier; ignored with a credit.
        polls: polls of each peer's word, after which the peer is late.
        poison: a contiguous tensor to overwrite if this rank has failed: with NaN, or with the dtype's largest value
            where it has no NaN.
    """
    if channel.cpu_path:
        signal_cpu(channel, send, wait, credit, fingerprint, polls, poison)
        return
    dtype = None if poison is None else poison.dtype
    launch = channel.launches.get((send, wait, credit, dtype)) or channel.launch(send, wait, credit, dtype)
    out, words = 0, 0
    if poison is not None:
        out, words = poison.data_ptr(), poison.numel() * poison.itemsize // launch.word
    with on_device(channel.pad.device):
        launch(fingerprint, polls, out, words)


def build_signal(channel: Channel, *, send: bool = False, wait: bool = False, credit: int = 0,
                 poison: torch.dtype | None = None) -> None:  # fmt: skip
    """Compile and load the launch of `signal` with these arguments and an output of dtype `poison`, ahead of a CUDA
    graph capture, which cannot."""
    if not channel.cpu_path:
        channel.launch(send, wait, credit, poison)


@functools.lru_cache
def signal_constants(send: bool, wait: bool, credit: int = 0, poison: bool = False, size: int = 8) -> dict[str, Any]:
    """The constants of signal_kernel, and num_warps; `size`: bytes of a word of the output to overwrite."""
    return {
        "SEND": send,
        "WAIT": wait,
        "CREDIT": credit,
        "POISON": poison,
        "WORD": WORDS[size],
        "SLOT_WORDS": SLOT,
        "num_warps": 1,
    }


def signal_cpu(
    channel: Channel, send: bool, wait: bool, credit: int, fingerprint: int, polls: int, poison: torch.Tensor | None
) -> None:
    """signal for CPU memory shared by processes; relies on x86-64's store order."""
    pad, (sent, awaited, _, codes), theirs = channel.words
    failure = channel.failure
    failed = int(failure.error[0]) != 0
    for peer in range(channel.peers):
        if send and not failed:
            count = sent[peer] = sent[peer] + 1
            if credit < UNLIMITED:
                theirs[peer][1 + (count & 1)] = _mixed(fingerprint, count)
            theirs[peer][0] = count
    for peer in range(channel.peers):
        slot = SLOT * peer
        if not failed:
            kind, seen = 0, pad[slot]
            if wait:
                awaited[peer] += 1
                goal, left = awaited[peer] - credit, polls
                while 0 <= seen < goal and left > 0:
                    os.sched_yield() if polls - left < _EAGER_POLLS else time.sleep(_NAP)
                    seen, left = pad[slot], left - 1
                if seen < goal:
                    kind = 1
                elif credit == 0 and pad[slot + 1 + (goal & 1)] != _mixed(fingerprint, goal):
                    kind = 3
            if seen < 0:
                kind = 2
            if kind:
                failed = True
                failure.error[0] = failure.host_error[0] = codes[peer] + (kind << 60)
    if failed:
        for slots in theirs:
            slots[0] = -1
        if poison is not None:
            filler, size = poison_word(poison.dtype)
            integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            poison.view(-1).view(integers).copy_(torch.tensor(filler, device="cpu").to(integers))


def _mixed(fingerprint: int, count: int) -> int:
    """The fingerprint with the count mixed in, so that it differs from the previous one in its place."""
    return fingerprint ^ (count & _COUNTED.value) << _ABOVE.value


@functools.lru_cache
def poison_word(dtype: torch.dtype) -> tuple[int, int]:
    """The fill value for outputs of failed ranks: 8 bytes as an integer, and the size of a word."""
    part = real_dtype(dtype)
    if part is torch.bool:
        value: float | int | bool = True
    else:
        value = float("nan") if part.is_floating_point else torch.iinfo(part).max
    word = pattern_word(pattern(value, part), part.itemsize)
    assert word is not None
    return word, part.itemsize


def polls_within(seconds: float, device: torch.device) -> int:
    """Return a number of polls that takes at least `seconds`.

    Assumes the shortest possible poll. A measurement would give an upper bound only: polls take longer where processes
    share the device or its clock is low.
    """
    if device.type == "cpu":
        return _EAGER_POLLS + math.ceil(seconds / _NAP)
    return math.ceil(seconds / SHORTEST_POLL)
