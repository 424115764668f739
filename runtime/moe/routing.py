"""What a rank knows of one dispatch, but for the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels import Groups, TokenRows
from .config import DispatchLayout


class Slabs(NamedTuple):
    """The sizes of one dispatch's slabs, in rows, and where those that came belong: see `token_slabs`."""

    sends: torch.Tensor
    """int64 [W], on the host: to each owner; together the rows that TokenRows name."""
    receives: torch.Tensor
    """int64 [W], on the host: from each source."""
    padding: torch.Tensor
    """int64 [1], on the host: padding rows of this rank's buffer."""
    places: torch.Tensor
    """int64: the row in this rank's buffer of each row that it receives, by source. Of slabs of exact size [rows], then
    the padding rows, beyond those 0; of slabs of one size [W * slab_capacity], -1 where there is no row."""


class Sent(NamedTuple):
    """What a rank knows of one dispatch, but for the rows themselves."""

    weights: torch.Tensor
    """float32 [rows], of the rows that it received."""
    groups: Groups
    rows: TokenRows
    matrix: torch.Tensor
    """int32 [W, S + 1]: rows of each slot by source rank; the last column counts bad ids."""
    slabs: Slabs | None = None
    """Of ranks that send and receive. The rows of `rows` are then those of this rank's slabs."""

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in one order."""
        return [self.weights, *self.groups, *self.rows, self.matrix, *(self.slabs or ())]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Sent:
        """The inverse of `tensors`."""
        groups, rows = 1 + len(Groups._fields), 1 + len(Groups._fields) + len(TokenRows._fields)
        slabs = tensors[rows + 1 :]
        return cls(
            tensors[0],
            Groups(*tensors[1:groups]),
            TokenRows(*tensors[groups:rows]),
            tensors[rows],
            Slabs(*slabs) if slabs else None,
        )

    @staticmethod
    def number(in_slabs: bool) -> int:
        """How many `tensors` there are."""
        return 2 + len(Groups._fields) + len(TokenRows._fields) + (len(Slabs._fields) if in_slabs else 0)


def specs_of_sent(
    layout: DispatchLayout, me: int, tokens: int, device: torch.device, in_slabs: bool
) -> list[tuple[tuple[int, ...], torch.dtype, torch.device]]:
    """Shapes, dtypes and devices of `Sent.tensors` but the first, the weights."""
    slots, owned = layout.bounds[-1], layout.bounds[me + 1] - layout.bounds[me]
    found = [
        *[((n,), torch.int32, device) for n in (slots, slots, owned)],
        *[((owned,), torch.int64, device)] * 2,
        ((1,), torch.int32, device),
        ((2,), torch.int64, device),
        *[((tokens, layout.top_k), torch.int32, device)] * 2,
        ((layout.ranks, slots + 1), torch.int32, device),
    ]
    if in_slabs:
        host = torch.device("cpu")
        found += [((n,), torch.int64, host) for n in (layout.ranks, layout.ranks, 1)]
        places = layout.rows if layout.slab_capacity is None else layout.ranks * layout.slab_capacity
        found.append(((places,), torch.int64, device))
    return found
