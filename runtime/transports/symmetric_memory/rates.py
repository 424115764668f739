"""Measures how fast the ranks of a group write to windows, read from them, and copy in their own memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ....kernels import StridedBoxes, copy_boxes, copy_table
from ..policies import Rates
from .transport import SymmetricMemoryTransport

_MOST_BYTES = 64 << 20  # of a trial
_TRIALS = 5
_ALIGNMENT = 16


def measure_rates(transport: SymmetricMemoryTransport, ranks: tuple[int, ...], nbytes: int) -> Rates:
    """Measure the rates of a group with the kernel that steps use, in a window of at least `nbytes`. Collective.

    Synchronises with the device.

    Returns:
        The rates of the slowest rank.

    Raises:
        TransportError: a rank did not arrive.
    """
    window = transport.window(ranks, nbytes)
    own, peers = window.data[transport.rank], [window.data[r] for r in ranks if r != transport.rank]
    part = min(window.nbytes, _MOST_BYTES) // len(ranks) // _ALIGNMENT * _ALIGNMENT
    # Each rank has a part of every window for itself, so that no two ranks write to the same place.
    own_parts = [part * ranks.index(transport.rank)] * len(peers)
    on_device = own.device.type != "cpu"
    wait = partial(torch.get_device_module(own.device).synchronize, own.device) if on_device else lambda: None
    seconds = []
    transport.signal(window, "acquire")
    seconds.append(_seconds(wait, _copied([own], peers, [0] * len(peers), own_parts, part)))
    transport.signal(window, "barrier")
    seconds.append(_seconds(wait, _copied(peers, [own], own_parts, [0] * len(peers), part)))
    seconds.append(_seconds(wait, _copied([own], [torch.empty_like(own)], own_parts[:1], [0], part)))
    transport.signal(window, "release")
    transport.check()
    texts = transport.exchange_text("rates", ranks, " ".join(map(str, seconds)))
    slowest = [max(each) for each in zip(*(map(float, text.split()) for text in texts.values()), strict=True)]
    pushed, pulled, copied = (part * n / s for n, s in zip((len(peers), len(peers), 1), slowest, strict=True))
    return Rates(pushed, pulled, copied)


def _copied(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], starts: list[int], ends: list[int], nbytes: int
) -> Callable[[], None]:
    """A function that copies `nbytes` from `starts[i]` of source i to `ends[i]` of target i, modulo their number."""
    number = len(starts)
    boxes = StridedBoxes(
        source=np.arange(number)[:, None] % len(sources),
        target=np.arange(number) % len(targets),
        source_offset=np.array(starts)[:, None],
        target_offset=np.array(ends),
        extent=np.full((number, 1), nbytes),
        source_stride=np.ones((number, 1, 1), np.int64),
        target_stride=np.ones((number, 1), np.int64),
    )
    return partial(copy_boxes, copy_table(boxes, torch.uint8, sources[0].device), sources, targets)


def _seconds(wait: Callable[[], None], call: Callable[[], None]) -> float:
    """The shortest time of a call in a few trials, without the first."""
    times = []
    for _ in range(_TRIALS + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])
