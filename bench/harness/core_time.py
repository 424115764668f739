"""How much of this machine's core time is in use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_IDLE = 3, 4  # of the columns of /proc/stat: idle, and waiting for a disk


def busy_share(call: Callable[[], Any], seconds: float) -> float:
    """The share of the time of all cores that is in use, by whatever process, while all ranks of the default group
    make calls for about `seconds`. They call this together.

    The kernel counts in ticks of 10 ms, so that `seconds` should be 0.2 or more.
    """
    start = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    calls = max(1, math.ceil(seconds / max(float(once), 1e-6)))
    dist.barrier()
    idle, total = _ticks()
    for _ in range(calls):
        call()
    dist.barrier()
    idle_after, total_after = _ticks()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def _ticks() -> tuple[int, int]:
    """The ticks that all cores have been idle since the machine started, and all of them."""
    ticks = [int(n) for n in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(ticks[i] for i in _IDLE), sum(ticks)
