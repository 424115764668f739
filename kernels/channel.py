"""Channels between ranks that signal each other: counters, pads, and the first failed wait, in host objects.

A channel connects a rank with some peers. For each peer it holds, on this device, the number of signals sent and the
number awaited, and in this rank's pad a word that only this peer writes. The counts are on the device, so that a
replayed CUDA graph continues where the last replay ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import ArgumentError
from .launch import runs_on

SLOT = 4
"""Words of a pad per peer: its count, its fingerprints of even and of odd counts, one unused."""
LATE, FAILED, DISAGREES = 1, 2, 3
KINDS = {LATE: "late", FAILED: "failed", DISAGREES: "disagrees"}
"""Kinds of failure: the peer did not signal in time, signalled that it failed, or sent another fingerprint."""
UNLIMITED = 1 << 40
"""A credit with which a signal does not wait; peers' signals count as awaited whenever they arrive."""
_FIELD, _MOST = 20, (1 << 20) - 1


@dataclass(frozen=True)
class Code:
    """The first failed wait of a rank; `kind` is one of the values of `KINDS`."""

    kind: str
    rank: int
    peer: int
    channel: int

    @classmethod
    def unpack(cls, code: int) -> Code:
        """Decode the sum of a `pack` and a kind."""
        channel, rank, peer = (code >> shift & _MOST for shift in (2 * _FIELD, _FIELD, 0))
        return cls(KINDS[code >> 60], rank, peer, channel)


def pack(rank: int, peer: int, channel: int) -> int:
    """Encode rank, peer and channel as an integer; a kind of failure is added in the bits above.

    Raises:
        ArgumentError: a number is negative or exceeds 20 bits.
    """
    for name, number in (("rank", rank), ("peer", peer), ("channel", channel)):
        if not 0 <= number <= _MOST:
            raise ArgumentError(f"{name}: {number}; allowed: 0..{_MOST}")
    return channel << 2 * _FIELD | rank << _FIELD | peer


class Failure:
    """The encoded first failed wait on any channel of a rank: one word on the device for kernels, one on the host.

    Attributes:
        host_word: the one on the host; its `value` is 0 as long as no failure is reported.
    """

    def __init__(self, device: torch.device) -> None:
        self.error = torch.zeros(1, dtype=torch.int64, device=device)
        self.host_error = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self.host_word = ctypes.c_int64.from_address(self.host_error.data_ptr())

    def read(self) -> Code | None:
        """Return the failure reported so far, if any; does not wait."""
        return Code.unpack(self.host_word.value) if self.host_word.value else None

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
        self.cpu_path = pad.device.type == "cpu" and not runs_on(pad.device)
        self.launches: dict[tuple[bool, bool, int, torch.dtype | None], Any] = {}  # the PreparedSignal of each use

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
