"""A program as torch's operators and functional collectives, which are traced into a graph.

Each exchange is one collective: what this rank sends to each rank of the process group is sliced, concatenated and sent
by `all_to_all_single` with sizes that the program has fixed. A step that is an all-gather of shards of one size is
`all_gather_into_tensor`; with `reduction="fast"` sums are `reduce_scatter_tensor` and `all_reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...kernels import reduce_terms
from ...planner import FILL, Exchange, NodeLayout, Program, Row, Step, backend_reduction, is_even_all_gather
from .boxes import Piece, Size, extent_of, put_together, read_box

_c10d: Any = torch.ops._c10d_functional
_SENT_AS_THEY_ARE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""The dtypes that all backends send. Others are sent as bytes."""


class Group(NamedTuple):
    """A process group.

    Attributes:
        name: by which functional collectives find it.
        ranks: in its order.
    """

    name: str
    ranks: tuple[int, ...]


class Collective(NamedTuple):
    """A collective in a graph.

    Attributes:
        kind: "all-to-all", "all-gather", "reduce-scatter" or "all-reduce".
        group: of which some ranks may send and receive nothing.
    """

    kind: str
    group: Group


def collectives_of(
    program: Program, find_group: Callable[[tuple[int, ...] | None], Group], reduction: str
) -> list[Collective | None]:
    """The collective of each step of this rank's program; None for steps without one.

    Args:
        find_group: a process group with these ranks, and possibly with others of the program; None: with all of them.
        reduction: "ordered" or "fast".

    Raises:
        UnsupportedError: from `find_group`.
    """
    (position,) = program.ranks
    chosen: list[Collective | None] = []
    for step in program.steps:
        if not isinstance(step, Exchange):
            chosen.append(None)
            continue
        members = program.members(step, position)
        # Between meshes, and for parts of nodes, each rank has members of its own: all ranks of the program take part.
        alike = step.group is not None and not any(isinstance(x, NodeLayout) for x in (step.source, step.target))
        group = find_group(tuple(map(program.mesh.rank_at, members)) if alike else None)
        kind = None
        if alike and len(group.ranks) == len(members):
            if reduction == "fast":
                kind = backend_reduction(program, step, members)
            if kind is None and is_even_all_gather(program, step, members):
                kind = "all-gather"
        chosen.append(Collective(kind or "all-to-all", group))
    return chosen


def lower(
    program: Program, collectives: Sequence[Collective | None], scale: Sequence[Size], x: torch.Tensor
) -> torch.Tensor:
    """Run this rank's program on its shard `x` in torch's operators.

    Args:
        collectives: of each step (`collectives_of`).
        scale: the elements along each tensor dim that one index of the program stands for.

    Returns:
        This rank's shard of the target: contiguous, in memory that nothing else uses; `x` itself if there are no steps.
    """
    for step, collective in zip(program.steps, collectives, strict=True):
        x = _TracedStep(program, step, collective, scale).run(x)
    return x


