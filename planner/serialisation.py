"""Programs as plain values, ready for JSON, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from .crossing import union
from .exchange import Boxes
from .layout import Layout
from .mesh import Mesh
from .program import Exchange, Local, Program, Reduce, Step
from .search import Route
from .topology import Topology


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
        "steps": [
            {
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
            for step in program.steps
        ],
        "topology": None if program.topology is None else program.topology.to_dict(),
        "others": [
            {"stops": [str(x) for x in o.stops], "us": o.us, "peak_bytes": o.peak_bytes} for o in program.others
        ],
        "exchanges": program.exchanges,
        "bytes_received": program.bytes_received,
        "bytes_bound": program.bytes_bound,
        "bytes_over_network": program.bytes_over_network,
        "peak_bytes": program.peak_bytes,
        "cost_us": program.cost_us,
    }


def from_dict(data: dict[str, Any]) -> Program:
    """The program that `to_dict` was called on."""
    mesh = Mesh(**data["mesh"])
    meshes = {"source": mesh, "target": mesh if data["target_mesh"] is None else Mesh(**data["target_mesh"])}
    ndim = len(data["shape"])
    steps: list[Step] = []
    for entry in data["steps"]:
        raw = entry["boxes"]
        n, axes = len(raw["receiver"]), len(raw["axes"])
        contributors = entry["reduce"]["contributors"] if entry["reduce"] else 1
        width = {"sender": contributors, "source_start": ndim, "target_start": ndim}
        arrays = {
            name: np.array(raw[name], dtype=np.int64).reshape(n, width.get(name, axes))
            for name in ("sender", "source_start", "target_start", "extent", "source_step", "target_step")
        }
        boxes = Boxes(np.array(raw["receiver"], dtype=np.int64), axes=tuple(raw["axes"]), **arrays)
        fill = _read_fill(entry["fill"])
        here, there = (meshes[on] for on in entry["meshes"])
        source, target = Layout.parse(entry["source"], here.shape), Layout.parse(entry["target"], there.shape)
        common = here, source, there, target, boxes
        reduce = Reduce(**entry["reduce"]) if entry["reduce"] else None
        if entry["kind"] == "exchange":
            group = None if entry["group"] is None else tuple(entry["group"])
            steps.append(Exchange(*common, reduce, fill, group))
        else:
            steps.append(Local(*common, reduce, fill))
    return Program(
        union(meshes["source"], meshes["target"]),
        tuple(data["shape"]),
        data["dtype"],
        Layout.parse(data["src"], mesh.shape),
        Layout.parse(data["dst"], meshes["target"].shape),
        tuple(steps),
        data["rank"],
        None if data["topology"] is None else Topology.from_dict(data["topology"]),
        tuple(
            Route(tuple(Layout.parse(stop) for stop in other["stops"]), other["us"], other["peak_bytes"])
            for other in data["others"]
        ),
        mesh,
        meshes["target"],
    )


def mesh_to_dict(mesh: Mesh) -> dict[str, Any]:
    """What `Mesh(**…)` makes it of again."""
    return {"shape": mesh.shape, "names": mesh.names, "ranks": mesh.ranks}


def _read_fill(text: str) -> float | int | bool:
    """The fill that `repr` wrote: JSON itself knows no infinity."""
    if text in ("True", "False"):
        return text == "True"
    return float(text) if any(c in text for c in ".einf") else int(text)
