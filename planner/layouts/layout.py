"""A layout: the placement of each mesh dim, and the order in which mesh dims cut the same tensor dim."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ...errors import ArgumentError, LayoutSyntaxError, UnsupportedError, shown
from .dtypes import REDUCE_OPS
from .layout_text import parse_layout_text
from .mesh import MAX_DIMS, whole_numbers
from .placements import LARGEST, Partial, Placement, Replicate, Shard, StridedShard

Orders = tuple[tuple[int, tuple[int, ...]], ...]
Cuts = tuple[int | tuple[int, int], ...]
"""The cuts of a tensor dim, the first cut first: a mesh dim, or (mesh dim, split factor) for a strided shard."""


def receivers_contribute(source: Layout, target: Layout) -> bool:
    """Whether every rank already holds its target shard, reductions aside, and so contributes to all it receives.

    This is the case if the cuts of each tensor dim in `source` are the first of those in `target`, and no mesh dim
    becomes partial.
    """
    if type(source) is not Layout or type(target) is not Layout:
        return False  # a `NodeLayout`
    before, after = source.prefixes, target.prefixes
    return all(before[m] == after[m] for m in (*target.partial_dims, *(m for _, order in source.orders for m in order)))


def pairs_of(cuts: Cuts) -> list[tuple[int, int]]:
    """The cuts as (mesh dim, split factor) pairs; the split factor of a plain cut is 1."""
    return [cut if isinstance(cut, tuple) else (cut, 1) for cut in cuts]


@dataclass(frozen=True)
class Layout:
    """The distribution of a tensor over a mesh: one placement per mesh dim, and the shard order of each tensor dim.

    `str` gives the text form that `parse` reads.

    Args:
        placements: one per mesh dim: `Replicate`, `Shard`, `StridedShard` or `Partial`.
        orders: tensor dim -> the mesh dims that cut it, the first cut first. Tensor dims that are left out are cut in
            ascending order of mesh dims.

    Attributes:
        orders: (tensor dim, mesh dims that cut it) of every sharded tensor dim, sorted by tensor dim.
        all_cuts: (tensor dim, its cuts), sorted by tensor dim.
        prefixes: for each mesh dim (tensor dim, the cuts before it), (partial op,), or (). A mesh dim has equal entries
            in two layouts if it cuts the same tensor dim after the same earlier cuts, has the same op, or is replicated
            in both.
        partial_dims: the partial mesh dims.

    Raises:
        ArgumentError: an unknown op, a negative tensor dim, or an order that is not a permutation of the mesh dims that
            cut the tensor dim.
        UnsupportedError: partial ops other than sum with avg in one layout.
    """

    placements: tuple[Placement, ...]
    orders: Orders = ()
    all_cuts: tuple[tuple[int, Cuts], ...] = field(init=False, repr=False, compare=False)
    prefixes: tuple[tuple, ...] = field(init=False, repr=False, compare=False)
    partial_dims: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __init__(
        self, placements: Sequence[Placement], orders: Mapping[int, Sequence[int]] | Orders | None = None
    ) -> None:
        try:
            placements = tuple(placements)
            explicit = {operator.index(d): whole_numbers("layout: orders", o) for d, o in dict(orders or {}).items()}
        except (TypeError, ValueError):
            raise ArgumentError(
                f"layout: placements {shown(placements)}, orders {shown(orders)}; allowed: a sequence of placements, "
                f"and a mapping of tensor dims to mesh dims"
            ) from None
        if len(placements) > MAX_DIMS:
            raise ArgumentError(f"layout: {len(placements)} placements; allowed: up to {MAX_DIMS}, one per mesh dim")
        cuts: dict[int, list[int]] = {}
        strided: set[int] = set()
        ops = set()
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                if not _is_number(placement.dim, 0):
                    raise ArgumentError(
                        f"layout: mesh dim {mesh_dim} shards tensor dim {shown(placement.dim)}; allowed: 0 and up"
                    )
                cuts.setdefault(placement.dim, []).append(mesh_dim)
                if isinstance(placement, StridedShard):
                    if not placement.own:
                        strided.add(placement.dim)
                    if not _is_number(placement.split, 1):
                        raise ArgumentError(
                            f"layout: mesh dim {mesh_dim} has split factor {shown(placement.split)}; allowed: 1 and up"
                        )
                    if not isinstance(placement.own, bool):
                        raise ArgumentError(
                            f"layout: mesh dim {mesh_dim} has own {shown(placement.own)}; allowed: True, False"
                        )
            elif isinstance(placement, Partial):
                if placement.op not in REDUCE_OPS:
                    raise ArgumentError(
                        f"layout: mesh dim {mesh_dim} has partial op {shown(placement.op)}; "
                        f"allowed: {', '.join(REDUCE_OPS)}"
                    )
                ops.add(placement.op)
            elif not isinstance(placement, Replicate):
                raise ArgumentError(
                    f"layout: mesh dim {mesh_dim} has {shown(placement)}; allowed: Replicate, Shard, Partial"
                )
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise UnsupportedError(f"layout: partial ops {sorted(ops)} do not mix; allowed: one op, or sum and avg")
        for tensor_dim, order in explicit.items():
            order = tuple(order)
            if len(set(order)) != len(order):
                raise ArgumentError(
                    f"layout: the order of tensor dim {shown(tensor_dim)}, {shown(order)}, repeats a mesh dim; "
                    f"allowed: each once"
                )
            if sorted(order) != cuts.get(tensor_dim, []):
                raise ArgumentError(
                    f"layout: the order of tensor dim {shown(tensor_dim)} is {shown(order)}, but the mesh dims that "
                    f"cut it are "
                    f"{tuple(cuts.get(tensor_dim, []))}; allowed: a permutation of those"
                )
            if tensor_dim in strided and order != tuple(cuts[tensor_dim]):
                raise ArgumentError(
                    f"layout: tensor dim {tensor_dim} has both a strided shard and an order; allowed: one of them"
                )
        self._set(placements, tuple((d, tuple(explicit.get(d, c))) for d, c in sorted(cuts.items())))

    def _set(self, placements: tuple[Placement, ...], orders: Orders) -> Layout:
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "orders", orders)
        # Cached, as layouts are keys of many caches.
        object.__setattr__(self, "_hash", hash((placements, orders)))
        strided: dict[int, int | tuple[int, int]] = {
            m: (m, p.split) for m, p in enumerate(placements) if isinstance(p, StridedShard)
        }
        prefixes: list[tuple] = [(p.op,) if isinstance(p, Partial) else () for p in placements]
        all_cuts: tuple[tuple[int, Cuts], ...] = orders
        if strided:
            all_cuts = tuple((d, tuple([strided.get(m, m) for m in order])) for d, order in orders)
        for d, cuts in all_cuts:
            for i, cut in enumerate(cuts):
                if isinstance(cut, tuple):
                    prefixes[cut[0]] = (d, *cuts[: i + 1])
                else:
                    prefixes[cut] = (d, *cuts[:i])
        object.__setattr__(self, "all_cuts", all_cuts)
        object.__setattr__(self, "prefixes", tuple(prefixes))
        object.__setattr__(self, "partial_dims", tuple([m for m, p in enumerate(placements) if isinstance(p, Partial)]))
        return self

    @classmethod
    def unchecked(cls, placements: tuple[Placement, ...], orders: Orders) -> Layout:
        """A layout without checks; `orders` must have all sharded tensor dims, sorted by tensor dim."""
        return _unchecked(placements, orders)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def order(self, tensor_dim: int) -> tuple[int, ...]:
        """The mesh dims that cut `tensor_dim`, the first cut first."""
        return dict(self.orders).get(tensor_dim, ())

    def cuts(self, tensor_dim: int) -> Cuts:
        """The cuts of `tensor_dim`, the first cut first."""
        return dict(self.all_cuts).get(tensor_dim, ())

    @property
    def strided_dims(self) -> tuple[int, ...]:
        """The tensor dims with a strided shard."""
        if self.all_cuts == self.orders:
            return ()
        return tuple(d for d, cuts in self.all_cuts if any(isinstance(m, tuple) for m in cuts))

    @property
    def has_partial(self) -> bool:
        """Whether any mesh dim is partial."""
        return bool(self.partial_dims)

    def check(self, mesh_shape: Sequence[int], ndim: int, name: str = "layout") -> None:
        """Raise ArgumentError unless there is one placement per mesh dim and all sharded tensor dims exist.

        Args:
            ndim: the number of tensor dims.
            name: the argument that messages name.
        """
        self._check_mesh(mesh_shape, name)
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and placement.dim >= ndim:
                allowed = f"0..{ndim - 1}" if ndim else "none, as the tensor has no dims"
                raise ArgumentError(
                    f"{name}: mesh dim {mesh_dim} shards tensor dim {placement.dim}, out of range; allowed: {allowed}"
                )

    def _check_mesh(self, mesh_shape: Sequence[int], name: str = "layout") -> None:
        if len(self.placements) != len(mesh_shape):
            raise ArgumentError(
                f"{name}: {self} has {len(self.placements)} placements, the mesh {shown(tuple(mesh_shape))} has "
                f"{len(mesh_shape)} dims; allowed: one each"
            )

    def with_placement(self, mesh_dims: Collection[int], placement: Placement) -> Layout:
        """The layout with `placement` on `mesh_dims`; new shards cut last, unless the tensor dim is strided."""
        placements = [placement if m in mesh_dims else p for m, p in enumerate(self.placements)]
        cuts: dict[int, list[int]] = {}
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                cuts.setdefault(p.dim, []).append(m)
        strided = {p.dim for p in placements if isinstance(p, StridedShard) and not p.own}
        orders = {}
        for d, cut_by in cuts.items():
            if d not in strided:
                kept = [m for m in self.order(d) if m in cut_by]
                orders[d] = (*kept, *(m for m in cut_by if m not in kept))
        return Layout(placements, orders)

    def without_size_one(self, mesh_shape: Sequence[int]) -> Layout:
        """The same shards with every mesh dim of size 1 replicated."""
        if 1 not in mesh_shape:
            return self
        self._check_mesh(mesh_shape)
        placements = [Replicate() if n == 1 else p for n, p in zip(mesh_shape, self.placements, strict=True)]
        orders = {d: tuple(m for m in order if mesh_shape[m] > 1) for d, order in self.orders}
        return Layout(placements, {d: order for d, order in orders.items() if order})

    def __str__(self) -> str:
        text = " ".join(map(str, self.placements))
        explicit = [f"{d}:{','.join(map(str, order))}" for d, order in self.orders if list(order) != sorted(order)]
        return f"{text} @ {' '.join(explicit)}" if explicit else text

    def decoded(self, mesh_shape: Sequence[int]) -> Layout:
        """The same shards with strided shards replaced by shard orders wherever possible.

        The split factor of a strided shard is the product of the sizes of the mesh dims to its right that cut the same
        tensor dim before it. From right to left, each mesh dim is inserted into the order where that product is reached
        first.
        """
        strided = self.strided_dims
        if not strided:
            return self
        self._check_mesh(mesh_shape)
        placements, orders = list(self.placements), dict(self.orders)
        for d in strided:
            order = self._order_of_strided(d, mesh_shape)
            if order is not None:
                orders[d] = order
                for m in order:
                    placements[m] = Shard(d)
        return Layout(placements, orders)

    def _order_of_strided(self, tensor_dim: int, mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shard order that gives the shards of a strided tensor dim; None if there is none."""
        order: list[int] = []
        for mesh_dim in reversed(self.order(tensor_dim)):
            placement = self.placements[mesh_dim]
            split = placement.split if isinstance(placement, StridedShard) else 1
            if isinstance(placement, StridedShard) and placement.own:
                return None
            product, index = 1, 0
            while product != split and index < len(order):
                product *= mesh_shape[order[index]]
                index += 1
            if product != split:
                return None
            order.insert(index, mesh_dim)
        return tuple(order)

    @classmethod
    def parse(cls, text: str, mesh_shape: Sequence[int] | None = None) -> Layout:
        """Parse the text form of a layout.

        The text has one token per mesh dim (`R`, `S0`, `P`, `Pavg`, `Pmax`, `Pmin`, `Pprod`, `S0/2`), then optionally
        shard orders (`@ 0:1,0`). `S0/2`, a strided shard with split factor 2, becomes a shard order if possible and
        `mesh_shape` is given; `S0//2` never does.

        The forms in which torch prints placements and DTensorSpecs are accepted as well: `(Shard(dim=0), Replicate())`,
        `[Shard(0), Partial("avg")]`, `S(0)R`, `_S(0, 2)S(0)`, and with a shard order `S(0)[1]S(0)[0]`.

        Args:
            mesh_shape: the shape of the mesh, for strided shards.

        Raises:
            LayoutSyntaxError: the text cannot be parsed; the message has a caret under the error.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"layout: {shown(text)}; allowed: text such as 'S0 R'")
        tokens, orders = parse_layout_text(text)
        layout = cls(tokens, orders)
        if mesh_shape is None or not layout.strided_dims:
            return layout
        mesh_shape = whole_numbers("mesh_shape", mesh_shape)
        if len(mesh_shape) != len(tokens):
            raise LayoutSyntaxError(text, 0, f"{len(tokens)} placements; allowed: {len(mesh_shape)}, one per mesh dim")
        return layout.decoded(mesh_shape)


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


@lru_cache(maxsize=1 << 14)
def _unchecked(placements: tuple[Placement, ...], orders: Orders) -> Layout:
    return Layout.__new__(Layout)._set(placements, orders)
