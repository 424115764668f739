"""Programs as plain values, ready for JSON; `reading` is the way back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from ..mesh import Mesh
from ..program import Exchange, Program, Step


def to_dict(program: Program) -> dict[str, Any]:
    """Everything that a program is made of, and what it costs."""
    return {
        "mesh": mesh_to_dict(program.source_mesh),
        "target_mesh": mesh_to_dict(program.target_mesh) if program.crosses else None,
        "shape": program.shape,
        "dtype": program.dtype,
        "src": str(program.src),
        "dst": str(program.dst),
        "rank": program.rank,
        "steps": [step_to_dict(program, step) for step in program.steps],
        "topology": None if program.topology is None else program.topology.to_dict(),
        "others": [
            {"stops": [str(x) for x in o.stops], "us": o.us, "peak_bytes": o.peak_bytes} for o in program.others
        ],
        **{name: getattr(program, name) for name in TOTALS},
    }


TOTALS = ("exchanges", "bytes_received", "bytes_bound", "bytes_over_network", "peak_bytes", "cost_us")
"""What follows from the rest, for other readers."""


def step_to_dict(program: Program, step: Step) -> dict[str, Any]:
    """One of the steps of a program."""
    return {
        "kind": step.kind,
        "source": str(step.source),
        "target": str(step.target),
        "meshes": [
            "target" if program.crosses and mesh == program.target_mesh else "source"
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
    """What `Mesh(**…)` makes it of again."""
    return {"shape": mesh.shape, "names": mesh.names, "ranks": mesh.ranks}
