"""A layout: what each mesh dim does to a tensor, and in which order mesh dims cut the same tensor dim."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import ArgumentError, LayoutSyntaxError, UnsupportedError, shown
from .dtypes import REDUCE_OPS
from .layout_text import read
from .mesh import MOST_DIMS, whole_numbers
from .placements import LARGEST, Partial, Placement, Replicate, Shard, StridedShard

Orders = tuple[tuple[int, tuple[int, ...]], ...]
Cuts = tuple[int | tuple[int, int], ...]
"""What cuts a tensor dim, the first cut first: a mesh dim, or a mesh dim and the split factor of its strided shard."""


def receivers_contribute(source: Layout, target: Layout) -> bool:
    """Whether every rank holds all that it ends with, partial values apart: then it is one of the contributors of it.

    So it is where each tensor dim is cut as before, and perhaps once more, and no mesh dim becomes partial.
    """
    within = all(target.cuts(d)[: len(cuts)] == cuts for d, cuts in source.all_cuts)
    pairs = zip(source.placements, target.placements, strict=True)
    return within and not any(isinstance(b, Partial) and a != b for a, b in pairs)


def pairs_of(cuts: Cuts) -> list[tuple[int, int]]:
    """Mesh dims and split factors, 1 where the cut is plain."""
    return [cut if isinstance(cut, tuple) else (cut, 1) for cut in cuts]


@dataclass(frozen=True)
class Layout:
    """One placement per mesh dim, and for each sharded tensor dim the mesh dims that cut it, the first cut first.

    `orders` holds (tensor dim, mesh dims) sorted by tensor dim; tensor dims left out are cut in ascending order
    of mesh dims. `str` gives the text form that `parse` reads.

    Args:
        placements: one per mesh dim: `Replicate`, `Shard`, `StridedShard`, `Partial`.
        orders: tensor dim -> the mesh dims that cut it, the first cut first.

    Attributes:
        all_cuts: (tensor dim, what cuts it), sorted by tensor dim.
        prefixes: for each mesh dim what it does: (tensor dim, mesh dims that cut it before), (partial op,) or (). Equal
            for two layouts exactly if the mesh dim cuts the same tensor dim after the same earlier cuts, or never.
        partial_dims: the mesh dims that hold terms.

    Raises:
        ArgumentError: an unknown op, a negative tensor dim, an order that is no permutation of the mesh dims that cut.
        UnsupportedError: partial ops that do not mix (only sum with avg does).
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
            given = {operator.index(d): whole_numbers("layout: orders", o) for d, o in dict(orders or {}).items()}
        except (TypeError, ValueError):
            raise ArgumentError(
                f"layout: placements {shown(placements)}, orders {shown(orders)}; allowed: a sequence of placements, "
                f"and a mapping of tensor dims to mesh dims"
            ) from None
        if len(placements) > MOST_DIMS:
            raise ArgumentError(f"layout: {len(placements)} placements; allowed: up to {MOST_DIMS}, one per mesh dim")
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
            raise UnsupportedError(f"layout: partial ops {sorted(ops)} do not mix; only sum with avg does")
        for tensor_dim, order in given.items():
            order = tuple(order)
            if len(set(order)) != len(order):
                raise ArgumentError(
                    f"layout: the order of tensor dim {shown(tensor_dim)}, {shown(order)}, names a mesh dim twice"
                )
            if sorted(order) != cuts.get(tensor_dim, []):
                raise ArgumentError(
                    f"layout: the order of tensor dim {shown(tensor_dim)} is {shown(order)}, but the mesh dims that "
                    f"cut it are "
                    f"{tuple(cuts.get(tensor_dim, []))}; allowed: a permutation of those"
                )
            if tensor_dim in strided and order != tuple(cuts[tensor_dim]):
                raise ArgumentError(f"layout: tensor dim {tensor_dim} is strided and has an order as well; give one")
        self._set(placements, tuple((d, tuple(given.get(d, c))) for d, c in sorted(cuts.items())))

    def _set(self, placements: tuple[Placement, ...], orders: Orders) -> Layout:
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "orders", orders)
        # Layouts are keys of many tables.
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
        """A layout that is known to be one, with an order for every tensor dim that is cut, sorted by tensor dim."""
        return _made(placements, orders)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def order(self, tensor_dim: int) -> tuple[int, ...]:
        """The mesh dims that cut `tensor_dim`, the first cut first."""
        return dict(self.orders).get(tensor_dim, ())

    def cuts(self, tensor_dim: int) -> Cuts:
        """What cuts `tensor_dim`."""
        return dict(self.all_cuts).get(tensor_dim, ())

    @property
    def strided_dims(self) -> tuple[int, ...]:
        """The tensor dims that strided shards cut."""
        if self.all_cuts == self.orders:
            return ()
        return tuple(d for d, cuts in self.all_cuts if any(isinstance(m, tuple) for m in cuts))

    @property
    def has_partial(self) -> bool:
        """Whether a mesh dim holds terms."""
        return bool(self.partial_dims)

    def check(self, mesh_shape: Sequence[int], ndim: int, name: str = "layout") -> None:
        """Raise ArgumentError unless there is one placement per mesh dim and every tensor dim exists."""
        self._check_mesh(mesh_shape, name)
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and placement.dim >= ndim:
                allowed = f"0..{ndim - 1}" if ndim else "none, the tensor has no dims"
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
        """Some mesh dims as `placement` says; new shards cut last, where an order can say so."""
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
        """The same shards with every mesh dim of size 1 replicated: it cuts nothing and sums nothing."""
        if 1 not in mesh_shape:
            return self
        self._check_mesh(mesh_shape)
        placements = [Replicate() if n == 1 else p for n, p in zip(mesh_shape, self.placements, strict=True)]
        orders = {d: tuple(m for m in order if mesh_shape[m] > 1) for d, order in self.orders}
        return Layout(placements, {d: order for d, order in orders.items() if order})

    def __str__(self) -> str:
        text = " ".join(map(str, self.placements))
        odd = [f"{d}:{','.join(map(str, order))}" for d, order in self.orders if list(order) != sorted(order)]
        return f"{text} @ {' '.join(odd)}" if odd else text

    def decoded(self, mesh_shape: Sequence[int]) -> Layout:
        """The same shards with strided ones as a shard order where there is one.

        The split factor is the product of the sizes of the mesh dims to the right that cut the same tensor dim earlier:
        from right to left each mesh dim is put into the order where that product is reached first.
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
        order: list[int] = []
        for mesh_dim in reversed(self.order(tensor_dim)):
            placement = self.placements[mesh_dim]
            split = placement.split if isinstance(placement, StridedShard) else 1
            if isinstance(placement, StridedShard) and placement.own:
                return None
            product, place = 1, 0
            while product != split and place < len(order):
                product *= mesh_shape[order[place]]
                place += 1
            if product != split:
                return None
            order.insert(place, mesh_dim)
        return tuple(order)

    @classmethod
    def parse(cls, text: str, mesh_shape: Sequence[int] | None = None) -> Layout:
        """Read the text form: a token per mesh dim, `R`, `S0`, `P`, `Pavg`, `Pmax`, `Pmin`, `Pprod`, `S0/2`, then
        orders, `@ 0:1,0`.

        `S0/2` (strided, split factor 2) becomes an order if there is one, given `mesh_shape`; `S0//2` never does.

        What torch prints of placements and of a DTensorSpec is read as well: `(Shard(dim=0), Replicate())`,
        `[Shard(0), Partial("avg")]`, `S(0)R`, `_S(0, 2)S(0)`, and with a shard order `S(0)[1]S(0)[0]`.

        Raises:
            LayoutSyntaxError: the text does not parse; the message has a caret under the spot.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"layout: {shown(text)}; allowed: a text such as 'S0 R'")
        tokens, orders = read(text)
        layout = cls(tokens, orders)
        if mesh_shape is None or not layout.strided_dims:
            return layout
        mesh_shape = whole_numbers("mesh_shape", mesh_shape)
        if len(mesh_shape) != len(tokens):
            raise LayoutSyntaxError(text, 0, f"{len(tokens)} placements for a mesh of {len(mesh_shape)} dims")
        return layout.decoded(mesh_shape)


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


@lru_cache(maxsize=1 << 14)
def _made(placements: tuple[Placement, ...], orders: Orders) -> Layout:
    return Layout.__new__(Layout)._set(placements, orders)
