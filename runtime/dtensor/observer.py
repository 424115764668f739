"""Whoever is told of each redistribution that is asked for, before it is carried out: a recording, say."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class Observer(Protocol):
    def note(self, dtype: torch.dtype, current: DTensorSpec, target: DTensorSpec) -> None: ...


_observer: Observer | None = None


def observer() -> Observer | None:
    return _observer


def observe(by: Observer | None) -> None:
    """From now on redistributions are told to this observer, or to nobody. Torch's own are as well once
    `install.bind_seams` has been called."""
    global _observer
    _observer = by


def observed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's inner loop, which tells the observer what it is asked for."""

    @wraps(function)
    def redistribute_local_tensor(
        local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if _observer is not None:
            _observer.note(local_tensor.dtype, current_spec, target_spec)
        return function(local_tensor, current_spec, target_spec, **options)

    return redistribute_local_tensor
