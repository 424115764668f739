"""Recorded workloads on meshes of other sizes: which mesh dims grow, and what becomes of each redistribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...errors import ArgumentError
from ...planner import Layout, Mesh, Partial, Placement, Replicate
from ...planner.placements import StridedShard
from ...runtime.tracing.trace import Entry


@dataclass(frozen=True)
class Growth:
    """How a mesh grows. Mesh dims in row-major order; the ranks of the last are neighbours.

    Attributes:
        about: the same in words.
        dims: names of the transport's mesh dims.
        fixed: sizes of those that do not grow.
        grows: the others, each with the size at which it gives way to the next; the last one's is None.
        flattened: mesh dims that are several of these as one, by name.
        gradients: the mesh dim over which gradients of weights were summed when no other had to be, if a program was
            recorded without replicas: with them it is summed over these too. What is summed over it and is no weight's
            (its first size is 1, a batch of one sequence) is each replica's own.
    """

    about: str
    dims: tuple[str, ...]
    fixed: Mapping[str, int]
    grows: tuple[tuple[str, int | None], ...]
    flattened: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gradients: str | None = None

    def transport(self, ranks: int) -> Mesh | None:
        """The mesh of so many ranks; None if there is none."""
        left, rest = divmod(ranks, math.prod(self.fixed.values()))
        if rest or not left:
            return None
        sizes = dict(self.fixed)
        for name, most in self.grows:
            sizes[name] = left if most is None else math.gcd(left, most)
            left //= sizes[name]
        if left != 1:
            return None
        return Mesh([sizes[name] for name in self.dims], self.dims)

    def mesh(self, transport: Mesh, names: Sequence[str]) -> Mesh:
        """The mesh dims of these names, through the first rank.

        Raises:
            ArgumentError: a name that the transport has not.
        """
        for name in names:
            if name in self.flattened:
                transport = transport.flatten(self.flattened[name], name)
        return transport[tuple(names)]

    def grown(self, entry: Entry, transport: Mesh) -> Entry:
        """The same redistribution on the transport's mesh dims. What is padded to the ranks of a group (the flat
        tensors of FSDP2) is padded to those that there are.

        Raises:
            ArgumentError: another mesh as the target, mesh dims without names or that the transport has not, strided
            shards
                that are no order: those depend on the sizes of mesh dims.
        """
        names = entry.mesh.names
        layouts = [Layout.parse(text, entry.mesh.shape) for text in (entry.source, entry.target)]
        strided = any(isinstance(p, StridedShard) for layout in layouts for p in layout.placements)
        if entry.target_mesh is not None or names is None or strided:
            raise ArgumentError(
                f"{entry.source} → {entry.target} on {entry.mesh}; allowed: one mesh with names, and shard orders"
            )
        source, target = layouts
        if self.gradients in names and entry.shape[:1] != (1,):
            if isinstance(source.placements[names.index(self.gradients)], Partial) and not target.has_partial:
                names = (self.dims[0], *names)
                source, target = _beside(Partial(), source), _beside(Replicate(), target)
        mesh = self.mesh(transport, names)
        shape = entry.shape
        if entry.where.startswith("FSDP"):
            shape = (-(-shape[0] // mesh.shape[-1]) * mesh.shape[-1],)
        return replace(entry, mesh=mesh, shape=shape, source=str(source), target=str(target))


def _beside(placement: Placement, layout: Layout) -> Layout:
    """A layout on a mesh with one more dim, the first."""
    return Layout((placement, *layout.placements), {d: [m + 1 for m in order] for d, order in layout.orders})


_TENSOR = "tensor parallelism stays within a node of 8"
GROWTHS = {
    "llama3_8b": Growth(
        f"{_TENSOR}; FSDP's shards grow up to 64, then its replicas",
        ("replicas", "dp", "tp"),
        {"tp": 8},
        (("dp", 64), ("replicas", None)),
    ),
    "llama3_70b": Growth(
        f"{_TENSOR}; FSDP's shards grow up to 128, then its replicas",
        ("replicas", "dp", "tp"),
        {"tp": 8},
        (("dp", 128), ("replicas", None)),
    ),
    "deepseek_v3": Growth(
        "expert parallelism of 32 and tensor parallelism of 2 stay; FSDP's shards grow up to 8 for experts and 256 for "
        "the rest, then its replicas",
        ("replicas", "fsdp", "ep", "tp"),
        {"ep": 32, "tp": 2},
        (("fsdp", 8), ("replicas", None)),
        {"dp": ("fsdp", "ep")},
    ),
    "solver": Growth(
        f"{_TENSOR}; data parallelism, over which weights are cut too, grows up to 128, then replicas, over which "
        "gradients of weights are summed as well",
        ("replicas", "dp", "tp"),
        {"tp": 8},
        (("dp", 128), ("replicas", None)),
        gradients="dp",
    ),
}
