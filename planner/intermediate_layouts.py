"""The layouts that a route may pass through: a stated family, a step away from where it is."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Layout
from .mesh import Mesh
from .placements import Partial, Placement, Replicate, Shard, StridedShard
from .ranks import ranks_of
from .topology import Topology

_REPLICATE = Replicate()
_MOST_TENSOR_DIMS = 4  # that stops are cut along: those that source or target cut, then the largest


class Stops:
    """Where a step on the way to `target` may lead. Mesh dims of size 1 are replicated in `source` and `target`."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, topology: Topology) -> None:
        self.target = target
        # Tensor dims that are cut from left to right.
        shards = (*source.placements, *target.placements)
        self.strided = {p.dim for p in shards if isinstance(p, StridedShard) and not p.own}
        cut = {d for layout in (source, target) for d, _ in layout.orders}
        by_size = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (d not in cut, -shape[d]))
        self.shards = [Shard(d) for d in sorted(by_size[:_MOST_TENSOR_DIMS])]
        at = ranks_of(mesh, topology)
        self.inside = at.inside
        dims = [m for m in range(mesh.ndim) if mesh.shape[m] > 1]
        self.across = [m for m in dims if at.crosses[m]]
        self.wanted = {d: (order, sorted(order)) for d, order in target.orders}
        ops = {p.op for layout in (source, target) for p in layout.placements if isinstance(p, Partial)}
        self.ops_mix = len(ops) < 2 or ops == {"sum", "avg"}
        replicated = [m for m in self.inside if target.placements[m] == Replicate()]
        # A shard becomes a term by itself: what turns partial may be cut before.
        partial = [m for m in target.partial_dims if m in dims and target.placements[m] != source.placements[m]]
        groups = dict.fromkeys(map(tuple, [replicated, self.inside, *([m] for m in self.inside), partial]))
        near = [self._replaced(target, group, shard) for group in groups for shard in self.shards]
        self.near_target = [stop for stop in near if stop is not None]

    def down_and_up(self, source: Layout) -> list[tuple[Layout, ...]]:
        """What a search of few rounds might not reach: routes whose mesh dims inside nodes, or those of them that are
        partial, cut one tensor dim first; then the mesh dims across nodes become what they are in the target."""
        pairs = zip(source.placements, self.target.placements, strict=True)
        partial = [m for m, (p, wanted) in enumerate(pairs) if isinstance(p, Partial) and p != wanted]
        if not source.has_partial:
            return []
        routes = []
        for group in (self.inside, [m for m in partial if m in self.inside]):
            for shard in self.shards:
                first = self._replaced(source, group, shard) if group else None
                second = self._replaced(first, self.across, None) if first and self.across else None
                if first and second and len({source, first, second, self.target}) == 4:
                    routes.append((source, first, second, self.target))
        return list(dict.fromkeys(routes))

    def beside(self, x: Layout) -> list[Layout]:
        """The layouts that a step from `x` may lead to, besides the target.

        Mesh dims inside nodes are changed all at once: to what they are in the target, to replicated, to shards of one
        tensor dim; so are those across nodes, to what they are in the target. Where all but the inside of nodes is as
        in the target, the mesh dims there, one of them, or those that the target replicates, cut one tensor dim: the
        ranks of a node share what it takes in. Where all but what becomes partial is as in the target, that cuts one
        tensor dim instead. Partial mesh dims are scattered, all of them or those inside nodes. And any one mesh dim
        becomes what it is in the target, or replicated, or a shard cut last if it is partial or across nodes.
        """
        pairs = zip(x.placements, self.target.placements, strict=True)
        partial = [m for m, (p, wanted) in enumerate(pairs) if isinstance(p, Partial) and p != wanted]
        partial_inside = [m for m in partial if m in self.inside]
        changes: list[tuple[Sequence[int], Placement | None]]
        changes = [((), None), (self.inside, None), (self.across, None), (self.inside, _REPLICATE)]
        changes += [(group, shard) for shard in self.shards for group in (self.inside, partial, partial_inside)]
        changes += [((m,), placement) for m in (*self.inside, *self.across) for placement in (None, _REPLICATE)]
        changes += [((m,), shard) for m in dict.fromkeys((*self.across, *partial)) for shard in self.shards]
        stops = [self._placements(x, mesh_dims, placement) for mesh_dims, placement in changes]
        found = [self._arranged(x, placements) for placements in dict.fromkeys(stops) if placements is not None]
        return list(dict.fromkeys([x, self.target, *self.near_target, *found]))[2:]

    def _replaced(self, layout: Layout, mesh_dims: Sequence[int], placement: Placement | None) -> Layout | None:
        """`layout` with `placement` on some mesh dims, or what the target has there.

        None if no mesh dim changes though some are named, or if partial ops would not mix.
        """
        placements = self._placements(layout, mesh_dims, placement)
        return None if placements is None else self._arranged(layout, placements)

    def _placements(
        self, layout: Layout, mesh_dims: Sequence[int], placement: Placement | None
    ) -> tuple[Placement, ...] | None:
        placements = list(layout.placements)
        for m in mesh_dims:
            placements[m] = placement or self.target.placements[m]
        found = tuple(placements)
        if mesh_dims and found == layout.placements:
            return None
        if not self.ops_mix and len({p.op for p in found if isinstance(p, Partial)}) > 1:
            return None
        return found

    def _arranged(self, layout: Layout, placements: tuple[Placement, ...]) -> Layout:
        """`layout` with other placements. New shards cut last, in their order in the target; tensor dims that are cut
        by the same mesh dims as in the target are cut in its order."""
        cuts: dict[int, list[int]] = {}
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                cuts.setdefault(p.dim, []).append(m)
        return Layout.unchecked(placements, tuple([(d, self._order(layout, d, cuts[d])) for d in sorted(cuts)]))

    def _order(self, layout: Layout, tensor_dim: int, cut_by: list[int]) -> tuple[int, ...]:
        """The order in which the mesh dims `cut_by`, ascending, cut a tensor dim."""
        if len(cut_by) == 1 or tensor_dim in self.strided:
            return tuple(cut_by)
        wanted, ascending = self.wanted.get(tensor_dim, ((), []))
        if ascending == cut_by:
            return wanted
        kept = [m for m in layout.order(tensor_dim) if m in cut_by]
        new = [m for m in cut_by if m not in kept]
        return (*kept, *sorted(new, key=lambda m: (wanted.index(m) if m in wanted else len(wanted), m)))