class _TracedStep:
    """One step of this rank's program."""

    def __init__(self, program: Program, step: Step, collective: Collective | None, scale: Sequence[Size]) -> None:
        (self.me,) = program.ranks
        self.program, self.step, self.collective, self.scale = program, step, collective, scale
        self.axes = step.boxes.axes
        ndim = len(program.shape)
        self.held_before = program.shape_before(step, self.me)[:ndim]
        self.held_after = program.shape_after(step, self.me)[:ndim]
        self.rows = step.boxes.rows()
        self.incoming = [row for row in self.rows if row.receiver == self.me]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        kind = None if self.collective is None else self.collective.kind
        if kind == "all-reduce":
            return self._all_reduce(x)
        if kind == "reduce-scatter":
            return self._reduce_scatter(x)
        if kind == "all-gather":
            return self._all_gather(x)
        receives = any(sender not in (self.me, FILL) for row in self.incoming for sender in row.senders)
        received = self._all_to_all(x)[0] if kind is not None and receives else {}
        pieces = []
        for index, row in enumerate(self.incoming):
            terms = [
                self._read(x, row) if sender == self.me else received[index, number]
                for number, sender in enumerate(row.senders)
                if sender != FILL
            ]
            pieces.append(self._piece(row, self._reduced(terms, row, x)))
        out = self._put_together(pieces, x)
        if kind is not None and not receives:
            # What this rank keeps goes through the exchange, so that the result depends on it. Else torch would remove
            # the exchange from the graph, or move it, on this rank alone.
            return self._all_to_all(x, out)[1].view(out.shape)
        if len(pieces) == 1 and self.step.reduce is None and self.incoming[0].senders[0] == self.me:
            return out.clone(memory_format=torch.contiguous_format)  # a view of the input
        return out.contiguous()  # sums and concatenations keep the order in memory of a term that is a view

    def _all_to_all(
        self, x: torch.Tensor, kept: torch.Tensor | None = None
    ) -> tuple[dict[tuple[int, int], torch.Tensor], torch.Tensor]:
        """Exchange boxes, and send `kept` to this rank itself.

        Returns:
            The values by the index of the row in `incoming` and that of the contributor, and the buffer that they are
            in, or that has the elements of `kept`.
        """
        assert self.collective is not None
        sent: list[torch.Tensor] = []
        sent_sizes: list[Size] = []
        places: list[tuple[tuple[int, int], list[Size]]] = []
        received_sizes: list[Size] = []
        for rank in self.collective.group.ranks:
            peer = self._positions.get(rank)
            boxes, arriving = [], []
            if peer == self.me:
                boxes = [] if kept is None else [kept]
            elif peer is not None:
                boxes = [self._read(x, row) for _, row in self._rows_between(self.me, peer)]
                arriving = [
                    ((self._index_of[id(row)], number), extent_of(row.extent, self.axes, self.scale))
                    for number, row in self._rows_between(peer, self.me)
                ]
            sent += [box.reshape(-1) for box in boxes]
            sent_sizes.append(sum(box.numel() for box in boxes))
            places += arriving
            received_sizes.append(
                sent_sizes[-1] if peer == self.me else sum(math.prod(extent) for _, extent in arriving)
            )
        # Every message depends on `x`, those without elements of it too: what does not depend on gradients, torch would
        # move from the backward graph to the forward, on this rank alone.
        if kept is not None or not sent:
            sent.append(x.reshape(1)[:0] if x.ndim == 0 else x.narrow(0, 0, 0).reshape(-1))
        message = torch.cat(sent) if len(sent) > 1 else sent[0].contiguous()
        width = 1 if message.dtype in _SENT_AS_THEY_ARE else message.element_size()
        splits = [[n * width for n in sizes] for sizes in (received_sizes, sent_sizes)]
        name = self.collective.group.name
        buffer = _sent(message, lambda y: _c10d.all_to_all_single(y, *splits, name))
        values: dict[tuple[int, int], torch.Tensor] = {}
        at: Size = 0
        for place, extent in places:
            size = math.prod(extent)
            values[place] = (buffer if len(places) == 1 else buffer.narrow(0, at, size)).view(extent)
            at = at + size
        return values, buffer

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert self.collective is not None
        ranks, name = self.collective.group.ranks, self.collective.group.name
        gathered = _sent(x.contiguous(), lambda y: _c10d.all_gather_into_tensor(y, len(ranks), name))
        if self._follow_each_other(
            [row for rank in ranks for _, row in self._rows_between(self._positions[rank], self.me)]
        ):
            return gathered.view([n * unit for n, unit in zip(self.held_after, self.scale, strict=True)])
        shards = dict(zip(ranks, gathered.chunk(len(ranks)), strict=True))
        rank_at = self.program.mesh.rank_at
        pieces = [self._piece(row, self._read(shards[rank_at(row.senders[0])], row)) for row in self.incoming]
        return self._put_together(pieces, x).contiguous()

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        assert self.collective is not None
        ranks, name = self.collective.group.ranks, self.collective.group.name
        pieces = []
        for rank in ranks:
            pieces += [row for _, row in self._rows_between(self.me, self._positions[rank])]
        (row,) = self.incoming
        starts = [row.source_start for row in pieces]
        if starts == [[i * row.extent[0], *[0] * (x.ndim - 1)] for i in range(len(ranks))]:
            terms = x.contiguous()
        else:
            terms = torch.cat([self._read(x, row) for row in pieces])
        out = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(terms, self._backend_op, len(ranks), name))
        return self._divided(out.view(extent_of(row.extent, self.axes, self.scale)))

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self.collective is not None
        terms = self._put_together([self._piece(row, self._read(x, row)) for row in self.incoming], x)
        return self._divided(
            _c10d.wait_tensor(_c10d.all_reduce(terms.contiguous(), self._backend_op, self.collective.group.name))
        )

    def _follow_each_other(self, rows: Sequence[Row]) -> bool:
        """Whether the rows are whole shards that follow each other in the memory of the output: along its first dim, or
        the first one that is longer than 1."""
        ndim = len(self.held_before)
        sizes = zip(self.held_after, self.scale, strict=True)
        first = next((d for d, (n, unit) in enumerate(sizes) if n > 1 or isinstance(unit, torch.SymInt)), 0)
        length = self.held_before[first]
        return list(self.axes) == list(range(ndim)) and all(
            tuple(row.extent) == self.held_before
            and row.target_step == [1] * ndim
            and row.target_start == [number * length if d == first else 0 for d in range(ndim)]
            for number, row in enumerate(rows)
        )

    @property
    def _backend_op(self) -> str:
        assert self.step.reduce is not None
        return "product" if self.step.reduce.op == "prod" else self.step.reduce.op

    def _divided(self, x: torch.Tensor) -> torch.Tensor:
        assert self.step.reduce is not None
        divisor = self.step.reduce.divisor
        return x if divisor == 1 else x / divisor

    @cached_property
    def _positions(self) -> dict[int, int]:
        """The positions in the program's mesh, by rank."""
        return {self.program.mesh.rank_at(position): position for position in range(self.program.mesh.size)}

    @cached_property
    def _index_of(self) -> dict[int, int]:
        """The index of each row in `incoming`."""
        return {id(row): index for index, row in enumerate(self.incoming)}

    def _rows_between(self, sender: int, receiver: int) -> list[tuple[int, Row]]:
        """The rows of one sender and one receiver, with the index of the contributor, in the order in which both of
        them pack."""
        rows = self.incoming if receiver == self.me else [row for row in self.rows if row.receiver == receiver]
        found = [(number, row) for row in rows for number, other in enumerate(row.senders) if other == sender]
        return sorted(found, key=lambda item: item[0])

    def _read(self, x: torch.Tensor, row: Row) -> torch.Tensor:
        return read_box(x, self.held_before, row.source_start, row.extent, row.source_step, self.axes, self.scale)

    def _piece(self, row: Row, value: torch.Tensor) -> Piece:
        return Piece(row.target_start, row.target_step, row.extent, value)

    def _put_together(self, pieces: Sequence[Piece], like: torch.Tensor) -> torch.Tensor:
        return put_together(pieces, self.held_after, self.axes, self.scale, like)

    def _reduced(self, terms: list[torch.Tensor], row: Row, like: torch.Tensor) -> torch.Tensor:
        reduce = self.step.reduce
        if not terms:
            return like.new_full(extent_of(row.extent, self.axes, self.scale), self.step.fill)
        if reduce is None:
            return terms[0]
        return reduce_terms(terms, reduce.op, None if reduce.divisor == 1 else reduce.divisor)


def _sent(x: torch.Tensor, collective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The result of a collective that moves a contiguous tensor, as bytes where backends do not know its dtype."""
    if x.dtype in _SENT_AS_THEY_ARE:
        return _c10d.wait_tensor(collective(x))
    return _c10d.wait_tensor(collective(x.view(torch.uint8))).view(x.dtype)
