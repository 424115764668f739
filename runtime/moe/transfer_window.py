"""One rank of a token dispatcher on a transport whose ranks meet on the device: rows go into memory that their owner
lends, or through a window of their group.

A window has the counts of all ranks, then weights of the rows that an owner receives, then rows, at the same places on
all ranks. A dispatch enters it, meets when the counts are there and once more when the rows are, copies what came, and
leaves. With its counts a rank tells where it wants its rows: in memory that it lends to them (`Leases`), where they
stay, or, while all of that is lent, in the window. What reads from peers copies its values into the own window, meets,
reads the peers' and leaves. The host waits for no peer and reads nothing, and dispatches that follow each other, and
redistributions among the same ranks, take turns with one window.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch

from ...kernels import Buffers, ChosenBuffers, copy_rows, push_rows, share_counts
from ..statistics import stats
from ..transports.buffer_pool import Leases, LendingTransport
from ..transports.requests import CommRequest
from ..transports.symmetric_memory.window import ALIGNMENT, window_size
from .config import DispatchLayout, up
from .routing import Sent
from .transfer import Read, Take, TokenRank

_LAST = 1  # the second meeting of a run, added to what it is for


def window_nbytes(layout: DispatchLayout) -> int:
    """What a rank's part of a window takes."""
    return sum(up(math.prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in _parts(layout))


def lends(layout: DispatchLayout) -> bool:
    """Whether rows may stay where peers wrote them."""
    return bool(layout.leases and lease_nbytes(layout)) and layout.save != "copy"


def lease_nbytes(layout: DispatchLayout) -> int:
    """What the rows of one dispatch take."""
    return layout.rows * layout.hidden * layout.dtype.itemsize


def _parts(layout: DispatchLayout) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Counts and where rows are wanted, weights of rows, and rows."""
    return [
        ((layout.ranks, layout.bounds[-1] + 2), torch.int32),
        ((layout.rows,), torch.float32),
        ((layout.rows, layout.hidden), layout.dtype),
    ]


class WindowRank(TokenRank):
    """Peers write into this rank's memory, and read its window."""

    in_windows = True
    words_told = 1  # where it wants its rows
    way = "rows pushed into memory that their owner lends, or into its window, which copies those that came"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layout, self._windows, group = self.layout, cast("LendingTransport", self.transport), tuple(sorted(self.ranks))
        self._window = self._windows.window(group, window_nbytes(layout))
        self._window.build(layout.dtype)
        self._window.build(torch.float32)
        first, found = 0, []
        for shape, dtype in _parts(layout):
            nbytes = math.prod(shape) * dtype.itemsize
            found.append(self._buffers({r: data[first : first + nbytes] for r, data in self._window.data.items()},
                                       dtype, shape))  # fmt: skip
            first += up(nbytes, ALIGNMENT)
        self._matrices, self._numbers, self._rows = (Buffers(parts, self.tables) for parts in found)
        self._leases: Leases | None = None
        lent: list[list[torch.Tensor]] = []
        if lends(layout):
            self._leases = self._windows.leases(group, lease_nbytes(layout), layout.leases)
            pieces = [{r: m[:nbytes] for r, m in piece.items()} for piece in self._leases.pieces]
            lent = [self._buffers(piece, layout.dtype, shape) for piece in pieces]
        # Of each owner its window, then what it may lend.
        self._each = 1 + len(lent)
        self._places = Buffers([b for of_owner in zip(found[-1], *lent, strict=True) for b in of_owner], self.tables)
        for buffers in (self._matrices, self._numbers, self._rows, self._places):
            buffers.table()  # uploaded here, and not in a call that is captured in a graph

    def _buffers(
        self, memory: Mapping[int, torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """By rank of the dispatcher, of memory by rank."""
        return [memory[rank].view(dtype).view(shape) for rank in self.ranks]

    @classmethod
    def nbytes(cls, layout: DispatchLayout, slab_capacity: int | None) -> dict[str, int]:
        window = "window, which dispatches and redistributions among these ranks share"
        found = {**super().nbytes(layout, slab_capacity), window: window_size(window_nbytes(layout))}
        if lends(layout):
            found[f"rows received that stay where they came, leases={layout.leases}"] = layout.leases * lease_nbytes(
                layout
            )
        return found

    @classmethod
    def received(cls, layout: DispatchLayout) -> str:
        if layout.save == "copy":
            return "rows received, held until backward"
        return super().received(layout) + (", while all leases are lent" if lends(layout) else "")

    def combine(
        self, sent: Sent, values: torch.Tensor, out: torch.Tensor, *rest: Any, **named: Any
    ) -> Generator[CommRequest, Any, torch.Tensor | None]:
        # What is overwritten where a rank failed is contiguous.
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        try:
            return (yield from super().combine(sent, values, whole, *rest, **named))
        finally:
            if whole is not out:
                out.copy_(whole)

    def _rows_to_receive(self) -> torch.Tensor:
        if self._leases is None:
            return self._new_rows()
        lent = self._leases.lend()
        if lent is None:
            stats().copies["rows of a token dispatch: all leases are lent"] += 1
            return self._new_rows()
        # No view, which autograd would let nobody write.
        rows = torch.empty(0, dtype=self.layout.dtype, device=self.device)
        return rows.set_(lent.untyped_storage(), 0, (self.layout.rows, self.layout.hidden), (self.layout.hidden, 1))

    def _share(
        self, what: int, own: Sequence[torch.Tensor], counts: torch.Tensor | None = None
    ) -> Generator[CommRequest, Any, tuple[Any, torch.Tensor | None]]:
        yield from ()  # a generator, as for all ranks
        self._signal("acquire")
        if counts is None:
            return (self._rows, own), None
        lent = self._lent(own[0])
        share_counts(counts, self._matrices, self.me, self.me * self._each + (0 if lent is None else 1 + lent))
        self._signal("barrier", what)
        # Where a rank did not come, or asked for something else, what lies there are no counts, and no places.
        told = torch.where(self._window.failure.error == 0, self._matrices.tensors[self.me], 0)
        return (ChosenBuffers(self._places, told[:, -1]), own), told[:, :-1].contiguous()

    def _deliver(
        self,
        what: int,
        sent: Sent,
        x: torch.Tensor,
        into: Any,
        weights: torch.Tensor | None = None,
        take: Take | None = None,
    ) -> Generator[CommRequest, Any, None]:
        yield from ()
        places, own = into
        push_rows(
            x, sent.rows, places, sent.groups, self.me, weights, None if weights is None else self._numbers,
            self.layout.most_padding,
        )  # fmt: skip
        self._signal("barrier", what + _LAST)
        rows, numbers = self._rows.tensors[self.me], self._numbers.tensors[self.me]
        if take is not None:
            take(rows)
        elif self._lent(own[0]) is None:
            copy_rows(rows, own[0], sent.groups.num_rows)
        if weights is not None:
            copy_rows(numbers, own[1], sent.groups.num_rows)
        self._leave(own)

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[CommRequest, Any, list[torch.Tensor]]:
        yield from ()
        windows = [self._rows if values.dim() == 2 else self._numbers for values in given]
        self._signal("acquire")
        for values, window in zip(given, windows, strict=True):
            copy_rows(values.contiguous(), window.tensors[self.me], sent.groups.num_rows)
        self._signal("barrier", what)
        found = read(windows)
        self._leave(found)
        return found

    def _lent(self, rows: torch.Tensor) -> int | None:
        """Which lease rows are on; None where they are on none."""
        return None if self._leases is None else self._leases.number(rows)

    def _signal(self, use: Any, what: int = 0) -> None:
        self._windows.signal(self._window, use, self.token + what)

    def _leave(self, outs: Sequence[torch.Tensor]) -> None:
        """`outs` are overwritten if this rank has failed."""
        for out in outs[1:]:
            self._windows.signal(self._window, "poison", poison=out)
        self._windows.signal(self._window, "release", poison=outs[0])
        self._windows.check()
