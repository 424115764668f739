"""One rank of a token dispatcher on a world whose ranks meet on the device: rows go through windows of their group.

A window has the counts of all ranks, then the rows that an owner receives, then their weights, at the same places on
all ranks. A dispatch enters it, meets when the counts are there and once more when the rows are, copies what came, and
leaves. What reads from peers copies its values into the own window, meets, reads the peers' and leaves. The host waits
for no peer and reads nothing, and dispatches that follow each other, and redistributions among the same ranks, take
turns with one window.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch

from ..kernels.copy_rows import copy_rows
from ..kernels.push_rows import push_rows
from ..kernels.rows import Buffers
from ..kernels.share_counts import share_counts
from .meeting import Ask
from .token_layout import DispatchLayout
from .token_rank import Read, TokenRank
from .token_routing import Sent
from .windowed import WindowedWorld

_LAST = 1  # the second meeting of a run, added to what it is for
_ALIGNMENT = 256


def window_nbytes(layout: DispatchLayout) -> int:
    """What a rank's part of a window takes."""
    return sum(_up(math.prod(shape) * dtype.itemsize) for shape, dtype in _parts(layout))


def _parts(layout: DispatchLayout) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Counts, rows and their weights."""
    return [
        ((layout.ranks, layout.bounds[-1] + 1), torch.int32),
        ((layout.rows, layout.hidden), layout.dtype),
        ((layout.rows,), torch.float32),
    ]


class WindowRank(TokenRank):
    """Peers write into this rank's window, and read it."""

    in_windows = True
    way = "rows pushed into a window of their owner, which copies those that came"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layout, self._windows = self.layout, cast("WindowedWorld", self.world)
        self._window = self._windows.window(tuple(sorted(self.ranks)), window_nbytes(layout))
        self._window.build(layout.dtype)
        self._window.build(torch.float32)
        first, found = 0, []
        for shape, dtype in _parts(layout):
            nbytes = math.prod(shape) * dtype.itemsize
            parts = [self._window.data[rank][first : first + nbytes] for rank in self.ranks]
            found.append(Buffers([part.view(dtype).view(shape) for part in parts], self.tables))
            found[-1].table()  # uploaded here, and not in a call that is captured in a graph
            first += _up(nbytes)
        self._matrices, self._rows, self._numbers = found

    def combine(
        self, sent: Sent, values: torch.Tensor, out: torch.Tensor, *rest: Any, **named: Any
    ) -> Generator[Ask, Any, torch.Tensor | None]:
        # What is overwritten where a rank failed is contiguous.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        try:
            return (yield from super().combine(sent, values, whole, *rest, **named))
        finally:
            if whole is not out:
                out.copy_(whole)

    def _share(
        self, what: int, own: Sequence[torch.Tensor], counts: torch.Tensor | None = None
    ) -> Generator[Ask, Any, tuple[Any, torch.Tensor | None]]:
        yield from ()  # a generator, as for all ranks
        self._signal("enter")
        if counts is None:
            return own, None
        share_counts(counts, self._matrices, self.me)
        self._signal("meet", what)
        # Where a rank did not come, or asked for something else, what lies there are no counts.
        counted = self._matrices.tensors[self.me]
        return own, torch.where(self._window.failure.error == 0, counted, 0)

    def _deliver(
        self, what: int, sent: Sent, x: torch.Tensor, into: Any, weights: torch.Tensor | None = None
    ) -> Generator[Ask, Any, None]:
        yield from ()
        push_rows(
            x, sent.rows, self._rows, sent.groups, self.me, weights, None if weights is None else self._numbers,
            self.layout.most_padding,
        )  # fmt: skip
        self._signal("meet", what + _LAST)
        for came, buffer in zip((self._rows, self._numbers), into, strict=False):
            copy_rows(came.tensors[self.me], buffer, sent.groups.num_rows)
        self._leave(into)

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[Ask, Any, list[torch.Tensor]]:
        yield from ()
        windows = [self._rows if values.dim() == 2 else self._numbers for values in given]
        self._signal("enter")
        for values, window in zip(given, windows, strict=True):
            copy_rows(values.contiguous(), window.tensors[self.me], sent.groups.num_rows)
        self._signal("meet", what)
        found = read(windows)
        self._leave(found)
        return found

    def _signal(self, use: Any, what: int = 0) -> None:
        self._windows.signal(self._window, use, self.token + what)

    def _leave(self, outs: Sequence[torch.Tensor]) -> None:
        """`outs` are overwritten if this rank has failed."""
        for out in outs[1:]:
            self._windows.signal(self._window, "spoil", poison=out)
        self._windows.signal(self._window, "leave", poison=outs[0])
        self._windows.check()


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
