"""The change from one layout to another, on one mesh or between two: along which mesh dims, and what is reduced."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..layouts.dtypes import is_floating
from ..layouts.layout import Layout, receivers_contribute
from ..layouts.mesh import Mesh, union_mesh
from ..layouts.nodes import Nodes
from ..layouts.placements import Partial, Shard


class LayoutChange:
    """The change from layout `source` to layout `target`, for tensors of any shape.

    In both layouts mesh dims of size 1 are replicated. Between two meshes neither layout is partial.

    Args:
        mesh: the mesh of `source`.
        dtype: the name of the dtype.
        source, target: the layouts.
        nodes: the node of each rank; None if all ranks share one. Receivers prefer senders of their node.
        target_mesh: the mesh of `target`; None: `mesh`.
        positions: the mesh whose positions name receivers and senders; None: the ranks of both meshes (`union_mesh`).

    Attributes:
        closure: the mesh dims whose cut, or an earlier cut of the same tensor dim, changes. Ranks exchange only along
            these. None between two meshes, where ranks exchange with all that they have a box in common with.
        source_dims, target_dims: the mesh dims of each mesh along which ranks exchange: the closure, or all.
        reduced: the mesh dims whose partial is reduced.
        split: the mesh dims that become partial.
        keepers: those of `split` where coordinate 0 keeps the value and the others hold zero (integers and bool).
        replicas: the `source_dims` along which the source is replicated, so that several ranks hold a box.
        shards_split: those of `split` that are sharded in the source; each shard stays at its coordinate.
        contributors: the number of terms per element that are reduced, 1 without a reduction.
    """

    closure: tuple[int, ...] | None
    source_dims: tuple[int, ...]
    target_dims: tuple[int, ...]

    def __init__(
        self,
        mesh: Mesh,
        dtype: str,
        source: Layout,
        target: Layout,
        nodes: Nodes | None = None,
        target_mesh: Mesh | None = None,
        positions: Mesh | None = None,
    ) -> None:
        self.source_mesh, self.dtype, self.source, self.target = mesh, dtype, source, target
        self.nodes = nodes
        before, after = source.prefixes, target.prefixes
        if target_mesh is None or target_mesh == mesh:
            self.target_mesh = mesh
            self.closure = tuple([m for m in range(len(before)) if before[m] != after[m]])
            self.source_dims = self.target_dims = self.closure
        else:
            self.target_mesh, self.closure = target_mesh, None
            self.source_dims, self.target_dims = tuple(range(len(before))), tuple(range(len(after)))
        if positions is None:
            positions = mesh if self.closure is not None else union_mesh(mesh, self.target_mesh)
        self.positions = positions
        self.replicas = tuple([m for m in self.source_dims if not before[m]])
        self.reduced = tuple([m for m in source.partial_dims if m in self.source_dims])
        self.split = tuple([m for m in target.partial_dims if m in self.target_dims])
        self.shards_split = tuple([m for m in self.split if isinstance(source.placements[m], Shard)])
        self.keepers = () if not self.split or is_floating(dtype) else self._new_sums
        self.contributors = math.prod([mesh.shape[m] for m in self.reduced]) if self.reduced else 1

    @property
    def _new_sums(self) -> tuple[int, ...]:
        """The mesh dims that change from replicated to a partial sum."""
        whole = [m for m in self.split if m not in self.shards_split]
        return tuple([m for m in whole if self.target.placements[m] == Partial("sum")])

    @property
    def divisor(self) -> float:
        """The divisor of the result: the size of each reduced average, and of each new partial sum of floats. Below 1
        where a shard becomes a partial average, as its owner then holds n times its part."""
        divided = [m for m in self.reduced if self.source.placements[m] == Partial("avg")]
        divided += self._new_sums if is_floating(self.dtype) else ()
        multiplied = [m for m in self.shards_split if self.target.placements[m] == Partial("avg")]
        divisor, multiplier = (math.prod(self.source_mesh.shape[m] for m in dims) for dims in (divided, multiplied))
        return divisor if multiplier == 1 else divisor / multiplier

    @property
    def op(self) -> str:
        """The op of the reduction over contributors; an average is a sum with a divisor."""
        ops = {p.op for m, p in enumerate(self.source.placements) if m in self.reduced and isinstance(p, Partial)}
        return "sum" if not ops or "avg" in ops else ops.pop()

    def at_positions(self, receiver: np.ndarray, sender: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The `positions` of receivers and senders, given those on the target mesh and on the source mesh; negative
        senders, which are none, stay as they are."""
        if self.positions is self.source_mesh and self.positions is self.target_mesh:
            return receiver, sender
        at = self.positions.positions_of
        senders = np.where(sender < 0, sender, at(self.source_mesh.rank_array[sender]))
        return at(self.target_mesh.rank_array[receiver]), senders

    @property
    def is_cross_mesh(self) -> bool:
        """Whether source and target are on different meshes."""
        return self.closure is None

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank already holds its target shard, reductions aside, for tensors of any shape."""
        return not self.is_cross_mesh and receivers_contribute(self.source, self.target)

    @cached_property
    def is_strided(self) -> bool:
        """Whether a strided shard cuts a tensor dim, before or after."""
        return bool(self.source.strided_dims or self.target.strided_dims)

    @cached_property
    def group_size(self) -> int:
        """The number of ranks that may exchange with each other."""
        if self.closure is None:
            return self.positions.size
        return math.prod([self.source_mesh.shape[m] for m in self.closure])
