"""Ranges of calls and their phases in torch's profiler and, with SHARDWEAVE_NVTX=1, in NVTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.profiler import record_function

from ...errors import UnsupportedError
from ..environment import requested_nvtx


def _always() -> bool:
    return True


def _check_nvtx() -> None:
    """Check that this torch has NVTX.

    Raises:
        UnsupportedError: this torch has no NVTX.
    """
    try:
        torch.cuda.nvtx.mark("shardweave")
    except RuntimeError as error:
        raise UnsupportedError("SHARDWEAVE_NVTX: 1, and this torch has no NVTX; allowed: 0, or a CUDA build") from error


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()


# Whether a profiler is on, on any thread: calls in the background are made on another one.
_off: bool = torch.autograd.profiler._is_profiler_enabled  # at import
_profiles: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", _off)
# Read once: without NVTX a call only asks torch whether a profiler is on.
if requested_nvtx():
    _check_nvtx()
    wants_ranges: Callable[[], bool] = _always
    call_range: Callable = _nvtx_range
else:
    wants_ranges, call_range = _profiles, record_function
