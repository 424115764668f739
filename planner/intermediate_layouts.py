"""The family of intermediate layouts that a path may pass through, as the neighbours of each layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .cost.priced_ranks import priced_ranks
from .cost.topology import Topology
from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.placements import Partial, Placement, Replicate, Shard, StridedShard

_REPLICATE = Replicate()
_MAX_TENSOR_DIMS = 4  # that intermediate layouts shard: those that source or target shard, then the largest


class IntermediateLayouts:
    """The intermediate layouts between `source` and `target`, in which mesh dims of size 1 are replicated."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, topology: Topology) -> None:
        self.target, self.mesh_shape = target, mesh.shape
        # Strided tensor dims have no order: mesh dims cut them in ascending order.
        shards = (*source.placements, *target.placements)
        self.strided = {p.dim for p in shards if isinstance(p, StridedShard) and not p.own}
        cut = {d for layout in (source, target) for d, _ in layout.orders}
        by_size = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (d not in cut, -shape[d]))
        self.shards = [Shard(d) for d in sorted(by_size[:_MAX_TENSOR_DIMS])]
        ranks = priced_ranks(mesh, topology)
        self.inside = ranks.inside
        dims = [m for m in range(mesh.ndim) if mesh.shape[m] > 1]
        self.across = [m for m in dims if ranks.spans_nodes[m]]
        self.target_orders = {d: (order, sorted(order)) for d, order in target.orders}
        ops = {p.op for layout in (source, target) for p in layout.placements if isinstance(p, Partial)}
        self.ops_mix = len(ops) < 2 or ops == {"sum", "avg"}
        replicated = [m for m in self.inside if target.placements[m] == Replicate()]
        # A shard becomes a partial term without communication, so mesh dims that become partial may be sharded before.
        partial = [m for m in target.partial_dims if m in dims and target.placements[m] != source.placements[m]]
        groups = dict.fromkeys(map(tuple, [replicated, self.inside, *([m] for m in self.inside), partial]))
        scattered = [self._replaced(target, group, shard) for group in groups for shard in self.shards]
        self.scattered_targets = [layout for layout in scattered if layout is not None]
        """The target with the mesh dims inside nodes, some of them, or those that become partial, as shards instead."""

    def hierarchical_paths(self, source: Layout) -> list[tuple[Layout, ...]]:
        """Hierarchical reductions, which a search of few rounds might not reach.

        Mesh dims inside nodes, or the partial ones of them, are scattered along one tensor dim; then mesh dims across
        nodes get their target placements; then the rest does. Empty without a partial source.
        """
        if not source.has_partial:
            return []
        partial = self._reduced_dims(source)
        # Across three and more nodes, scattering sums and gathering them moves less than every node adding all terms.
        scattered = [m for m in partial if m in self.across and self.target.placements[m] == Replicate()]
        nodes = math.prod(self.mesh_shape[m] for m in scattered)
        paths: list[tuple[Layout, ...]] = []
        for group in (self.inside, [m for m in partial if m in self.inside]):
            for shard in self.shards:
                first = self._replaced(source, group, shard) if group else None
                second = self._replaced(first, self.across, None) if first and self.across else None
                if first and second and len({source, first, second, self.target}) == 4:
                    paths.append((source, first, second, self.target))
                    between = self._replaced(first, scattered, shard) if nodes > 2 else None
                    if between and len({*paths[-1], between}) == 5:
                        paths.append((source, first, between, second, self.target))
        return list(dict.fromkeys(paths))

    def next_layouts(self, layout: Layout) -> list[Layout]:
        """The layouts that a step from `layout` may lead to, besides the target:

        - the same placements, in the target's shard order where the same mesh dims cut a tensor dim;
        - the mesh dims inside nodes, all at once, as in the target, replicated, or sharding one tensor dim;
        - the mesh dims across nodes, all at once, as in the target;
        - the target with mesh dims inside nodes (all, one, or those that it replicates) sharding one tensor dim, so
          that the ranks of a node share what the node receives;
        - the target with the mesh dims that become partial sharding one tensor dim;
        - the partial mesh dims, all or those inside nodes, scattered along one tensor dim;
        - any one mesh dim as in the target, replicated, or (if partial or across nodes) as a shard that cuts last.
        """
        partial = self._reduced_dims(layout)
        partial_inside = [m for m in partial if m in self.inside]
        changes: list[tuple[Sequence[int], Placement | None]]
        changes = [((), None), (self.inside, None), (self.across, None), (self.inside, _REPLICATE)]
        changes += [(group, shard) for shard in self.shards for group in (self.inside, partial, partial_inside)]
        changes += [((m,), placement) for m in (*self.inside, *self.across) for placement in (None, _REPLICATE)]
        changes += [((m,), shard) for m in dict.fromkeys((*self.across, *partial)) for shard in self.shards]
        changed = [self._placements(layout, mesh_dims, placement) for mesh_dims, placement in changes]
        layouts = [self._ordered(layout, placements) for placements in dict.fromkeys(changed) if placements is not None]
        return [x for x in dict.fromkeys([*self.scattered_targets, *layouts]) if x not in (layout, self.target)]

    def _reduced_dims(self, layout: Layout) -> list[int]:
        """The partial mesh dims of `layout` that are not the same in the target."""
        pairs = zip(layout.placements, self.target.placements, strict=True)
        return [m for m, (p, wanted) in enumerate(pairs) if isinstance(p, Partial) and p != wanted]

    def _replaced(self, layout: Layout, mesh_dims: Sequence[int], placement: Placement | None) -> Layout | None:
        """`layout` with `placement` (None: the target's placements) on some mesh dims.

        None if no mesh dim changes although some are given, or if the partial ops would not mix.
        """
        placements = self._placements(layout, mesh_dims, placement)
        return None if placements is None else self._ordered(layout, placements)

    def _placements(
        self, layout: Layout, mesh_dims: Sequence[int], placement: Placement | None
    ) -> tuple[Placement, ...] | None:
        """The placements of `_replaced`."""
        changed = list(layout.placements)
        for m in mesh_dims:
            changed[m] = placement or self.target.placements[m]
        placements = tuple(changed)
        if mesh_dims and placements == layout.placements:
            return None
        if not self.ops_mix and len({p.op for p in placements if isinstance(p, Partial)}) > 1:
            return None
        return placements

    def _ordered(self, layout: Layout, placements: tuple[Placement, ...]) -> Layout:
        """A layout of `placements`, with the shard order of `layout` where it applies.

        New shards cut last, in their order in the target. Tensor dims that are cut by the same mesh dims as in the
        target have the target's order.
        """
        cuts: dict[int, list[int]] = {}
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                cuts.setdefault(p.dim, []).append(m)
        return Layout.unchecked(placements, tuple([(d, self._order(layout, d, cuts[d])) for d in sorted(cuts)]))

    def _order(self, layout: Layout, tensor_dim: int, cut_by: list[int]) -> tuple[int, ...]:
        """The order in which the mesh dims `cut_by` (ascending) cut a tensor dim."""
        if len(cut_by) == 1 or tensor_dim in self.strided:
            return tuple(cut_by)
        wanted, ascending = self.target_orders.get(tensor_dim, ((), []))
        if ascending == cut_by:
            return wanted
        kept = [m for m in layout.order(tensor_dim) if m in cut_by]
        new = [m for m in cut_by if m not in kept]
        return (*kept, *sorted(new, key=lambda m: (wanted.index(m) if m in wanted else len(wanted), m)))
