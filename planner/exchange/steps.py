"""The steps of a program: local copies and exchanges, the reductions that they perform, the traffic that they cause."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layouts.layout import Layout, receivers_contribute
from ..layouts.mesh import Mesh
from .transfer_table import FILL, TransferTable


@dataclass(frozen=True)
class Reduce:
    """A reduction over contributors: `op` in ascending order of senders, then one division, then one rounding."""

    op: str
    contributors: int
    divisor: float = 1

    def __str__(self) -> str:
        scale = "" if self.divisor == 1 else f" ÷ {self.divisor:g}"
        return f"{self.op} of {self.contributors}{scale}" if self.contributors > 1 else f"copy{scale}"


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program, from layout `source` on `source_mesh` to layout `target` on `target_mesh`.

    Attributes:
        boxes: the boxes that are copied; senders and receivers are positions in the program's mesh.
        reduce: the reduction over the contributors of a box; None for plain copies.
        fill: the value of boxes without a sender.
    """

    source_mesh: Mesh
    source: Layout
    target_mesh: Mesh
    target: Layout
    boxes: TransferTable
    reduce: Reduce | None
    fill: float | int | bool

    kind = "step"

    @cached_property
    def receivers_contribute(self) -> bool:
        """Whether every rank is one of the contributors of each box that it receives."""
        return self.source_mesh == self.target_mesh and receivers_contribute(self.source, self.target)

    @property
    def staged_terms(self) -> int:
        """The number of partial terms staged beside the output before they are reduced, the receiver's own excluded."""
        terms = self.reduce.contributors if self.reduce else 1
        return 0 if terms == 1 else terms - self.receivers_contribute


@dataclass(frozen=True, eq=False)
class Local(Step):
    """A step without communication."""

    kind = "local"


@dataclass(frozen=True, eq=False)
class Exchange(Step):
    """A step with communication.

    Attributes:
        group: the mesh dims along which ranks exchange. None between two meshes, where ranks exchange with those they
            have a box in common with.
    """

    group: tuple[int, ...] | None = ()
    kind = "exchange"


@dataclass(frozen=True)
class Traffic:
    """The elements that one rank exchanges in one step: with ranks of its node (near) and of other nodes (far)."""

    received_near: int
    received_far: int
    sent_near: int
    sent_far: int

    @property
    def received(self) -> int:
        return self.received_near + self.received_far

    @property
    def sent(self) -> int:
        return self.sent_near + self.sent_far

    @classmethod
    def of(cls, boxes: TransferTable, position: int, nodes: np.ndarray | None) -> Traffic:
        """Count the traffic of one mesh position.

        Args:
            nodes: the node of each mesh position; None if all ranks share one.
        """
        counts = []
        elements = np.broadcast_to(boxes.elements[:, None], boxes.sender.shape)
        receiver = np.broadcast_to(boxes.receiver[:, None], boxes.sender.shape)
        moved = (boxes.sender != FILL) & (boxes.sender != receiver)
        for mine, peer in ((receiver == position, boxes.sender), (boxes.sender == position, receiver)):
            rows = mine & moved
            far = 0 if nodes is None else int(elements[rows][nodes[peer[rows]] != nodes[position]].sum())
            counts += [int(elements[rows].sum()) - far, far]
        return cls(*counts)
