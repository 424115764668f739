"""Rows that the experts' backward asks for, pushed again instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError


class RowsAgain:
    """Stands for the rows of one dispatch in what autograd saves, until the backward of combine has `rows` anew.

    Saved tensors alone hold it, so the new rows go with the last of them.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._base, self._dtype = x.storage_offset(), x.dtype
        self.rows: torch.Tensor | None = None
        """[rows, H], contiguous."""

    def pack(self, x: torch.Tensor) -> Callable[[Any], Any]:
        """What takes saved tensors: those on the memory of `x` become (self, shape, strides, offset)."""
        memory = x.untyped_storage()._cdata

        def take(saved: torch.Tensor) -> Any:
            if saved.untyped_storage()._cdata != memory or saved.dtype is not self._dtype:
                return saved
            return self, saved.shape, saved.stride(), saved.storage_offset() - self._base

        return take

    def view(self, shape: torch.Size, strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """
        Raises:
            UnsupportedError: the backward of combine has not run.
        """
        if self.rows is None:
            raise UnsupportedError(
                'save="redispatch": backward of experts before that of their combine; allowed: backward from what '
                "combine returned"
            )
        return self.rows.as_strided(shape, strides, offset)


def unpack(saved: Any) -> torch.Tensor:
    """The inverse of `RowsAgain.pack`."""
    if isinstance(saved, torch.Tensor):
        return saved
    again, *place = saved
    found: torch.Tensor = again.view(*place)
    return found
