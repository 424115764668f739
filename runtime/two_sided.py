"""A step on a world whose ranks send and receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..planner import FILL, Boxes, Exchange, Step
from .bound_step import BoundStep, Run
from .copies import Copies, Patchwork, Reduction, Side, Terms, Whole, is_plain, run_of
from .lowering import BACKENDS, Lowering
from .meeting import HEADER, AllGather, AllToAll, Transfer

Part = tuple[int, int, Boxes, Side, Side]
_PACKED = -1  # in place of a buffer
_ALIGNMENT = 16  # bytes; of each message in a buffer that kernels pack or unpack, so that they move wide words


class SharedBuffers(NamedTuple):
    """Where buffers that other tensors share hold what goes to each peer and what comes from it, in elements, by the
    peer's position."""

    sent_at: Mapping[int, int]
    received_at: Mapping[int, int]


class TwoSidedStep(BoundStep):
    """Pack what peers need, send and receive with exact sizes, unpack or reduce what came: a kernel before, one after.

    By a message to each peer, where what lies in one run of memory is sent from where it is and received where it
    belongs; by an all-to-all, from one buffer into another; or by an all-gather, where all get the same.

    Args:
        lowering: which of these.
        shared: of a step whose messages are parts of others, which someone else sends; None: the step is alone.
        origin: what the step reads, and in which of the buffers that `run` is given; None: one tensor in the only one.
        buffers: how many `run` is given.
        leave_apart: what comes is not put together: `run` returns its buffers and one more, where `patchwork` lies.
    """

    def __init__(
        self,
        *args: Any,
        lowering: Lowering,
        shared: SharedBuffers | None = None,
        origin: Patchwork | None = None,
        buffers: int = 1,
        leave_apart: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.origin = origin or Whole(0, self.source_strides)
        self.arrived, self.leave_apart = buffers, leave_apart
        self.group = lowering.group
        everyone = [self.program.mesh.rank_at(p) for p in self.program.members(self.step, self.me)]
        # Of a step between meshes each rank has members of its own.
        within = isinstance(self.step, Exchange) and self.step.group is not None
        self.of_group = self.world.group_order(everyone) if within else None
        self.together, self.gathers = lowering.how == "all-to-all", lowering.how == "all-gather"
        # Of an all-to-all, in elements: what stands before the data of a message, and the room for one that comes,
        # which is alike for all requests.
        self.header = HEADER // self.dtype.itemsize if self.together else 0
        room = BACKENDS[self.world.backend].all_to_all if self.together else 0
        self.room = self.header + room // self.dtype.itemsize
        exact = self.together or self.gathers or self.device.type == "cpu"
        self.unit = 1 if exact else max(1, _ALIGNMENT // self.dtype.itemsize)
        peers = list(zip(self.peers, self.peer_ranks, strict=True))
        if self.together or self.gathers:
            peers.sort(key=lambda peer: self.group.index(peer[1]))
        self._bind_sends(peers[:1] if self.gathers else peers, shared)
        if self.gathers:
            rank = self.program.mesh.rank_at(self.me)
            peers.insert(self.group.index(rank), (self.me, rank))
        unpack = self._bind_receives(peers, shared)
        self.bind_finish(unpack)
        # Bytes for each rank of the group, of an all-to-all.
        sent = {rank: self.header + last - first for rank, _, first, last in self.sends}
        me = self.program.mesh.rank_at(self.me)
        self.sent = [sent.get(rank, 0) * self.dtype.itemsize for rank in self.group]
        self.came = [self.room * self.dtype.itemsize * (rank != me) for rank in self.group]

    def _parts_to(self, peer: int, base: int) -> tuple[list[Part], int]:
        """What a peer gets, contributor by contributor in the order of rows, packed from `base`; and where it ends."""
        parts: list[Part] = []
        for contributor in range(self.contributors):
            rows = self.outgoing(peer, contributor)
            if elements := int(rows.elements.sum()):
                packed = Side.packed(rows)
                packed.offset = packed.offset + base
                base += elements
                for piece in self.origin.pieces(rows):
                    parts.append((piece.buffer, 0, piece.boxes, piece.side, packed.part(piece)))
        return parts, base

    def _bind_sends(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> None:
        self.sends: list[tuple[int, int, int, int]] = []
        """Rank, buffer or `_PACKED`, first and last element there."""
        packing: list[Part] = []
        self.packed = 0
        from_where_it_is = shared is None and not self.together
        for peer, rank in peers:
            first = self._aligned(self.packed) + self.header if shared is None else shared.sent_at[peer]
            parts, last = self._parts_to(peer, first)
            if last == first and not self.together:
                continue
            run = run_of(parts[0][2], parts[0][3]) if from_where_it_is and len(parts) == 1 else None
            if run is not None:
                self.sends.append((rank, parts[0][0], run, run + last - first))
                continue
            packing += parts
            self.sends.append((rank, _PACKED, first, last))
            self.packed = last
        self.pack = Copies(packing, self.step.fill, self.dtype, self.device)

    def _bind_receives(self, peers: Sequence[tuple[int, int]], shared: SharedBuffers | None) -> list[Part]:
        """What is to be unpacked."""
        self.receives: list[tuple[int, int, int, bool]] = []
        """Rank, first and last element, and whether in the output itself."""
        bases = np.zeros((1, self.contributors), np.int64)
        self.staged = Terms(Side.target(self.incoming, self.strides), bases)
        unpack: list[Part] = []
        in_place = shared is None and not (self.together or self.leave_apart or self.step.reduce)
        in_place = in_place and (not self.gathers or self._gathers_in_order(peers))
        base = 0
        for number, (peer, rank) in enumerate(peers):
            first = base = self._aligned(base) if shared is None else shared.received_at[peer]
            if self.together:
                first = base = number * self.room + self.header
            for contributor in range(self.contributors):
                here = np.flatnonzero(self.incoming.sender[:, contributor] == peer)
                if not len(here):
                    continue
                rows = self.incoming.select(here)
                target = Side.target(rows, self.strides)
                run = run_of(rows, target) if in_place else None
                if run is not None:
                    self.receives.append((rank, run, run + int(rows.elements.sum()), True))
                    continue
                packed = Side.packed(rows)
                packed.offset = packed.offset + base
                self.staged.put(here, contributor, packed)
                unpack.append((self.arrived, 0, rows, packed, target))
                base += int(rows.elements.sum())
            if base > first:
                self.receives.append((rank, first, base, False))
        self.received = len(peers) * self.room if self.together else base
        return unpack

    def bind_finish(self, unpack: list[Part]) -> None:
        if self.step.reduce:
            self.finish: Reduction | Copies = self.reduction(self.staged)
            return
        kept = [] if self.gathers else self.origin.pieces(self.kept_rows())
        parts = [(p.buffer, 0, p.boxes, p.side, Side.target(p.boxes, self.strides)) for p in kept]
        parts += [self.fills(), *unpack]
        if self.leave_apart:
            self.patchwork = Patchwork([(buffer, boxes, side) for buffer, _, boxes, side, _ in parts])
        else:
            self.finish = Copies(parts, self.step.fill, self.dtype, self.device)

    def _gathers_in_order(self, peers: Sequence[tuple[int, int]]) -> bool:
        """Whether the output is what comes from each rank, one after the other."""
        rows = [self.incoming.select(self.incoming.sender[:, 0] == peer) for peer, _ in peers]
        runs = [run_of(boxes, Side.target(boxes, self.strides)) for boxes in rows]
        sizes = [int(boxes.elements.sum()) for boxes in rows]
        return runs == [sum(sizes[:i]) for i in range(len(sizes))]

    def _aligned(self, elements: int) -> int:
        return -(-elements // self.unit) * self.unit

    def run(self, x: torch.Tensor | list[torch.Tensor], token: int) -> Run:
        buffers = x if isinstance(x, list) else [x]
        out = None if self.leave_apart else self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        # To a collective every rank of the group comes, also one that has nothing to send and gets nothing.
        if self.group or self.sends or self.receives:
            asked = self.messages(buffers, received if out is None else out, received, token)
            yield asked._replace(output=out) if self.last else asked
        buffers = [*buffers, received]
        if out is None:
            return buffers
        self.finish(buffers, [out])
        return out

    def messages(
        self, buffers: Sequence[torch.Tensor], out: torch.Tensor, received: torch.Tensor, token: int
    ) -> Transfer | AllToAll | AllGather:
        """What the world is to do, with all packed that is sent from there."""
        packed = torch.empty(self.packed, dtype=self.dtype, device=self.device)
        self.pack(buffers, [packed])
        flat, arrived, size = packed.view(torch.uint8), received.view(torch.uint8), self.dtype.itemsize
        if self.together:
            return AllToAll(self.group, flat, arrived, self.sent, self.came, token)
        sends = []
        for rank, buffer, first, last in self.sends:
            if buffer == _PACKED:
                sends.append((rank, flat[first * size : last * size]))
                continue
            source = buffers[buffer]
            part = source.as_strided((last - first,), (1,), source.storage_offset() + first)
            sends.append((rank, part.view(torch.uint8)))
        landed = out.view(-1).view(torch.uint8)
        if self.gathers:
            return AllGather(self.group, sends[0][1], landed if self.receives[0][3] else arrived, token)
        receives = [
            (rank, (landed if final else arrived)[first * size : last * size])
            for rank, first, last, final in self.receives
        ]
        return Transfer(tuple(sends), tuple(receives), token, group=self.of_group)


def may_leave_apart(step: Step, following: Step) -> bool:
    """Whether what `step` brings may be read by `following` from where it arrived."""
    reduces = step.reduce or following.reduce
    return not reduces and is_plain(step.boxes) and is_plain(following.boxes) and not (step.boxes.sender == FILL).any()
