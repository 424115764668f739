"""Copies of boxes straight into buffers of peers that each of them chooses for this use: one launch, without a window.

    announce(…)                      the first program to start: the number of this rank's buffer, to all peers
    wait_for_peers(ready, …)         every program, until all peers have announced theirs
    …                                copies into the buffers of peers, and what this rank keeps into its own
    end_use(ready, arrived, …)       the last program: signals that this rank has written
    wait_for_peers(arrived, …)       the last program, until all peers have written

When the launch ends, the rank's buffer is whole. It is announced in the order of the rank's stream: what reads the
buffer's former content has been enqueued before, so nobody writes it too early, and no signal says
that it has been read.

No deadlock, however few programs are resident: the announcement, for which peers wait, is made by whichever program
starts first, before it waits. The signal of arrival depends on the programs of this launch, each of which waits only
for announcements. The last program, which waits for arrivals, has signalled that of this rank before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .addresses import source_address, target_address
from .channel import SLOT, Channel
from .copy_boxes import copy_words
from .fused_signals import (
    ABOVE,
    COUNTED,
    FAILED_COUNT,
    end_use,
    has_failed,
    is_last_program,
    overwrite,
    store_words,
    wait_for_peers,
)
from .signal import mixed, overwrite_cpu
from .tiling import Launch
from .window_boxes import WindowCopyTable, WindowLaunch
from .window_use import Turn, Watch, WindowUse, end_use_cpu, wait_cpu

_SLOT, _BUFFER = tl.constexpr(SLOT), tl.constexpr(3)  # the word of a slot that names a buffer


@triton.jit
def announce(
    table,  # of the channel to announce on
    error,
    fingerprint,
    buffer,
    PEERS: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Tell all peers that they may write into this rank's buffer of a number, or that this rank has failed. Once for
    each use: nothing happens where more has been announced than `end_use` has counted."""
    lanes = tl.arange(0, WIDTH)
    active = lanes < PEERS
    sent = tl.load(table + lanes, mask=active, other=0)
    active = active & (sent == tl.load(table + PEERS + lanes, mask=active, other=0))
    failed = has_failed(error)
    count = sent + 1
    there = tl.load(table + 2 * PEERS + lanes, mask=active, other=0).to(tl.pointer_type(tl.int64))
    mixed_count = fingerprint.to(tl.int64) ^ ((count & COUNTED) << ABOVE)
    store_words(there + _BUFFER, buffer.to(tl.int64) + count * 0, active, RELEASE=False, PTX=PTX)
    store_words(there + 1 + (count & 1), mixed_count, active, RELEASE=False, PTX=PTX)
    store_words(there, tl.where(failed, FAILED_COUNT, count), active, RELEASE=True, PTX=PTX)
    tl.store(table + lanes, count, mask=active)


@triton.jit
def is_first_program(started):
    """Whether no other program of the launch has called this before. `started`: int64 [1], 0; the last program sets it
    to 0 again."""
    return tl.atomic_add(started, 1, sem="relaxed", scope="gpu") == 0


@triton.jit
def end_arrivals(table, PEERS: tl.constexpr, WIDTH: tl.constexpr):
    """Count the signals of all peers on a channel as awaited."""
    lanes = tl.arange(0, WIDTH)
    active = lanes < PEERS
    tl.store(table + PEERS + lanes, tl.load(table + PEERS + lanes, mask=active, other=0) + 1, mask=active)


