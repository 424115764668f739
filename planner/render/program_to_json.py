"""Converts programs to plain values, ready for JSON; `parse` is the inverse."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from ..exchange.steps import Exchange, Step
from ..layouts.mesh import Mesh
from ..program_base import ProgramBase, Requested


def to_dict(program: ProgramBase) -> dict[str, Any]:
    """The fields of a program, and its totals."""
    return {
        "mesh": mesh_to_dict(program.source_mesh),
        "target_mesh": mesh_to_dict(program.target_mesh) if program.is_cross_mesh else None,
        "shape": program.shape,
        "dtype": program.dtype,
        "source": str(program.source),
        "target": str(program.target),
        "rank": program.rank,
        "requested": None if program.requested is None else _requested_to_dict(program.requested),
        "steps": [step_to_dict(program, step) for step in program.steps],
        "topology": None if program.topology is None else program.topology.to_dict(),
        "others": [
            {
                "layouts": [str(x) for x in path.layouts],
                "us": path.us,
                "peak_bytes": path.peak_bytes,
                "over_max_bytes": path.over_max_bytes,
            }
            for path in program.others
        ],
        **{name: getattr(program, name) for name in TOTALS},
    }


def _requested_to_dict(requested: Requested) -> dict[str, Any]:
    return {
        "mesh": mesh_to_dict(requested.source_mesh),
        "target_mesh": mesh_to_dict(requested.target_mesh),
        "source": str(requested.source),
        "target": str(requested.target),
    }


TOTALS = ("exchanges", "bytes_received", "bytes_bound", "bytes_over_network", "peak_bytes", "cost_us")
"""Attributes that follow from the other values, written for readers that do not parse the program."""


def step_to_dict(program: ProgramBase, step: Step) -> dict[str, Any]:
    """The fields of one step of a program."""
    return {
        "kind": step.kind,
        "source": str(step.source),
        "target": str(step.target),
        "meshes": [
            "target" if program.is_cross_mesh and mesh == program.target_mesh else "source"
            for mesh in (step.source_mesh, step.target_mesh)
        ],
        "group": step.group if isinstance(step, Exchange) else None,
        "reduce": step.reduce and {f.name: getattr(step.reduce, f.name) for f in fields(step.reduce)},
        "fill": repr(step.fill),
        "boxes": {
            f.name: v.tolist() if isinstance(v := getattr(step.boxes, f.name), np.ndarray) else v
            for f in fields(step.boxes)
        },
    }


def mesh_to_dict(mesh: Mesh) -> dict[str, Any]:
    """The arguments of `Mesh` that make the same mesh."""
    return {"shape": mesh.shape, "names": mesh.names, "ranks": mesh.ranks}
