"""Recorded workloads on meshes of other sizes: which mesh dims grow, and the redistributions that result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...errors import ArgumentError
from ...planner import Layout, Mesh, Partial, Placement, Replicate
from ...planner.layouts.placements import StridedShard
from ...runtime.tracing.trace_file import Entry

TENSOR = 8  # ranks of tensor parallelism, which stays within a node


@dataclass(frozen=True)
class Growth:
    """How a mesh of replicas × dp × tp grows with the number of ranks: first dp, then replicas.

    Attributes:
        about: the rule in words.
        largest: size of dp.
        has_replicas: whether the program was recorded with replicas. If not, gradients of weights, which it reduces
            over dp, are reduced over replicas too. Tensors whose first size is 1 (a batch of one sequence) are no
            gradients of weights, and each replica has its own.
    """

    about: str
    largest: int
    has_replicas: bool = True

    def full_mesh(self, ranks: int) -> Mesh | None:
        """The mesh of so many ranks; None if tensor parallelism does not divide their number."""
        left, rest = divmod(ranks, TENSOR)
        if rest or not left:
            return None
        dp = math.gcd(left, self.largest)
        return Mesh((left // dp, dp, TENSOR), ("replicas", "dp", "tp"))

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
        if not self.has_replicas and "dp" in names and entry.shape[:1] != (1,):
            if isinstance(source.placements[names.index("dp")], Partial) and not target.has_partial:
                names = ("replicas", *names)
                source, target = _with_replicas(Partial(), source), _with_replicas(Replicate(), target)
        mesh = full_mesh[tuple(names)]  # that of the first rank
        shape = entry.shape
        if entry.where.startswith("FSDP"):
            shape = (-(-shape[0] // mesh.shape[-1]) * mesh.shape[-1],)
        return replace(entry, mesh=mesh, shape=shape, source=str(source), target=str(target))


def _with_replicas(placement: Placement, layout: Layout) -> Layout:
    """The layout on a mesh with one more dim, which comes first and has this placement."""
    return Layout((placement, *layout.placements), {d: [m + 1 for m in order] for d, order in layout.orders})


_TENSOR = "tensor parallelism stays within a node of 8"
GROWTHS = {
    "llama3_8b": Growth(f"{_TENSOR}; FSDP's shards grow up to 64, then its replicas", 64),
    "llama3_70b": Growth(f"{_TENSOR}; FSDP's shards grow up to 128, then its replicas", 128),
    "solver": Growth(
        f"{_TENSOR}; data parallelism, over which weights are cut too, grows up to 128, then replicas, over which "
        "gradients of weights are summed as well", 128, has_replicas=False,
    ),
}  # fmt: skip
