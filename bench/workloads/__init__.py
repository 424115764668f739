"""Redistributions of tensors of real models' sizes, placed as a sharding solver places them, as data.

FSDP2's own program, on the same weights, issues single collectives, where torch's plans and shardweave's are the same.

Each JSON file is one model; each case fixes mesh, source and target layout (text form), dtype and full shape. On a CPU
it is run at the shape that follows from the full one by one rule, `scaled_down`; nothing else about a case changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SCALED_DOWN_BY = 8
SMALLEST_SCALED = 64  # smaller dims (a batch, heads) are structure, not size


def scaled_down(size: int) -> int:
    """A dim's size on CPU: an eighth of its full size, odd staying odd and even even; dims below 64 as they are."""
    if size < SMALLEST_SCALED:
        return size
    scaled = size // SCALED_DOWN_BY
    return scaled + (size - scaled) % 2


@dataclass(frozen=True)
class Workload:
    """One redistribution of one model; `source` and `target` are layouts in text form."""

    name: str
    model: str
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    source: str
    target: str
    dtype: str
    full_shape: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def partial(self) -> bool:
        return "P" in self.source or "P" in self.target


def load_workloads() -> list[Workload]:
    """All cases, in the files' and their own order."""
    files = sorted(Path(__file__).parent.glob("*.json"))
    return [
        Workload(
            name=case["name"],
            model=data["model"],
            mesh=tuple(case["mesh"]),
            mesh_names=tuple(case["mesh_names"]),
            source=case["source"],
            target=case["target"],
            dtype=case["dtype"],
            full_shape=tuple(case["shape"]),
            shape=tuple(map(scaled_down, case["shape"])),
        )
        for data in (json.loads(file.read_text(encoding="utf-8")) for file in files)
        for case in data["cases"]
    ]
