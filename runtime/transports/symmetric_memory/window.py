"""Memory of each rank of a group that all of its ranks read and write, and the signals that say when they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from ....kernels import SLOT, UNLIMITED, Channel, Failure, build_signal, pack, signal

Use = Literal["enter", "meet", "leave", "spoil"]
_SMALLEST = 1 << 16
ALIGNMENT = 256  # bytes, of what has a place in a window
_CHANNELS = ("arrivals", "releases")
_REFUSED = 0  # in place of a token


def window_size(nbytes: int) -> int:
    """The bytes that a window for so many is made with: each at least twice the last, so that a group has few."""
    return max(_SMALLEST, 1 << max(nbytes - 1, 0).bit_length())


def pad_bytes(size: int) -> int:
    """What signals need before the data of a window, in a group of `size` ranks."""
    return -(-len(_CHANNELS) * (size - 1) * SLOT * 8 // ALIGNMENT) * ALIGNMENT


class Window:
    """One window of a group, as one rank has it. Every use of it, on every rank of the group and in the same order, is

        enter   every rank has left the last use: windows may be written
        meet    every rank has written: windows may be read
        leave   this rank has read

    with kernels in between. None of them waits on the host.

    Args:
        memory: by rank, ascending: `pad_bytes` of zeros, then the data.
        number: which of this rank's windows it is; errors name it.
    """

    def __init__(self, rank: int, memory: Mapping[int, torch.Tensor], number: int, failure: Failure) -> None:
        self.rank, self.ranks, self.number, self.failure = rank, tuple(memory), number, failure
        self._memory = memory
        self.peers = tuple(peer for peer in memory if peer != rank)
        first = pad_bytes(len(memory))
        self.data = {r: tensor[first:] for r, tensor in memory.items()}
        self.nbytes = memory[rank].numel() - first
        self.arrived, self.released = (self._channel(c) for c in range(len(_CHANNELS)))

    def _channel(self, which: int) -> Channel:
        peers = self.peers
        rows = len(peers) * SLOT * 8
        me = self.ranks.index(self.rank)
        pad = self._memory[self.rank][which * rows :][:rows].view(torch.int64).view(len(peers), SLOT)
        # A rank's row in a peer's pad: its place among those that are not the peer.
        places = [me - (self.rank > peer) for peer in peers]
        slots = [self._memory[p].data_ptr() + which * rows + i * SLOT * 8 for p, i in zip(peers, places, strict=True)]
        channel = len(_CHANNELS) * self.number + which
        return Channel(pad, slots, [pack(self.rank, peer, channel) for peer in peers], self.failure)

    def signal(self, use: Use, fingerprint: int, polls: int, poison: torch.Tensor | None = None) -> None:
        """Enqueue one of the three; `leave` overwrites `poison` if this rank has failed; `spoil` does that alone."""
        if use == "enter":
            signal(self.released, wait=True, credit=1, polls=polls)
        elif use == "meet":
            signal(self.arrived, send=True, wait=True, fingerprint=fingerprint, polls=polls)
        else:
            signal(self.released, send=use == "leave", poison=poison)

    def late(self, use: Use) -> tuple[int, ...]:
        """The ranks that a wait for one of the uses, which goes on in another thread, waits for now. Of CPU memory.

        Not those that have come, which may be in a later call by now.
        """
        late = self.released.late(1) if use == "enter" else self.arrived.late(0)
        return tuple(self.peers[peer] for peer in late)

    def refuse(self) -> None:
        """Enqueue a use that this rank does not make: it comes to meet with no token, and waits for nobody."""
        for channel in (self.arrived, self.released):
            signal(channel, send=True, wait=True, credit=UNLIMITED, fingerprint=_REFUSED)

    def end_waits(self) -> None:
        """Have waits of this rank find that its peers have failed. Of CPU memory, from another thread."""
        for channel in (self.arrived, self.released):
            channel.pad[:, 0] = -1

    def build(self, dtype: torch.dtype) -> None:
        """Compile what uses of the window with outputs of a dtype launch."""
        build_signal(self.released, wait=True, credit=1)
        build_signal(self.arrived, send=True, wait=True)
        for leaves in (True, False):
            build_signal(self.released, send=leaves, poison=dtype)

    def say_failed(self) -> None:
        """Enqueue, when this rank has failed, that its peers are told."""
        for channel in (self.arrived, self.released):
            signal(channel, send=True)

    def __str__(self) -> str:
        return f"window {self.number} of ranks {self.ranks}"


def channel_name(channel: int) -> tuple[int, str]:
    """The number of the window that a channel belongs to, and what the channel tells."""
    return channel // len(_CHANNELS), _CHANNELS[channel % len(_CHANNELS)]


class WindowedTransport(Protocol):
    """A transport whose ranks meet on the device, through windows of their group."""

    def window(self, ranks: tuple[int, ...], nbytes: int) -> Window: ...

    def signal(self, window: Window, use: Use, fingerprint: int = 0, poison: torch.Tensor | None = None) -> None: ...

    def check(self) -> None: ...
