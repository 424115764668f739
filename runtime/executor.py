"""A rank's program bound to a world: boxes become views or kernel tables once, a call then allocates, copies and meets.

Written once for every world, as a generator that yields where ranks meet.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ..kernels import Boxes as StridedBoxes
from ..kernels import copy_boxes, copy_table, reduce_boxes, reduce_table, reduce_views, source_views, target_views
from ..planner import FILL, Boxes, Exchange, Program, Reduce, Step, check_local_shape
from .landings import LARGEST_KEPT, Landings
from .meeting import Address, Meet, Transfer

Run = Generator[Meet | Transfer, Any, torch.Tensor]

_CACHED_ADDRESSES = 64


class World(Protocol):
    """Where ranks meet."""

    one_sided: bool
    """Ranks write into each other's buffers (`Meet`), instead of sending and receiving (`Transfer`)."""
    recycles: bool
    """The same address always means the same memory, so views on it may be kept."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous tensor that nobody else holds and that peers can address."""

    def address(self, buffer: torch.Tensor) -> Address:
        """What names a tensor from `empty` on every rank."""

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the buffer at an address of this rank or a peer, as flat bytes."""

    def landings(self, ranks: tuple[int, ...]) -> Landings | None:
        """What the group of these ranks keeps ready between runs; None where no run follows another."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class _Side:
    """Where boxes lie in one buffer: offsets [n] and strides [n, axes], in elements."""

    def __init__(
        self, boxes: Boxes, start: np.ndarray, step: np.ndarray, strides: Sequence[int], base: int = 0
    ) -> None:
        per_dim = np.array(strides, dtype=np.int64)
        self.offset = start @ per_dim + base
        self.stride = step * per_dim[list(boxes.axes)]

    @classmethod
    def source(cls, boxes: Boxes, strides: Sequence[int]) -> _Side:
        return cls(boxes, boxes.source_start, boxes.source_step, strides)

    @classmethod
    def target(cls, boxes: Boxes, strides: Sequence[int], base: int = 0) -> _Side:
        return cls(boxes, boxes.target_start, boxes.target_step, strides, base)

    @classmethod
    def packed(cls, boxes: Boxes) -> _Side:
        """Boxes one after the other, each contiguous."""
        side = cls.__new__(cls)
        sizes = boxes.elements
        side.offset = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if len(sizes) else sizes
        tail = np.cumprod(np.maximum(boxes.extent[:, :0:-1], 1), axis=1)[:, ::-1]
        axes = boxes.extent.shape[1]
        side.stride = np.concatenate([tail, np.ones((len(boxes), min(axes, 1)), np.int64)], axis=1)
        return side


def _run_of(boxes: Boxes, side: _Side) -> int | None:
    """Where boxes begin that lie in memory one after the other, each contiguous, as if packed; None if they do not."""
    packed = _Side.packed(boxes)
    adjoining = (side.offset - side.offset[:1] == packed.offset).all()
    contiguous = ((side.stride == packed.stride) | (boxes.extent <= 1)).all()
    return int(side.offset[0]) if len(boxes) and adjoining and contiguous else None


class Copies:
    """Boxes copied from some tensors into others; a part is (source, target, boxes, source side, target side)."""

    def __init__(
        self, parts: Sequence[tuple[int, int, Boxes, _Side, _Side]], fill: float | int | bool, dtype: torch.dtype,
        device: torch.device
    ) -> None:  # fmt: skip
        parts = [part for part in parts if len(part[2])]
        self.empty = not parts
        if self.empty:
            return
        self.boxes = StridedBoxes(
            source=np.concatenate([np.full(len(b), s) for s, _, b, _, _ in parts])[:, None],
            target=np.concatenate([np.full(len(b), t) for _, t, b, _, _ in parts]),
            source_offset=np.concatenate([s.offset for _, _, _, s, _ in parts])[:, None],
            target_offset=np.concatenate([t.offset for _, _, _, _, t in parts]),
            extent=np.concatenate([b.extent for _, _, b, _, _ in parts]),
            source_stride=np.concatenate([s.stride for _, _, _, s, _ in parts])[:, None],
            target_stride=np.concatenate([t.stride for _, _, _, _, t in parts]),
            fill=fill,
        )
        self.table = None if device.type == "cpu" else copy_table(self.boxes, dtype, device)
        self._views: dict[Address, list[torch.Tensor]] = {}

    def knows(self, key: Address) -> bool:
        """Whether views on the memory that `key` names are kept, so that a call needs no targets."""
        return key is not None and not self.empty and key in self._views

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], key: Address = None) -> None:
        """`key` names the targets' memory: views on it are kept for the next call with the same key."""
        if self.empty:
            return
        if self.table is not None:
            copy_boxes(self.table, sources, targets)
            return
        views = None if key is None else self._views.get(key)
        if views is None:
            views = target_views(self.boxes, targets)
            if key is not None:
                if len(self._views) >= _CACHED_ADDRESSES:
                    self._views.pop(next(iter(self._views)))
                self._views[key] = views
        for target, source in zip(views, source_views(self.boxes, sources), strict=True):
            if source:
                target.copy_(source[0])
            else:
                target.fill_(self.boxes.fill)


