"""A program: the steps that every rank, or one rank, performs to get from one layout to another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from .program_base import ProgramBase
from .render.draw import draw
from .render.explain import explain
from .render.program_from_json import parse_program
from .render.program_to_json import to_dict


@dataclass(frozen=True, eq=False)
class Program(ProgramBase):
    """The steps from layout `source` to layout `target`.

    `bytes_received`, `bytes_over_network`, `bytes_bound` and `peak_bytes` have one int per rank in mesh row-major
    order, or a single one if `rank` is given; `bytes_bound` is None if a layout is partial.

    Attributes:
        mesh: the mesh that positions refer to. Between two meshes it is one mesh dim of all ranks: those of the source
            mesh in its order, then those that are in the target mesh only.
        shape: the global shape of the tensor.
        dtype: the name of the dtype.
        source, target: the layouts on `source_mesh` and `target_mesh`.
        steps: `Local` and `Exchange` steps, in order; empty if there is nothing to do.
        rank: the mesh position whose program this is; None for the program of all ranks.
        topology: the topology that the program was planned for; None if none was given.
        others: the paths that the search rejected, cheapest first.
        source_mesh, target_mesh: the meshes of `source` and `target`; None stands for `mesh`.
        requested: the meshes and layouts of the request, if dims of its meshes are split in the program; else None.
        ranks: the mesh positions whose steps the program holds.
    """

    def explain(self, algorithms: Sequence[object] = ()) -> str:
        """The program as text: for each step the mesh dims, boxes and bytes; then the totals.

        Args:
            algorithms: the algorithm that performs each step, if known.
        """
        return explain(self, algorithms)

    def __str__(self) -> str:
        return self.explain()

    def to_svg(self) -> str:
        """The program as an SVG document; see `shardweave.draw`."""
        return draw(self)

    def _repr_svg_(self) -> str | None:
        """The drawing in a notebook; None, as which the notebook shows text, for programs that cannot be drawn."""
        try:
            return self.to_svg()
        except ArgumentError:
            return None

    def to_dict(self) -> dict[str, Any]:
        """The program as plain values, ready for JSON."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """The inverse of `to_dict`.

        The steps are planned again from the layouts that the program passes through, and `data` must equal the result:
        a program that is read can be run. This takes as long as planning the steps.

        Raises:
            ArgumentError: `data` is not an output of `to_dict`; the message gives the place, the value and what is
                allowed.
        """
        return parse_program(cls, data)

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The inverse of `to_json`.

        Raises:
            ArgumentError: `text` is not JSON, or as for `from_dict`.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:  # ValueError covers numbers of over 4,300 digits
            raise ArgumentError(f"program: not valid JSON: {error}") from None
        return cls.from_dict(data)
