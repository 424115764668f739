"""One rank of a token dispatcher on a one-sided world, as runs that yield where ranks meet.

A dispatch meets twice: when counts have been written into every rank's matrix and buffers are offered, and when all
rows have been pushed. What reads from peers meets before, when values are there, and after, when they have been read.
The matrix is one for all dispatches: a rank has read it when it comes to the second meeting, and peers write again
after that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.combine_rows import combine_rows
from ..kernels.gather_values import gather_values
from ..kernels.group_rows import Groups, Slots, group_rows
from ..kernels.locate_rows import locate_rows
from ..kernels.push_rows import push_rows
from ..kernels.route_tokens import route_tokens
from ..kernels.rows import Buffers, TokenRows
from ..kernels.share_counts import share_counts
from ..kernels.weigh_rows import weigh_rows
from .bound_step import World
from .in_process import InProcessWorld
from .meeting import Address, Ask, Meet
from .token_layout import DispatchLayout

# Added to the dispatcher's token: what a meeting is for.
_OPENED, _COUNTED, _ARRIVED, _VALUES, _READ, _GRADIENTS, _PUSHED, _WEIGHED, _GATHERED = range(9)


class Slabs(NamedTuple):
    """The sizes of one dispatch's slabs, in rows, and where those that came belong: see `token_slabs`."""

    sends: torch.Tensor
    """int64 [W], on the host: to each owner; together the rows that TokenRows name."""
    receives: torch.Tensor
    """int64 [W], on the host: from each source."""
    places: torch.Tensor
    """int64 [rows]: the row in this rank's buffer of each row that it receives, by source; beyond those, 0."""


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
    """Shapes, dtypes and devices of `Sent.tensors`."""
    slots, owned = layout.bounds[-1], layout.bounds[me + 1] - layout.bounds[me]
    found = [
        ((layout.rows,), torch.float32, device),
        *[((n,), torch.int32, device) for n in (slots, slots, owned)],
        *[((owned,), torch.int64, device)] * 2,
        ((1,), torch.int32, device),
        ((2,), torch.int64, device),
        *[((tokens, layout.top_k), torch.int32, device)] * 2,
        ((layout.ranks, slots + 1), torch.int32, device),
    ]
    if in_slabs:
        found += [((layout.ranks,), torch.int64, torch.device("cpu"))] * 2 + [((layout.rows,), torch.int64, device)]
    return found


class DispatchRank:
    """Rank `ranks[me]` of a dispatcher of `ranks`."""

    def __init__(
        self, layout: DispatchLayout, world: World, ranks: tuple[int, ...], me: int, device: torch.device
    ) -> None:
        self.layout, self.world, self.me, self.device = layout, world, me, device
        self.slots = Slots.divided(layout.bounds, device)
        self.slot_of = None
        if layout.slot_of:
            self.slot_of = torch.tensor(layout.slot_of[me], dtype=torch.int32, device=device)
        # Each rank begins with the peer after itself.
        self.peers = ranks[me + 1 :] + ranks[:me]
        self._matrix: torch.Tensor | None = None
        self._matrices: Buffers | None = None

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> Generator[Ask, Any, tuple[torch.Tensor, Sent]]:
        """The rows that this rank received, [rows, H], and what combine needs."""
        layout, slots = self.layout, self.slots
        routed = route_tokens(ids, layout.num_experts, self.slot_of, slots.number)
        if self._matrix is None or self._matrices is None:
            shape = (layout.ranks, slots.number + 1)
            self._matrix = self._empty(shape, torch.int32)
            self._matrices = (yield from self._offer(_OPENED, self._matrix))[0]
        share_counts(routed.counts, self._matrices, self.me)
        received = self._empty((layout.rows, layout.hidden), layout.dtype)
        numbers = self._empty((layout.rows,), torch.float32)
        buffers = yield from self._offer(_COUNTED, received, numbers)
        groups = group_rows(
            self._matrix, slots, self.me, layout.rows, layout.align, layout.expert_capacity, layout.batched
        )
        rows = locate_rows(routed.slot, routed.place, groups, slots)
        matrix = self._matrix.clone()
        push_rows(x, rows, buffers[0], groups, self.me, weights, buffers[1], layout.most_padding)
        yield self._meet(_ARRIVED)
        return received, Sent(numbers, groups, rows, matrix)

    def combine(
        self,
        sent: Sent,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Generator[Ask, Any, torch.Tensor | None]:
        """Each token's sum into `out`. With `numbers`, float32 [rows] of each owner, those of each entry: [T, K]."""
        given = [self._addressable(values, sent)]
        if numbers is not None:
            given.append(self._addressable(numbers, sent))
        buffers = yield from self._offer(_VALUES, *given)
        combine_rows(sent.rows, buffers[0], out, weights, add)
        gathered = None if numbers is None else gather_values(sent.rows, buffers[1])
        yield self._meet(_READ)
        return gathered

    def combine_backward(
        self, sent: Sent, gradient: torch.Tensor, values: torch.Tensor | None
    ) -> Generator[Ask, Any, tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients of an owner's values, and, if they were weighted, of the weights of this rank's entries."""
        received = self._empty((self.layout.rows, self.layout.hidden), self.layout.dtype)
        buffers = yield from self._offer(_GRADIENTS, received)
        push_rows(gradient, sent.rows, buffers[0], sent.groups, self.me, most_padding=self.layout.most_padding)
        yield self._meet(_PUSHED)
        if values is None:
            return received, None
        numbers = self._empty(sent.weights.shape, torch.float32)
        weigh_rows(received, values, sent.weights, sent.groups.num_rows, received, numbers)
        buffers = yield from self._offer(_WEIGHED, numbers)
        gathered = gather_values(sent.rows, buffers[0])
        yield self._meet(_GATHERED)
        return received, gathered

    def _empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self.world.empty(shape, dtype, self.device)

    def _meet(self, what: int, offer: Address | None = None) -> Meet:
        return Meet(self.peers, self.layout.digest + what, offer)

    def _offer(self, what: int, *own: torch.Tensor) -> Generator[Ask, Any, list[Buffers]]:
        """Offer buffers; the same ones of all ranks, in their order."""
        world, number = self.world, len(own)
        address, held = world.offer(own)
        replies = yield self._meet(what, address)
        # Peers begin with the rank after this one.
        theirs: list[Any] = [world.offered(reply, number) for reply in replies]
        after = self.layout.ranks - 1 - self.me
        in_order = [*theirs[after:], None, *theirs[:after]]
        found = []
        for i, tensor in enumerate(own):
            nbytes = tensor.numel() * tensor.element_size()
            found.append(
                Buffers(
                    [
                        tensor if a is None else world.open(a[i], nbytes).view(tensor.dtype).view(tensor.shape)
                        for a in in_order
                    ]
                )
            )
        self._held = held  # until peers have read it, which they have when this is called again
        return found

    def _addressable(self, values: torch.Tensor, sent: Sent) -> torch.Tensor:
        """`values` in memory that peers can address; the rows that any of them reads."""
        if isinstance(self.world, InProcessWorld):
            return values.contiguous()
        window = self._empty(values.shape, values.dtype)
        n = int(sent.groups.num_rows)
        window[:n].copy_(values[:n])
        return window