class Reduction:
    """Boxes of `sources` reduced into boxes of `targets`: the contributor axis of `boxes` is reduced in order."""

    def __init__(self, boxes: StridedBoxes, reduce: Reduce, dtype: torch.dtype, device: torch.device) -> None:
        self.boxes, self.reduce = boxes, reduce
        divisor = None if reduce.divisor == 1 else reduce.divisor
        self.divisor = divisor
        cpu = device.type == "cpu"
        self.table = None if cpu else reduce_table(boxes, dtype, reduce.op, divisor=divisor, device=device)

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if self.table is not None:
            reduce_boxes(self.table, sources, targets)
            return
        for target, contributors in zip(
            target_views(self.boxes, targets), source_views(self.boxes, sources), strict=True
        ):
            if contributors:
                reduce_views(target, contributors, self.reduce.op, self.divisor)
            else:
                target.fill_(self.boxes.fill)


def _mine(boxes: Boxes, me: int) -> Boxes:
    return boxes.select(boxes.receiver == me)


class BoundStep:
    """What both kinds of transport need of one step on one rank."""

    def __init__(self, program: Program, step: Step, me: int, strides: Sequence[int], world: World, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.program, self.step, self.me = program, step, me
        self.world, self.dtype, self.device = world, dtype, device
        # Of a rank that is not in a mesh, and holds nothing, more strides may be given than the tensor has dims.
        self.source_strides = tuple(strides)[: len(program.shape)]
        self.shape = program.shape_after(step, me)
        self.strides = contiguous_strides(self.shape)[: len(program.shape)]
        group = program.members(step, me)
        # Each rank begins with the peer after itself: writes spread over the peers.
        start = group.index(me)
        self.peers = tuple(p for p in group[start:] + group[:start] if p != me)
        self.peer_ranks = tuple(program.mesh.rank_at(p) for p in self.peers)
        self.incoming = _mine(step.boxes, me)

    def fill_rows(self) -> Boxes:
        return self.incoming.select(self.incoming.sender[:, 0] == FILL)

    def kept_rows(self) -> Boxes:
        """Rows that this rank sends itself."""
        return self.incoming.select(self.incoming.sender[:, 0] == self.me)

    def outgoing(self, peer: int, contributor: int) -> Boxes:
        """Rows that this rank contributes to a peer."""
        boxes = self.step.boxes
        return boxes.select((boxes.receiver == peer) & (boxes.sender[:, contributor] == self.me))

    def fills(self) -> tuple[int, int, Boxes, _Side, _Side]:
        rows = self.fill_rows()
        return FILL, 0, rows, _Side.packed(rows), _Side.target(rows, self.strides)

    def empty(self) -> torch.Tensor:
        return self.world.empty(self.shape, self.dtype, self.device)

    def reduction(self, staged: list[_Side]) -> Reduction:
        """Reduce into the output from the input (source 0) and the contributions of others (source 1, at `staged`)."""
        rows, reduce = self.incoming, self.step.reduce
        assert reduce is not None
        own = _Side.source(rows, self.source_strides)
        source, offset, stride = [], [], []
        for contributor in range(reduce.contributors):
            sender = rows.sender[:, contributor]
            is_own = sender == self.me
            source.append(np.where(sender == FILL, FILL, np.where(is_own, 0, 1)))
            offset.append(np.where(is_own, own.offset, staged[contributor].offset))
            stride.append(np.where(is_own[:, None], own.stride, staged[contributor].stride))
        target = _Side.target(rows, self.strides)
        boxes = StridedBoxes(
            source=np.stack(source, axis=1),
            target=np.zeros(len(rows), np.int64),
            source_offset=np.stack(offset, axis=1),
            target_offset=target.offset,
            extent=rows.extent,
            source_stride=np.stack(stride, axis=1),
            target_stride=target.stride,
            fill=self.step.fill,
        )
        return Reduction(boxes, reduce, self.dtype, self.device)


class OneSidedStep(BoundStep):
    """Ranks push into each other's buffers and meet: the outputs themselves, or slabs of contributions.

    Where contributions are reduced, a rank's buffer is [contributors, *output shape]: where a box goes follows from its
    contributor and its place in the output, so senders need nothing that the plan does not say. The one contribution
    that a rank's own is added to lands in the output itself.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        step, reduce = self.step, self.step.reduce
        two = bool(reduce and reduce.contributors == 2 and self.peers)
        self.lands_in_output = reduce is None or (two and step.receivers_contribute)
        slabs = reduce.contributors if reduce and not self.lands_in_output else 1
        self.landing_shape = self.shape if self.lands_in_output else (slabs, *self.shape)
        self.pushes: list[tuple[int, int, Copies]] = []
        largest = self.nbytes(self.shape, slabs)
        for index, peer in enumerate(self.peers):
            shape = self.program.shape_after(step, peer)
            strides, nbytes = contiguous_strides(shape)[: len(self.program.shape)], self.nbytes(shape, slabs)
            largest = max(largest, nbytes)
            parts = []
            for contributor in range(reduce.contributors if reduce else 1):
                rows = self.outgoing(peer, contributor)
                target = _Side.target(rows, strides, 0 if self.lands_in_output else contributor * math.prod(shape))
                parts.append((0, 0, rows, _Side.source(rows, self.source_strides), target))
            copies = Copies(parts, step.fill, self.dtype, self.device)
            if not copies.empty:
                self.pushes.append((index, nbytes, copies))
        self.own_nbytes, self.largest = self.nbytes(self.shape, slabs), largest
        group = tuple(sorted((self.program.mesh.rank_at(self.me), *self.peer_ranks)))
        # Between meshes each rank has peers of its own, so what is kept would not be alike on both sides.
        alike = isinstance(step, Exchange) and step.group is not None
        self.landings = self.world.landings(group) if alike and self.peers and largest <= LARGEST_KEPT else None
        self.own: Copies | None = None
        if reduce:
            slab = 0 if self.lands_in_output else math.prod(self.shape)
            staged = [_Side.target(self.incoming, self.strides, c * slab) for c in range(reduce.contributors)]
            self.reduce = self.reduction(staged)
        else:
            rows = self.kept_rows()
            sides = _Side.source(rows, self.source_strides), _Side.target(rows, self.strides)
            self.own = Copies([(0, 0, rows, *sides), self.fills()], step.fill, self.dtype, self.device)

    def nbytes(self, shape: Sequence[int], slabs: int) -> int:
        return math.prod(shape) * slabs * self.dtype.itemsize

    def land(self) -> torch.Tensor:
        """A buffer for what peers push."""
        return self.world.empty(self.landing_shape, self.dtype, self.device)

    def push(self, x: torch.Tensor, copies: Copies, address: Address, nbytes: int) -> None:
        """Copy boxes of `x` into the buffer at an address, this rank's own included."""
        key = address if self.world.recycles else None
        copies([x], () if copies.knows(key) else [self.world.open(address, nbytes).view(self.dtype)], key)

    def run(self, x: torch.Tensor, token: int) -> Run:
        if self.peers:
            landing = yield from self.exchange(x, token)
        elif self.own:
            landing = self.land()
            self.push(x, self.own, self.world.address(landing), self.own_nbytes)
        else:
            landing = x  # nothing comes from anyone else
        if self.own:
            return landing
        out = landing if self.lands_in_output else self.empty()
        self.reduce([x, landing], [out])
        return out

    def exchange(self, x: torch.Tensor, token: int) -> Run:
        """Push to peers and be pushed to."""
        world, landings = self.world, self.landings
        kept = landings.take(token) if landings else None
        if kept is None:
            landing = self.land()
            address = world.address(landing)
            addresses = yield Meet(self.peer_ranks, token, address)
        else:
            landing, address, addresses = kept
        for index, nbytes, copies in self.pushes:
            self.push(x, copies, addresses[index], nbytes)
        own = partial(self.push, x, self.own, address, self.own_nbytes) if self.own else None
        if landings is None:
            yield Meet(self.peer_ranks, token + 1, None, own)
        else:
            following = self.land()
            address = world.address(following)
            addresses = yield Meet(self.peer_ranks, token + 1, address, own)
            landings.keep(token, following, address, addresses, self.largest)
        return landing


class TwoSidedStep(BoundStep):
    """Pack what each peer needs, send and receive with exact sizes, unpack or reduce what came.

    What lies in one run of memory is sent from where it is, and received where it belongs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        step, reduce = self.step, self.step.reduce
        contributors = reduce.contributors if reduce else 1
        self.sends: list[tuple[int, int, Copies | int]] = []
        """Rank, elements, and how they are packed or where they begin."""
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            parts, base = [], 0
            for contributor in range(contributors):
                rows = self.outgoing(peer, contributor)
                if elements := int(rows.elements.sum()):
                    packed = _Side.packed(rows)
                    packed.offset = packed.offset + base
                    base += elements
                    parts.append((0, 0, rows, _Side.source(rows, self.source_strides), packed))
            if base:
                run = _run_of(parts[0][2], parts[0][3]) if len(parts) == 1 else None
                packing = Copies(parts, step.fill, self.dtype, self.device) if run is None else run
                self.sends.append((rank, base, packing))
        # What a peer sends comes contributor by contributor, in the order of rows, as the peer packs it.
        self.receives: list[tuple[int, int, int, bool]] = []
        """Rank, first and last element, and whether in the output itself."""
        staged = [_Side.target(self.incoming, self.strides) for _ in range(contributors)]
        unpack: list[tuple[int, int, Boxes, _Side, _Side]] = []
        base = 0
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            first = base
            for contributor in range(contributors):
                here = np.flatnonzero(self.incoming.sender[:, contributor] == peer)
                rows = self.incoming.select(here)
                target = _Side.target(rows, self.strides)
                run = None if reduce else _run_of(rows, target)
                if run is not None:
                    self.receives.append((rank, run, run + int(rows.elements.sum()), True))
                    continue
                packed = _Side.packed(rows)
                packed.offset = packed.offset + base
                staged[contributor].offset[here] = packed.offset
                staged[contributor].stride[here] = packed.stride
                unpack.append((1, 0, rows, packed, target))
                base += int(rows.elements.sum())
            if base > first:
                self.receives.append((rank, first, base, False))
        self.received = base
        if reduce:
            self.finish: Reduction | Copies = self.reduction(staged)
        else:
            rows = self.kept_rows()
            sides = _Side.source(rows, self.source_strides), _Side.target(rows, self.strides)
            parts = [(0, 0, rows, *sides), self.fills(), *unpack]
            self.finish = Copies(parts, step.fill, self.dtype, self.device)

    def run(self, x: torch.Tensor, token: int) -> Run:
        out = self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.peers:
            sends = []
            for rank, elements, packing in self.sends:
                if isinstance(packing, int):
                    buffer = x.as_strided((elements,), (1,), x.storage_offset() + packing)
                else:
                    buffer = torch.empty(elements, dtype=self.dtype, device=self.device)
                    packing([x], [buffer])
                sends.append((rank, buffer.view(torch.uint8)))
            landed, arrived, size = out.view(-1).view(torch.uint8), received.view(torch.uint8), self.dtype.itemsize
            receives = [
                (rank, (landed if final else arrived)[first * size : last * size])
                for rank, first, last, final in self.receives
            ]
            yield Transfer(tuple(sends), tuple(receives))
        self.finish([x, received], [out])
        return out


class BoundProgram:
    """One rank's program on one world, for inputs with the given strides.

    Attributes:
        token: what ranks compare when they meet; differs for different requests.
    """

    def __init__(
        self, program: Program, position: int, strides: Sequence[int], world: World, dtype: torch.dtype, device:
        torch.device
    ) -> None:  # fmt: skip
        self.program, self.position, self.token = program, position, program.digest & ~0xFFFF
        kind = OneSidedStep if world.one_sided else TwoSidedStep
        self.steps: list[OneSidedStep | TwoSidedStep] = []
        for i, step in enumerate(program.steps):
            before = strides if i == 0 else contiguous_strides(program.shape_before(step, position))
            self.steps.append(kind(program, step, position, before, world, dtype, device))

    def check(self, x: torch.Tensor) -> None:
        check_local_shape(self.program, self.position, x.shape)

    def run(self, x: torch.Tensor) -> Run:
        """Yields where ranks meet; returns the target shard. The input is only read."""
        if len(self.steps) == 1:
            return self.steps[0].run(x, self.token)
        return self._run_all(x)

    def _run_all(self, x: torch.Tensor) -> Run:
        for i, step in enumerate(self.steps):
            x = yield from step.run(x, self.token + 2 * i)
        return x
