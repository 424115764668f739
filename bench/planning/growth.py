"""Recorded workloads on meshes of other sizes: which mesh dims grow, and the redistributions that result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ArgumentError
from ...planner import Layout, Mesh, Partial, Placement, Replicate
from ...planner.layouts.placements import StridedShard
from ...runtime.tracing.trace_file import Entry


@dataclass(frozen=True)
class Growth:
    """How a mesh grows with the number of ranks.

    Attributes:
        about: the rule in words.
        capped: the mesh dim that grows first, and its largest size. Replicas grow after it.
        fixed: the sizes of the dims that do not grow. The ranks of the last are neighbours.
        flattened: mesh dims that flatten several of these, by name.
        gradients: the mesh dim over which gradients of weights are reduced in a program that was recorded without
            replicas; they are reduced over replicas too. Tensors whose first size is 1 (a batch of one sequence) are no
            gradients of weights, and each replica has its own.
    """

    about: str
    capped: tuple[str, int]
    fixed: Mapping[str, int]
    flattened: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gradients: str | None = None

    def full_mesh(self, ranks: int) -> Mesh | None:
        """The mesh of so many ranks; None if the fixed dims do not divide their number."""
        left, rest = divmod(ranks, math.prod(self.fixed.values()))
        if rest or not left:
            return None
        name, largest = self.capped
        size = math.gcd(left, largest)
        sizes = {"replicas": left // size, name: size, **self.fixed}
        return Mesh(tuple(sizes.values()), tuple(sizes))

    def mesh(self, full_mesh: Mesh, names: Sequence[str]) -> Mesh:
        """The submesh of the named dims that contains the first rank.

        Raises:
            ArgumentError: the mesh has no dim of such a name.
        """
        for name in names:
            if name in self.flattened:
                full_mesh = full_mesh.flatten(self.flattened[name], name)
        return full_mesh[tuple(names)]

    def grown(self, entry: Entry, full_mesh: Mesh) -> Entry:
        """The redistribution on a mesh of another size. FSDP2's flat tensors are padded to the size of their group.

        Raises:
            ArgumentError: the mesh has no dim of such a name, or the entry has two meshes, unnamed mesh dims, or
                strided shards, which depend on the sizes of mesh dims.
        """
        names = entry.mesh.names
        source, target = (Layout.parse(text, entry.mesh.shape) for text in (entry.source, entry.target))
        strided = any(isinstance(p, StridedShard) for p in (*source.placements, *target.placements))
        if entry.target_mesh is not None or names is None or strided:
            raise ArgumentError(
                f"{entry.source} → {entry.target} on {entry.mesh}; allowed: one mesh with names, and shard orders"
            )
        if self.gradients in names and entry.shape[:1] != (1,):
            if isinstance(source.placements[names.index(self.gradients)], Partial) and not target.has_partial:
                names = ("replicas", *names)
                source, target = _with_replicas(Partial(), source), _with_replicas(Replicate(), target)
        mesh = self.mesh(full_mesh, names)
        shape = entry.shape
        if entry.where.startswith("FSDP"):
            shape = (-(-shape[0] // mesh.shape[-1]) * mesh.shape[-1],)
        return replace(entry, mesh=mesh, shape=shape, source=str(source), target=str(target))


def _with_replicas(placement: Placement, layout: Layout) -> Layout:
    """The layout on a mesh with one more dim, which comes first and has this placement."""
    return Layout((placement, *layout.placements), {d: [m + 1 for m in order] for d, order in layout.orders})


_TENSOR = "tensor parallelism stays within a node of 8"
GROWTHS = {
    "llama3_8b": Growth(f"{_TENSOR}; FSDP's shards grow up to 64, then its replicas", ("dp", 64), {"tp": 8}),
    "llama3_70b": Growth(f"{_TENSOR}; FSDP's shards grow up to 128, then its replicas", ("dp", 128), {"tp": 8}),
    "solver": Growth(
        f"{_TENSOR}; data parallelism, over which weights are cut too, grows up to 128, then replicas, over which "
        "gradients of weights are summed as well",
        ("dp", 128),
        {"tp": 8},
        gradients="dp",
    ),
}
