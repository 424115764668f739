"""Symmetric windows: memory of each rank of a group that all its ranks read and write, ordered by signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import torch

from ....kernels import (
    SLOT,
    UNLIMITED,
    Channel,
    DirectUse,
    Failure,
    Watch,
    WindowSignals,
    WindowUse,
    build_signal,
    pack,
    signal,
)

Use = Literal["acquire", "barrier", "release", "poison"]
_SMALLEST = 1 << 16
ALIGNMENT = 256  # bytes, of regions in a window
PIECE_ALIGNMENT = 16
"""Bytes of the widest store: what ranks push begins at multiples of it."""
_CHANNELS = ("arrivals", "releases")
_REFUSED = 0  # in place of a fingerprint


def window_size(nbytes: int, exact: bool = False) -> int:
    """The size of a window for at least `nbytes`: a power of two, so that a group has few windows, unless `exact`."""
    if exact:
        return max(_SMALLEST, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    return max(_SMALLEST, 1 << max(nbytes - 1, 0).bit_length())


def padding_of_pieces(size: int) -> int:
    """The bytes that pieces of `size` ranks may need beside their elements to begin at `PIECE_ALIGNMENT`."""
    return -(-PIECE_ALIGNMENT * size // ALIGNMENT) * ALIGNMENT


def pad_bytes(size: int) -> int:
    """The bytes that signals need before the data of a window, in a group of `size` ranks."""
    return -(-len(_CHANNELS) * (size - 1) * SLOT * 8 // ALIGNMENT) * ALIGNMENT


class Window:
    """A window of a group, as seen by one rank. Every exchange consists of two launches, on every rank of the group:

        writing   waits until every rank has released the last exchange but one, writes a half of windows, notifies all
                  ranks of that
        reading   waits until every rank has written, reads that half of windows, notifies all ranks of that (releases)

    or of three signals, in launches of their own or in those of kernels that use the memory, all of it:

        acquire   waits until every rank has released the last exchange: windows may be written
        barrier   notifies all ranks that this rank has written, and waits for theirs: windows may be read
        release   notifies all ranks that this rank has read

    or of one launch, of a window that is divided into buffers (`OutputPool`): it tells all ranks which of this rank's
    buffers they may write, on the channel of releases, writes into those that they have named, notifies all ranks of
    that, and waits until they have written.

    All of them wait on the device, not on the host. Exchanges of one window are all of one kind; or the host knows that
    an exchange by three signals is over on all ranks before the next one begins.

    Args:
        memory: by ascending rank, `pad_bytes` zeros followed by the data, in `halves` of equal size.
        number: the index of the window among those of this rank, for errors.
        watch: for CPU memory, the context of a wait, from a function that returns the late ranks.
        programs: the most of a launch that writes or reads the window; None: `WindowUse` decides.

    Attributes:
        nbytes: of a half.
        data: uint8 by rank: the first half.
        parts: uint8 by rank: all halves.
        after_acquire: called once, when the next "acquire" is enqueued, whichever user of the window does so: what
            peers read beside the window may be written again from there on. By whether it belongs to the capture of a
            CUDA graph: what does not waits for an "acquire" outside of captures, which enqueue nothing.
        writing: the use of launches that write the window.
    """

    def __init__(
        self,
        rank: int,
        memory: Mapping[int, torch.Tensor],
        number: int,
        failure: Failure,
        halves: int = 1,
        watch: Callable[[Callable[[], Sequence[int]]], AbstractContextManager[object]] | None = None,
        programs: int | None = None,
    ) -> None:
        self._programs = programs
        self.rank, self.ranks, self.number, self.failure = rank, tuple(memory), number, failure
        self._memory = memory
        self.peers = tuple(peer for peer in memory if peer != rank)
        first = pad_bytes(len(memory))
        self.parts = {r: m[first:] for r, m in memory.items()}
        self.nbytes = (memory[rank].numel() - first) // halves
        self._halves = [
            {r: m[first + h * self.nbytes :][: self.nbytes] for r, m in memory.items()} for h in range(halves)
        ]
        self.data = self._halves[0]
        self.after_acquire: dict[bool, Callable[[], None]] = {}
        self.arrived, self.released = (self._channel(c) for c in range(len(_CHANNELS)))
        self._watch: Watch | None = None if watch is None else lambda late: watch(partial(self._ranks_of, late))
        self._build_notices()
        self.writing = self._use(True)
        self._reading: dict[tuple[torch.dtype, bool], WindowUse] = {}

    def _channel(self, which: int) -> Channel:
        peers = self.peers
        rows = len(peers) * SLOT * 8
        me = self.ranks.index(self.rank)
        pad = self._memory[self.rank][which * rows :][:rows].view(torch.int64).view(len(peers), SLOT)
        # The row of a rank in a peer's pad is its index among the ranks other than the peer.
        places = [me - (self.rank > peer) for peer in peers]
        slots = [self._memory[p].data_ptr() + which * rows + i * SLOT * 8 for p, i in zip(peers, places, strict=True)]
        channel = len(_CHANNELS) * self.number + which
        return Channel(pad, slots, [pack(self.rank, peer, channel) for peer in peers], self.failure)

    def half(self, number: int) -> dict[int, torch.Tensor]:
        """uint8 [nbytes] by rank: a half of a window that has two."""
        return self._halves[number]

    def reading(self, dtype: torch.dtype, pulls: bool) -> WindowUse:
        """The use of launches that read windows, with outputs of a dtype; `pulls`: those of peers, not the own one."""
        if (dtype, pulls) not in self._reading:
            self._reading[dtype, pulls] = self._use(False, dtype, pulls)
        return self._reading[dtype, pulls]

    def direct(self, dtype: torch.dtype) -> DirectUse:
        """The use of launches that write directly into the parts that ranks announce, with outputs of a dtype."""
        return DirectUse(self.released, self.arrived, self.nbytes, dtype, self._watch, self._programs)

    def signals(self, limit: int) -> WindowSignals | None:
        """What kernels take to signal in their own launches, as `signal` does; None where no kernels run. `limit`: of a
        wait, from `wait_limit`."""
        if self.arrived.cpu_path:
            return None
        return WindowSignals(self.released, self.arrived, limit, self.writing.programs, self._watch)

    def _use(self, writes: bool, dtype: torch.dtype | None = None, pulls: bool = False) -> WindowUse:
        return WindowUse(self.released, self.arrived, writes, self.nbytes, dtype, pulls, self._watch, self._programs)

    def _ranks_of(self, late: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        return tuple([self.peers[peer] for peer in late()])

    def signal(self, use: Use, fingerprint: int, limit: int, poison: torch.Tensor | None = None) -> None:
        """Enqueue a signal. "release" overwrites the tensor `poison` if this rank has failed; "poison" does only that.

        Args:
            fingerprint: compared by the ranks at a barrier.
            limit: of a wait, from `wait_limit`.
        """
        if use == "acquire":
            signal(self.released, wait=True, credit=1, limit=limit)
        elif use == "barrier":
            signal(self.arrived, send=True, wait=True, fingerprint=fingerprint, limit=limit)
        else:
            signal(self.released, send=use == "release", poison=poison)

    def late(self, use: Use) -> tuple[int, ...]:
        """The ranks that a signal in progress in another thread still waits for. CPU memory only.

        Ranks that have arrived are not included: they may be in a later call by now.
        """
        late = self.released.late(1) if use == "acquire" else self.arrived.late(0)
        return tuple(self.peers[peer] for peer in late)

    def refuse(self) -> None:
        """Enqueue an exchange that this rank refuses: it signals without a fingerprint and does not wait."""
        for channel in (self.arrived, self.released):
            signal(channel, send=True, wait=True, credit=UNLIMITED, fingerprint=_REFUSED)

    def end_waits(self) -> None:
        """End the waits of this rank as if its peers had failed. CPU memory only; called from another thread."""
        for channel in (self.arrived, self.released):
            channel.pad[:, 0] = -1

    def build(self, dtype: torch.dtype) -> None:
        """Compile the kernels that exchanges with outputs of a dtype launch."""
        build_signal(self.released, wait=True, credit=1)
        build_signal(self.arrived, send=True, wait=True)
        for releases in (True, False):
            build_signal(self.released, send=releases, poison=dtype)

    def _build_notices(self) -> None:
        """Compile what `refuse` and `signal_failure` launch: while peers wait is too late."""
        for channel in (self.arrived, self.released):
            build_signal(channel, send=True, wait=True, credit=UNLIMITED)
            build_signal(channel, send=True)

    def signal_failure(self) -> None:
        """Enqueue a notice to all peers that this rank has failed."""
        for channel in (self.arrived, self.released):
            signal(channel, send=True)

    def __str__(self) -> str:
        return f"window {self.number} of ranks {self.ranks}"


def channel_name(channel: int) -> tuple[int, str]:
    """The number of the window that a channel belongs to, and the name of the channel."""
    return channel // len(_CHANNELS), _CHANNELS[channel % len(_CHANNELS)]
