"""The table of the boxes that ranks transfer in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from .intersection import Intersection

FILL = -1
"""The sender of boxes that are filled with the identity of the target's partial op."""


class Row(NamedTuple):
    """One row of a `TransferTable`, as Python numbers."""

    receiver: int
    senders: list[int]
    source_start: list[int]
    target_start: list[int]
    extent: list[int]
    source_step: list[int]
    target_step: list[int]


@dataclass(frozen=True, eq=False)
class TransferTable:
    """The boxes that ranks transfer: n rows over k axes, all int64 arrays.

    A row copies one box of the shard of each of its senders to one box of the receiver's shard. Axis a of a box runs
    along tensor dim `axes[a]` with a step, so that strided index sets need no other representation.

    Attributes:
        receiver: [n] mesh positions.
        sender: [n, contributors] mesh positions, in the order of reduction; `FILL` for boxes without a sender.
        source_start, target_start: [n, tensor dims] indices into the local shards.
        extent: [n, axes] elements along each axis.
        source_step, target_step: [n, axes] steps in the local shards.
        axes: the tensor dim of each axis.
    """

    receiver: np.ndarray
    sender: np.ndarray
    source_start: np.ndarray
    target_start: np.ndarray
    extent: np.ndarray
    source_step: np.ndarray
    target_step: np.ndarray
    axes: tuple[int, ...]

    def __len__(self) -> int:
        rows = self.__dict__.get("_rows")
        return len(self.receiver if rows is None else rows)

    @property
    def elements(self) -> np.ndarray:
        """[n] the elements of each box."""
        return self.extent.prod(axis=1)

    @classmethod
    def from_rows(cls, rows: list[Row], contributors: int, axes: tuple[int, ...]) -> TransferTable:
        """A table of contiguous boxes, with one axis per tensor dim; the arrays are made when one is first read."""
        table = cls.__new__(cls)
        table.__dict__.update(_rows=rows, _contributors=contributors, axes=axes)
        return table

    def __getattr__(self, name: str) -> np.ndarray:
        """Makes the arrays of a table `from_rows`."""
        attributes = self.__dict__
        if "_rows" not in attributes or name not in _COLUMNS:
            raise AttributeError(f"TransferTable has no attribute {name!r}")
        n, widths = len(attributes["_rows"]), {"receiver": (), "sender": (attributes["_contributors"],)}
        columns = zip(*attributes["_rows"], strict=True) if n else [()] * len(_COLUMNS)
        for column, values in zip(_COLUMNS, columns, strict=True):
            shape = (n, *widths.get(column, (len(self.axes),)))
            attributes[column] = np.array(values, dtype=np.int64).reshape(shape)
        return attributes[name]

    def rows(self) -> list[Row]:
        """The rows as Python numbers, which for a few rows are faster to loop over than arrays. Read-only."""
        if (rows := self.__dict__.get("_rows")) is not None:
            return rows
        return list(map(Row, *[getattr(self, column).tolist() for column in _COLUMNS]))

    def select(self, rows: np.ndarray) -> TransferTable:
        """The rows of a mask or of an index array."""
        return TransferTable(
            self.receiver[rows],
            self.sender[rows],
            self.source_start[rows],
            self.target_start[rows],
            self.extent[rows],
            self.source_step[rows],
            self.target_step[rows],
            self.axes,
        )

    def has_foreign_rows(self) -> bool:
        """Whether a rank receives anything from another."""
        rows = self.__dict__.get("_rows")
        if rows is None:
            return bool(((self.sender != self.receiver[:, None]) & (self.sender != FILL)).any())
        for row in rows:
            for sender in row.senders:
                if sender != row.receiver and sender != FILL:
                    return True
        return False

    def elements_received(self, position: int) -> int:
        """The elements that `position` receives from other ranks."""
        mine = self.receiver == position
        foreign = (self.sender[mine] != position) & (self.sender[mine] != FILL)
        return int((foreign.sum(axis=1) * self.elements[mine]).sum())

    @classmethod
    def of_parts(cls, parts: Sequence[Part]) -> TransferTable:
        """The rows of all parts, in their order."""
        sizes = [len(part.receiver) for part in parts]
        columns = {name: _joined([getattr(part.boxes, name) for part in parts], sizes) for name in _BOX_COLUMNS}
        receiver, sender = (np.concatenate(x) for x in zip(*[part[1:] for part in parts], strict=True))
        return cls(receiver, sender, axes=parts[0].boxes.axes, **columns)


class Part(NamedTuple):
    """Rows of a table: the boxes of an intersection, and the receiver [n] and the senders [n, contributors] of each."""

    boxes: Intersection
    receiver: np.ndarray
    sender: np.ndarray


def _joined(parts: Sequence[Sequence[np.ndarray]], sizes: Sequence[int]) -> np.ndarray:
    """[n, columns] the columns of each part, of so many rows, one part after the other. A table of a single value is a
    broadcast array: there may be many rows, and most steps are 1."""
    columns = [x for of_part, size in zip(parts, sizes, strict=True) if size for x in of_part]
    if columns and all(x.ndim == 0 and x == columns[0] for x in columns):
        return np.broadcast_to(columns[0], (sum(sizes), len(parts[0])))
    table, first = np.empty((len(parts[0]), sum(sizes)), dtype=np.int64), 0
    for of_part, size in zip(parts, sizes, strict=True):
        for row, x in zip(table, of_part, strict=True):
            row[first : first + size] = x
        first += size
    return table.T


_COLUMNS = tuple([f.name for f in fields(TransferTable) if f.name != "axes"])
_BOX_COLUMNS = _COLUMNS[2:]
