"""An observer is notified of every redistribution before it is carried out; `tracing.record` installs one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...planner import Layout, Mesh


class Observer(Protocol):
    def note(self, dtype: torch.dtype, current: DTensorSpec, target: DTensorSpec) -> None: ...

    def note_layouts(
        self, dtype: torch.dtype, mesh: Mesh, shape: Sequence[int], source: Layout | str, target: Layout | str
    ) -> None: ...


current: Observer | None = None
"""The active observer."""


def observe(observer: Observer | None) -> None:
    """Set the observer; None removes it. Torch's own redistributions are observed after `install.bind_replacements`."""
    global current
    current = observer


@cache
def observed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch's `redistribute_local_tensor` so that it notifies the observer. Equal for equal functions."""

    @wraps(function)
    def redistribute_local_tensor(
        local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if current is not None:
            current.note(local_tensor.dtype, current_spec, target_spec)
        return function(local_tensor, current_spec, target_spec, **options)

    return redistribute_local_tensor
