"""Ranges of calls and their phases in torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

# Whether a profiler is on, on any thread: calls in the background are made on another one.
_off: bool = torch.autograd.profiler._is_profiler_enabled  # at import
wants_ranges: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", _off)
