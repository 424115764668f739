"""signal: the barrier between ranks, in parts. The only kernel that waits.

A *channel* joins a rank with some peers. For each peer it has, on this device, a count of what was sent and a count of
what was awaited, and in this rank's pad a word that this peer alone writes. Counts live on the device, so a captured
graph that is replayed goes on where the last replay ended. Patterns of use, on two channels `arrived` and `released`
that all ranks of a group have for one window:

    signal(arrived, send=True, wait=True)     a barrier: what peers wrote before theirs is visible to later kernels here
    signal(released, send=True)               "what you wrote for me, and what I read of yours, I am done with"
    signal(released, wait=True, credit=1)     "every peer is done with the last use": free at once the first time
    signal(…, send=True, wait=True, credit=UNLIMITED)     "this use is not made here": nothing is waited for

Every rank of a group issues the same sequence on a channel. Kernels before and after a signal are ordered by the
stream. Data that was pushed without a credit may be read torn: who runs out of polls says so to its peers before its
next kernel runs, and a rank that signals after reading sees it, so such a read ends in an error and not in wrong data.

Waits are bounded by a count of polls. The first that fails leaves its code, which names rank, peer and channel, in a
word of the device and in one of the host; from then on this rank's signals do not wait, tell every peer that it failed,
and overwrite the output they are given. Nothing resets this.
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
from .reduction import real_dtype

SLOT = 4
"""Words of a pad that belong to one peer: its count, its tokens of even and of odd counts, one unused."""
KINDS = {1: "late", 2: "failed", 3: "disagrees"}
"""What a code says of the peer: it did not come in time, said that it had failed, or sent another token."""
UNLIMITED = 1 << 40
"""Credit with which nothing is waited for: what peers tell is counted as awaited, whenever it comes."""
_FIELD, _MOST = 20, (1 << 20) - 1
_FAILED = tl.constexpr(-1)  # in place of a count
_LATE, _PEER_FAILED, _DISAGREES = (tl.constexpr(kind << 60) for kind in KINDS)
_BLOCK = tl.constexpr(1024)
_UNLIMITED = tl.constexpr(UNLIMITED)
_COUNTED, _ABOVE = tl.constexpr(0x7FFF), tl.constexpr(48)  # bits of a count, and where they go in a token
_EAGER_POLLS, _NAP = 100, 1e-4  # of the reference; a nap is a poll
SHORTEST_POLL = 1.5e-7
"""Seconds; less is not expected of any GPU: a load that passes the first cache by, and its way through shared memory to
all lanes."""


@triton.jit
def give_way():
    """Between two polls: nothing on a device, where only the peer's own device can make it come."""
    pass


def _nap() -> None:
    time.sleep(_NAP)


if interpreted(give_way):
    give_way = _nap  # a peer may be waiting for this very core


