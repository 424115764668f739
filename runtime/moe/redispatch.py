"""RowsAgain: rows that are dispatched again for the experts' backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from ..executor.dispatch_modes import hidden_from_modes


class RowsAgain:
    """A placeholder for the rows of one dispatch among saved tensors, until the backward of combine sets `rows`.

    Only saved tensors hold it, so the new rows are freed with the last of them.

    Args:
        x: the rows that were received.
        tokens: the rows that were sent.
    """

    def __init__(self, x: torch.Tensor, tokens: torch.Tensor) -> None:
        self._base, self._dtype = x.storage_offset(), x.dtype
        self._version = _version(tokens)
        self.rows: torch.Tensor | None = None
        """[rows, H], contiguous."""

    def pack(self, x: torch.Tensor) -> Callable[[Any], Any]:
        """Return a pack hook: tensors on the memory of `x` become (self, shape, strides, offset)."""
        memory = x.untyped_storage()._cdata

        def pack_one(saved: torch.Tensor) -> Any:
            if saved.untyped_storage()._cdata != memory or saved.dtype is not self._dtype:
                return saved
            return self, saved.shape, saved.stride(), saved.storage_offset() - self._base

        return pack_one

    def is_written(self, tokens: torch.Tensor) -> bool:
        """Return whether torch has written `tokens`, which are to be dispatched again, since their dispatch."""
        return _version(tokens) != self._version

    @hidden_from_modes
    def view(self, shape: torch.Size, strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a view of the new rows.

        Raises:
            UnsupportedError: the backward of combine has not run.
        """
        if self.rows is None:
            raise UnsupportedError(
                'save="redispatch": backward of the experts before that of combine; allowed: backward from the result '
                "of combine"
            )
        return self.rows.as_strided(shape, strides, offset)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def unpack(saved: Any) -> torch.Tensor:
    """The unpack hook to `RowsAgain.pack`."""
    if isinstance(saved, torch.Tensor):
        return saved
    again, *place = saved
    view: torch.Tensor = again.view(*place)
    return view
