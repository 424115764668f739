"""How fast the ranks of a group write into each other's windows, read from them, and copy in their own memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ....kernels import StridedBoxes, copy_boxes, copy_table
from ..policies import Rates
from .transport import SymmetricMemoryTransport

_MOST = 64 << 20  # bytes of a trial
_TRIALS = 5
_ALIGNMENT = 16


def measure_rates(transport: SymmetricMemoryTransport, ranks: tuple[int, ...], nbytes: int) -> Rates:
    """By the kernel that steps use, in the group's window for so many bytes; of all its ranks the slowest's.

    Waits for the device, and for the other ranks of the group, which all call.

    Raises:
        TransportError: a rank did not come.
    """
    window = transport.window(ranks, nbytes)
    own, peers = window.data[transport.rank], [window.data[r] for r in ranks if r != transport.rank]
    part = min(window.nbytes, _MOST) // len(ranks) // _ALIGNMENT * _ALIGNMENT
    # A rank has a part of every window to itself, so that no two write to the same place.
    mine = [part * ranks.index(transport.rank)] * len(peers)
    on_device = own.device.type != "cpu"
    wait = partial(torch.get_device_module(own.device).synchronize, own.device) if on_device else lambda: None
    seconds = []
    transport.signal(window, "enter")
    seconds.append(_seconds(wait, _copied([own], peers, [0] * len(peers), mine, part)))
    transport.signal(window, "meet")
    seconds.append(_seconds(wait, _copied(peers, [own], mine, [0] * len(peers), part)))
    seconds.append(_seconds(wait, _copied([own], [torch.empty_like(own)], mine[:1], [0], part)))
    transport.signal(window, "leave")
    transport.check()
    texts = transport.told("rates", ranks, " ".join(map(str, seconds)))
    slowest = [max(each) for each in zip(*(map(float, text.split()) for text in texts.values()), strict=True)]
    pushed, pulled, copied = (part * n / s for n, s in zip((len(peers), len(peers), 1), slowest, strict=True))
    return Rates(pushed, pulled, copied)


def _copied(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], starts: list[int], ends: list[int], nbytes: int
) -> Callable[[], None]:
    """A copy of as many bytes from each source, or into each target, as there are places to begin at."""
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
    """Of one call, the fastest of a few; the first one is not among them."""
    found = []
    for _ in range(_TRIALS + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - began)
    return min(found[1:])
