"""A step without a reduction whose ranks write directly into each other's outputs, in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels import DirectUse
from ..transports.symmetric_memory.outputs import OutputPool, PooledOutputsTransport
from .choose_algorithm import Algorithm, window_members
from .copies import Move, contiguous_strides
from .run import Run
from .step import BoundStep


class DirectStep(BoundStep):
    """Ranks write into outputs that lie in pooled buffers of symmetric memory; nothing is unpacked.

    The launch announces the number of the output's buffer to the peers, waits for theirs, writes what peers receive
    and what this rank keeps, and waits until the peers have written. The host never waits: `run` yields no requests.
    """

    transport: PooledOutputsTransport

    def __init__(self, *args: Any, algorithm: Algorithm, **options: Any) -> None:
        super().__init__(*args, **options)
        mesh = self.program.mesh
        ranks = sorted(mesh.rank_at(p) for p in window_members(self.program, self.step, self.me))
        self.outputs: OutputPool = self.transport.outputs(tuple(ranks))
        self.use: DirectUse = self.outputs.use(self.dtype)
        # As the channels have them.
        self.others = others = tuple([rank for rank in ranks if rank != mesh.rank_at(self.me)])
        kept = [row for row in self.incoming if row.senders[0] == self.me]
        moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in kept] + self.fills()
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            strides = contiguous_strides(self.program.shape_after(self.step, peer))[: len(self.program.shape)]
            for row in self.outgoing.get(peer, {}).get(0, []):
                moves.append(Move((1 + others.index(rank), self.target(row, strides)), [(0, self.source(row))]))
        self.write = self.copies(moves, self.use)
        self._first = [self.outputs.buffer(0, rank, self.dtype) for rank in others]
        self.write.fix(targets=[None, *self._first])

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        yield from ()  # a generator, as all runs are
        out, number = self.outputs.take(self.shape, self.dtype, self.device)
        turn = self.transport.turn(fingerprint, out=out)._replace(buffer=number)
        self.write.in_window([x], self._targets(out), turn)
        if number == self.outputs.number:
            out = self.empty().copy_(out)
        self.transport.check()
        return out

    def _targets(self, out: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.use.awaited.cpu_path:
            return _AnnouncedTargets(out, self)
        return [out, *self._first]


class _AnnouncedTargets(Sequence[torch.Tensor]):
    """The output and the buffers of the peers, as they have announced them when one is first asked for."""

    def __init__(self, out: torch.Tensor, step: DirectStep) -> None:
        self._out, self._step = out, step

    def __len__(self) -> int:
        return 1 + len(self._step.others)

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            return self._out
        outputs, peer = self._step.outputs, index - 1
        return outputs.buffer(self._step.use.announced_cpu(peer), self._step.others[peer], self._step.dtype)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))
