"""Measures how fast the ranks of a group write to windows, read from them, and copy in their own memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ....kernels import HALVES, StridedBoxes, copy_boxes, copy_table
from ..backend_limits import Rates
from ..rendezvous.store_texts import malformed
from .transport import SymmetricMemoryTransport

_MOST_BYTES = 64 << 20  # of a window, that a trial uses
_TRIALS = 5
_ALIGNMENT = 16


def measure_rates(transport: SymmetricMemoryTransport, ranks: tuple[int, ...], nbytes: int) -> Rates:
    """Measure the rates of a group with the kernel that steps use, in a window of at least `nbytes`. Collective.

    Writes to peers, reads from them and copies in this rank's memory move equally many bytes, none of which is in a
    GPU's cache before. Besides the window this takes memory of the size of that, or of twice the cache if that is more,
    which it gives back. Synchronises with the device.

    Returns:
        The rates of the slowest rank.

    Raises:
        TransportError: a rank did not arrive.
    """
    window = transport.window(ranks, nbytes, HALVES)  # which steps use then
    own, peers = window.data[transport.rank], [window.data[r] for r in ranks if r != transport.rank]
    part = min(window.nbytes, _MOST_BYTES) // len(ranks) // _ALIGNMENT * _ALIGNMENT
    # Each rank has a part of every window for itself, so that no two ranks write to the same place.
    of_this_rank = [part * ranks.index(transport.rank)] * len(peers)
    parts = [part * i for i in range(len(peers))]
    scratch = torch.empty(max(part * len(peers), _cache_bytes(own.device)), dtype=torch.uint8, device=own.device)
    seconds = []
    transport.signal(window, "acquire")
    seconds.append(_seconds(scratch, _copied([own], peers, parts, of_this_rank, part)))
    transport.signal(window, "barrier")
    seconds.append(_seconds(scratch, _copied(peers, [scratch], of_this_rank, parts, part)))
    seconds.append(_seconds(scratch, _copied([own], [scratch], parts, parts, part)))
    transport.signal(window, "release")
    transport.check()
    texts = transport.exchange_text("rates", ranks, " ".join(map(str, seconds)))
    by_rank = [_parsed(rank, text, len(seconds)) for rank, text in texts.items()]
    slowest = [max(each) for each in zip(*by_rank, strict=True)]
    return Rates(*(part * len(peers) / s for s in slowest))


def _parsed(rank: int, text: str, number: int) -> list[float]:
    try:
        found = [float(word) for word in text.split()]
    except ValueError:
        found = []
    if len(found) != number or not all(0 < seconds < math.inf for seconds in found):
        raise malformed(rank, text)
    return found


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


def _cache_bytes(device: torch.device) -> int:
    """How many bytes written leave nothing else in the cache of a GPU; 0 for CPUs."""
    return 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _seconds(scratch: torch.Tensor, call: Callable[[], None]) -> float:
    """The shortest time of a call in a few trials, without the first. On a GPU `scratch` is overwritten before each."""
    times = []
    for _ in range(_TRIALS + 1):
        times.append(_time_on_device(scratch, call) if scratch.device.type == "cuda" else _time_on_host(call))
    return min(times[1:])


def _time_on_host(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _time_on_device(scratch: torch.Tensor, call: Callable[[], None]) -> float:
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    scratch.zero_()
    events[0].record()
    call()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3
