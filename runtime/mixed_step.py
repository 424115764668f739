"""A step whose ranks write into each other's memory inside a node, and send and receive across nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ..planner import Program, Step
from .bound_step import Run, World
from .copies import Copies
from .lowering import Lowering
from .meeting import Transfer
from .one_sided import OneSidedStep
from .two_sided import Part, SharedBuffers, TwoSidedStep

_INPUT, _LANDED, _RECEIVED = range(3)  # what a reduction reads


class _Messages(TwoSidedStep):
    """What a step exchanges with other nodes: packed and sent, received where it belongs or beside it."""

    def bind_finish(self, unpack: list[Part]) -> None:
        self.unpack = Copies([] if self.step.reduce else unpack, self.step.fill, self.dtype, self.device)


class MixedStep(OneSidedStep):
    """A one-sided step among the ranks of a node, with messages (`far`) to and from the others under way meanwhile.

    Each pair of ranks meets in one of the two ways, by their nodes alone, so both know which. What messages bring is
    received in the output where it can be, and otherwise unpacked; terms of a reduction are read from the slabs and
    from what was received, in the order of contributors as everywhere.
    """

    def __init__(
        self,
        program: Program,
        step: Step,
        me: int,
        *args: Any,
        lowering: Lowering,
        shared: SharedBuffers | None = None,
    ) -> None:
        world: World = args[1]
        members = program.members(step, me)
        node = {p: world.node_of(program.mesh.rank_at(p)) for p in members}
        near = tuple(p for p in members if node[p] == node[me])
        far = tuple(p for p in members if p == me or node[p] != node[me])
        self.far = _Messages(program, step, me, *args, lowering=lowering, shared=shared, members=far)
        super().__init__(program, step, me, *args, members=near)

    def bind_reduction(self) -> None:
        pushed = self.pushed(self.incoming)
        for contributor, (near, far) in enumerate(zip(self.staged, self.far.staged, strict=True)):
            here = pushed[:, contributor]
            near.offset = np.where(here, near.offset, far.offset)
            near.stride = np.where(here[:, None], near.stride, far.stride)
        self.reduce = self.reduction(self.staged, np.where(pushed, _LANDED, _RECEIVED))

    def run(self, x: torch.Tensor, token: int) -> Run:
        received = torch.empty(self.far.received, dtype=self.dtype, device=self.device)
        landing, out = yield from self.exchange(x, token, partial(self._transfer, x, received))
        return self.finish(x, landing, out, received)

    def finish(
        self, x: torch.Tensor, landing: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert received is not None
        if self.own:
            self.far.unpack([x, received], [out])
        else:
            self.reduce([x, landing, received], [out])
        return out

    def _transfer(self, x: torch.Tensor, received: torch.Tensor, out: torch.Tensor) -> Transfer:
        asked = self.far.messages([x], out, received)
        assert isinstance(asked, Transfer)
        return asked