# Peers are served in ascending order of rank and a program signals before it waits, so that programs that run one after
# another, as in the interpreter or on a device with little room, never wait for each other: of all unfinished pairs of
# ranks the lowest has both of its ranks at it.
@triton.jit(do_not_specialize=["told", "fingerprint", "polls", "out", "words", "poison"])
def signal_kernel(
    table,  # int64 [4, peers]: counts sent, counts awaited, addresses of this rank's slots, codes
    pad,  # int64 [peers, SLOT]
    error,  # int64 [1]
    told: tl.int64,  # address of an int64 of the host
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
    # Without it the release below orders no other warp's stores.
    tl.debug_barrier()
    failed = tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0
    if not failed:
        none = tl.full((), 0, tl.int64)
        kind = none
        seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
        if SEND:
            count = tl.atomic_add(table + peer, 1, sem="relaxed", scope="gpu") + 1
            if CREDIT < _UNLIMITED:
                # Of this count alone: a use that is not made leaves what is there, which a peer may not have read yet.
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
                tl.atomic_xchg(told.to(tl.int64).to(tl.pointer_type(tl.int64)), code, sem="relaxed", scope="sys")
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
    """What a rank knows of the first wait that failed; `kind` is one of `KINDS`' values."""

    kind: str
    rank: int
    peer: int
    channel: int

    @classmethod
    def unpack(cls, code: int) -> Code:
        channel, rank, peer = (code >> shift & _MOST for shift in (2 * _FIELD, _FIELD, 0))
        return cls(KINDS[code >> 60], rank, peer, channel)


def pack(rank: int, peer: int, channel: int) -> int:
    """A code without its kind.

    Raises:
        ArgumentError: one of them is below 0 or takes more than 20 bits.
    """
    for name, number in (("rank", rank), ("peer", peer), ("channel", channel)):
        if not 0 <= number <= _MOST:
            raise ArgumentError(f"{name}: {number}; allowed: 0..{_MOST}")
    return channel << 2 * _FIELD | rank << _FIELD | peer


class Failure:
    """The first failed wait of all channels of a rank: a word of the device that kernels read, and one of the host."""

    def __init__(self, device: torch.device) -> None:
        self.error = torch.zeros(1, dtype=torch.int64, device=device)
        self.told = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self._seen = ctypes.c_int64.from_address(self.told.data_ptr())

    def read(self) -> Code | None:
        """What the device has told the host so far; nothing is waited for."""
        return Code.unpack(self._seen.value) if self._seen.value else None

    def fail(self) -> None:
        """From here on in the stream this rank's signals say that it failed."""
        self.error.fill_(1)


class Channel:
    """What joins a rank with its peers.

    Args:
        pad: int64 [peers, SLOT], zeros; peer j writes row j.
        slots: addresses of the rows that this rank writes, one in each peer's pad.
        codes: `pack` of rank, peer and channel, one per peer. Peers are in ascending order on all ranks.
        failure: of the rank; channels share it.

    Raises:
        ArgumentError: the pad does not fit.
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
        self.by_reference = (pad.device.type == "cpu") != interpreted(signal_kernel)
        self.launches: dict[tuple[bool, bool, int, torch.dtype | None], PreparedSignal] = {}

    def launch(self, send: bool, wait: bool, credit: int, dtype: torch.dtype | None) -> PreparedSignal:
        """What `signal` launches in one use; `dtype` of what is overwritten, None where nothing is. Built once."""
        key = send, wait, credit, dtype
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = PreparedSignal(self, *key)
        return found

    @cached_property
    def words(self) -> tuple[ctypes.Array[ctypes.c_int64], list[list[int]], list[ctypes.Array[ctypes.c_int64]]]:
        """Of CPU memory, as Python reads it: the own pad, the table, this rank's slot in each peer's pad."""
        pad = (ctypes.c_int64 * (SLOT * self.peers)).from_address(self.pad.data_ptr())
        table = self.table.tolist()
        return pad, table, [(ctypes.c_int64 * SLOT).from_address(slot & (1 << 64) - 1) for slot in table[2]]

    def late(self, credit: int) -> list[int]:
        """Which peers have not told this rank as often as it awaits them, while a wait with so much credit goes on: the
        one that is awaited now, or none. Of CPU memory, from another thread."""
        pad, table = (self.words[0], self.words[1][1]) if self.by_reference else (self.pad.view(-1), self.table[1])
        return [peer for peer in range(self.peers) if int(pad[SLOT * peer]) < int(table[peer]) - credit]


class PreparedSignal:
    """One use of a channel, compiled and loaded: a call launches it with what changes from call to call.

    As launches of boxes it does not go through Triton's binder.

    Attributes:
        word: bytes of a word of what is overwritten.
    """

    def __init__(self, channel: Channel, send: bool, wait: bool, credit: int, dtype: torch.dtype | None) -> None:
        filler, self.word = (0, 8) if dtype is None else poison_word(dtype)
        constants = signal_constants(send, wait, credit, dtype is not None, self.word)
        failure = channel.failure
        self._before = channel.table, channel.pad, failure.error, failure.told.data_ptr()
        self._after = (filler, *(constants[name] for name in signal_kernel.arg_names if name in constants))
        arguments = (*self._before, 0, 0, 0, 0, *self._after)
        grid = (channel.peers, 1, 1)
        self._start = prepared(signal_kernel, grid, channel.pad.device, arguments, constants["num_warps"])

    def __call__(self, fingerprint: int, polls: int, out: int, words: int) -> None:
        """`out`: an address; `words`: how many there are."""
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
    """Tell every peer of a channel one more time, and then wait until each has told this rank as often as it was
    awaited, less `credit`.

    Args:
        fingerprint: 63 bits that ranks compare at a barrier; not where there is credit.
        polls: of each peer's word, after which the peer is late.
        poison: a contiguous tensor that is overwritten if this rank has failed: by NaN, or the largest value of dtypes
            that have none.
    """
    if channel.by_reference:
        signal_reference(channel, send, wait, credit, fingerprint, polls, poison)
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
    """Compile and load what `signal` launches with these arguments and an output of this dtype, which a captured graph
    could not do."""
    if not channel.by_reference:
        channel.launch(send, wait, credit, poison)


@functools.lru_cache
def signal_constants(send: bool, wait: bool, credit: int = 0, poison: bool = False, size: int = 8) -> dict[str, Any]:
    """What signal_kernel is compiled with, and num_warps; `size`: bytes of a word of what is overwritten."""
    return {
        "SEND": send,
        "WAIT": wait,
        "CREDIT": credit,
        "POISON": poison,
        "WORD": WORDS[size],
        "SLOT_WORDS": SLOT,
        "num_warps": 1,
    }


def signal_reference(
    channel: Channel, send: bool, wait: bool, credit: int, fingerprint: int, polls: int, poison: torch.Tensor | None
) -> None:
    """The same for CPU memory that processes share; x86-64 keeps their stores in order."""
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
                failure.error[0] = failure.told[0] = codes[peer] + (kind << 60)
    if failed:
        for slots in theirs:
            slots[0] = -1
        if poison is not None:
            filler, size = poison_word(poison.dtype)
            integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            poison.view(-1).view(integers).copy_(torch.tensor(filler, device="cpu").to(integers))


def _mixed(fingerprint: int, count: int) -> int:
    """What is written in place of a token, so that it differs from the one that stood there before."""
    return fingerprint ^ (count & _COUNTED.value) << _ABOVE.value


@functools.lru_cache
def poison_word(dtype: torch.dtype) -> tuple[int, int]:
    """What outputs are overwritten with: 8 bytes of it as an integer, and the size of a word."""
    part = real_dtype(dtype)
    if part is torch.bool:
        value: float | int | bool = True
    else:
        value = float("nan") if part.is_floating_point else torch.iinfo(part).max
    word = pattern_word(pattern(value, part), part.itemsize)
    assert word is not None
    return word, part.itemsize


def polls_within(seconds: float, device: torch.device) -> int:
    """A number of polls that takes as long, or longer.

    The shortest polls that there may be are counted. A trial would only tell what a poll takes at most: more than later
    where several processes share the device, or where its clock was low.
    """
    if device.type == "cpu":
        return _EAGER_POLLS + math.ceil(seconds / _NAP)
    return math.ceil(seconds / SHORTEST_POLL)
