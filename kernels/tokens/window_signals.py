"""WindowSignals: the signals of a window in the launches that move rows, without launches of their own.

One program of a launch signals for all, and waits for all: the last one to finish (`is_last_program`), or the only one
that writes to peers. The next launch on the stream begins when that wait is over, so it may have as many programs as it
likes. A launch of which every program waits before its work has fewer programs than the device has SMs
(`window_use.waiting_programs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..channel import Channel
from ..fused_signals import count_use, has_failed, signal_peers, wait_for_peers
from ..window_use import Watch, use_constants

# Places in `WindowSignals.words`. The first eight are addresses.
_ARRIVED, _ARRIVED_PAD, _RELEASED, _RELEASED_PAD = (tl.constexpr(i) for i in range(4))
_ERROR, _FINISHED, _HOST_ERROR, _LIMIT = (tl.constexpr(i) for i in range(4, 8))
_NOT_WATCHED = nullcontext()


@triton.jit
def _pointer(words, PLACE: tl.constexpr):
    return tl.load(words + PLACE).to(tl.pointer_type(tl.int64))


@triton.jit
def finished_of(words):
    """The argument of `is_last_program`."""
    return _pointer(words, _FINISHED)


@triton.jit
def acquire_window(words, PEERS: tl.constexpr, TIMED: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr):
    """Wait until all peers have released the last use: the window may be written. Return whether this rank has failed.

    One program counts the wait (`count_acquired`) once no other program of the launch waits.
    """
    return wait_for_peers(
        _pointer(words, _RELEASED), _pointer(words, _RELEASED_PAD), _pointer(words, _ERROR),
        tl.load(words + _HOST_ERROR), tl.full((), 0, tl.int64), tl.load(words + _LIMIT),
        PEERS, 1, TIMED, PTX, WIDTH,
    )  # fmt: skip


@triton.jit
def count_acquired(words, PEERS: tl.constexpr, WIDTH: tl.constexpr):
    """Count the wait of `acquire_window`."""
    count_use(_pointer(words, _RELEASED), PEERS, WIDTH)


@triton.jit
def barrier_of_ranks(
    words, fingerprint, PEERS: tl.constexpr, TIMED: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr
):
    """For one program, behind a barrier of its threads, when all others have finished: signal all peers that this rank
    has written, and wait until they have. Later launches see what they wrote."""
    arrived, error = _pointer(words, _ARRIVED), _pointer(words, _ERROR)
    signal_peers(arrived, has_failed(error), fingerprint, PEERS, PTX, WIDTH)
    wait_for_peers(
        arrived, _pointer(words, _ARRIVED_PAD), error, tl.load(words + _HOST_ERROR), fingerprint,
        tl.load(words + _LIMIT), PEERS, 0, TIMED, PTX, WIDTH,
    )  # fmt: skip
    count_use(arrived, PEERS, WIDTH)


@triton.jit
def rank_has_failed(words):
    """`has_failed`, for the last program of a launch."""
    return has_failed(_pointer(words, _ERROR))


@triton.jit
def release_window(words, failed, PEERS: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr):
    """For the last program: signal all peers that this rank no longer uses what they wrote, nor what it read there."""
    signal_peers(_pointer(words, _RELEASED), failed, tl.full((), 0, tl.int64), PEERS, PTX, WIDTH)


class WindowSignals:
    """The channels of a window as kernels take them.

    Args:
        released, arrived: as for `WindowUse`.
        limit: of a wait, from `wait_limit`.
        programs: the most of a launch whose programs all wait.
        watch: for CPU memory, around each launch that waits.

    Attributes:
        words: int64 [8] on the device: addresses, and the limit.
    """

    def __init__(
        self, released: Channel, arrived: Channel, limit: int, programs: int, watch: Watch | None = None
    ) -> None:
        device, failure = arrived.pad.device, arrived.failure
        self.peers, self.programs = arrived.peers, programs
        self._channels, self._watch = (released, arrived), watch
        self._finished = torch.zeros(1, dtype=torch.int64, device=device)
        tensors = (
            arrived.table, arrived.pad, released.table, released.pad, failure.error, self._finished, failure.host_error,
        )  # fmt: skip
        words = [*(tensor.data_ptr() for tensor in tensors), limit]
        self.words = torch.tensor(words, dtype=torch.int64, device="cpu").to(device)

    @property
    def watches(self) -> bool:
        """Whether `watched` does anything."""
        return self._watch is not None

    def watched(self, acquires: bool) -> AbstractContextManager[object]:
        """The context of a launch that ends with a barrier; `acquires`: that begins with a wait, too."""
        return _NOT_WATCHED if self._watch is None else self._watch(self._late(acquires))

    def _late(self, acquires: bool) -> Callable[[], Sequence[int]]:
        """Return a function that returns the peers that are awaited, called from another thread."""
        released, arrived = self._channels
        # As `acquire_window` and `barrier_of_ranks` compute them. The counts advance while the launch runs.
        waits = [(released, released.table[1].clone())] if acquires else []
        waits.append((arrived, arrived.table[1] + 1))

        def late() -> Sequence[int]:
            for channel, goals in waits:
                peers = [i for i in range(self.peers) if int(channel.pad[i, 0]) < int(goals[i])]
                if peers:
                    return peers
            return []

        return late


class WindowBarrier(NamedTuple):
    """A barrier of the ranks of a window at the end of a launch."""

    signals: WindowSignals
    fingerprint: int
    """63 bits that the ranks compare."""


@cache
def signal_constants(peers: int, num_warps: int) -> dict[str, Any]:
    """The constants by which a kernel waits and signals; `peers`: 0 if it does not."""
    if not peers:
        return {"PEERS": 0, "TIMED": False, "PTX": False, "WIDTH": 1}
    constants = use_constants(peers, False, num_warps=num_warps)
    return {name: constants[name] for name in ("PEERS", "TIMED", "PTX", "WIDTH")}