@triton.jit(
    do_not_specialize=[
        "source0", "source1", "source2", "source3", "target0", "fill", "tiles", "host_error", "fingerprint", "limit",
        "send", "out", "words", "poison", "stride", "buffer",
    ]
)  # fmt: skip
def copy_direct_kernel(
    descriptors,  # int64 [tiles, 8]
    source_table,  # int64 [sources], addresses; those that are arguments are not read
    target_table,  # int64 [targets], of the first buffers of peers
    source0: tl.int64,  # address
    source1: tl.int64,
    source2: tl.int64,
    source3: tl.int64,
    target0: tl.int64,  # this rank's buffer
    fill: tl.int64,  # 8 bytes of the fill value
    tiles: tl.int64,
    ready,  # table of the channel of announcements, int64 [4, PEERS]
    ready_pad,  # int64 [PEERS, SLOT]
    arrived,  # of the channel of arrivals
    arrived_pad,
    error,  # int64 [1]
    started,  # int64 [1]
    finished,  # int64 [1]
    host_error: tl.int64,  # address of an int64 in host memory
    fingerprint: tl.int64,
    limit: tl.int64,  # of each wait: nanoseconds if TIMED, else polls
    send: tl.int64,  # whether the use ends with this launch
    out: tl.int64,  # address
    words: tl.int64,  # in out
    poison: tl.int64,  # 8 bytes
    stride: tl.int64,  # from buffer to buffer of a rank, in bytes
    buffer: tl.int64,  # the number of target0
    WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_FILL: tl.constexpr,
    PEERS: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
    POISON: tl.constexpr,
    POISON_WORD: tl.constexpr,
):
    """`copy_boxes_kernel` into buffers that peers announce: target i + 1 is that of peer i."""
    if is_first_program(started):
        announce(ready, error, fingerprint, buffer, PEERS, PTX, WIDTH)
    failed = wait_for_peers(
        ready, ready_pad, error, host_error, fingerprint, limit, PEERS, 0, TIMED, PTX, WIDTH
    )  # fmt: skip
    if not failed:
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            row = descriptors + tile * 8
            source_base = source_address(source_table, tl.load(row), source0, source1, source2, source3, SOURCES)
            target_id = tl.load(row + 1)
            target_base = target_address(target_table, target_id, target0, TARGETS)
            announced = tl.load(ready_pad + (target_id - 1) * _SLOT + _BUFFER, mask=target_id > 0, other=0)
            copy_words(
                row,
                source_base,
                target_base + announced * stride,
                fill,
                WORD,
                VS,
                VD,
                ROWS,
                COLS,
                TRANSPOSED,
                ALIGN_S,
                ALIGN_D,
                HAS_FILL,
            )
    if is_last_program(finished):
        tl.atomic_xchg(started, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")
        if send != 0:
            end_use(ready, arrived, error, fingerprint, send, 0, 0, 0, PEERS, False, POISON_WORD, PTX, WIDTH)
            failed = wait_for_peers(
                arrived, arrived_pad, error, host_error, fingerprint, limit, PEERS, 0, TIMED, PTX, WIDTH
            )  # fmt: skip
            end_arrivals(arrived, PEERS, WIDTH)
            if POISON:
                if failed:
                    overwrite(out, words, poison, POISON_WORD)


class DirectUse(WindowUse):
    """How launches write directly into buffers of peers, wait and signal.

    Args:
        ready: the channel on which ranks announce buffers.
        arrived: the channel on which ranks signal that they have written.
        stride: bytes from buffer to buffer of a rank.
        dtype, watch, programs: as for `WindowUse`.
    """

    numbers = 9

    def __init__(
        self,
        ready: Channel,
        arrived: Channel,
        stride: int,
        dtype: torch.dtype,
        watch: Watch | None = None,
        programs: int | None = None,
    ) -> None:
        super().__init__(ready, arrived, True, stride, dtype, False, watch, programs)
        self.credit, self.started = 0, torch.zeros_like(self.finished)
        self.tensors = (  # type: ignore[assignment]
            ready.table, ready.pad, arrived.table, arrived.pad, self.failure.error, self.started, self.finished,
        )  # fmt: skip

    def late(self) -> Sequence[int]:
        """As in `WindowUse`. Who has not arrived is late, announced or not: who has arrived may be in a later call."""
        return self.signalled.late(-1)

    def arguments(self, turn: Turn, last: bool) -> tuple[int, ...]:
        return *super().arguments(turn, last), turn.buffer

    def begin_cpu(self, turn: Turn) -> bool:
        """Announce this rank's buffer and wait for the peers. Return whether this rank has not failed."""
        announce_cpu(self.awaited, turn.fingerprint, turn.buffer)
        with self.watched:
            return not wait_cpu(self.awaited, 0, turn.fingerprint, turn.limit)

    def end_cpu(self, turn: Turn) -> None:
        """End what `begin_cpu` began, and wait until the peers have written."""
        end_use_cpu(self.awaited, self.signalled, turn.fingerprint, turn.send, None)
        with self.watched:
            failed = wait_cpu(self.signalled, 0, turn.fingerprint, turn.limit)
        awaited = self.signalled.words[1][1]
        for peer in range(self.signalled.peers):
            awaited[peer] += 1
        if failed and turn.out is not None:
            overwrite_cpu(turn.out)

    def announced_cpu(self, peer: int) -> int:
        """The number of the buffer that a peer, by its index in the channels, has announced."""
        return self.awaited.words[0][SLOT * peer + 3]


def announce_cpu(channel: Channel, fingerprint: int, buffer: int) -> None:
    """`announce` for CPU memory shared by processes; relies on x86-64's store order."""
    failed = int(channel.failure.error[0]) != 0
    sent, slots = channel.words[1][0], channel.words[2]
    for peer in range(channel.peers):
        count = sent[peer] = sent[peer] + 1
        slots[peer][3] = buffer
        slots[peer][1 + (count & 1)] = mixed(fingerprint, count)
        slots[peer][0] = -1 if failed else count


class DirectTable(WindowCopyTable):
    """Prepared copies of boxes into this rank's buffer (target 0) and into those of peers. Run by `run_in_window`."""

    def prepare(self, launch: Launch, scalars: Sequence[int], constants: Mapping[str, Any], last: bool) -> WindowLaunch:
        return WindowLaunch(copy_direct_kernel, launch, self.use, scalars, constants, last)
