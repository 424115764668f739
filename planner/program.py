"""A program: what every rank, or one rank, does to get from one layout to another. It prints and serialises itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .cross_mesh_exchange import price_step
from .dtypes import ITEMSIZE
from .exchange import FILL, Boxes
from .index_sets import elements_in_common, held_sizes
from .layout import Layout, receivers_contribute
from .mesh import Mesh
from .search import Route
from .topology import Topology


@dataclass(frozen=True)
class Reduce:
    """How contributors' boxes become one: `op` in ascending order of senders, then a division, then one rounding."""

    op: str
    contributors: int
    divisor: float = 1

    def __str__(self) -> str:
        scale = "" if self.divisor == 1 else f" ÷ {self.divisor:g}"
        return f"{self.op} of {self.contributors}{scale}" if self.contributors > 1 else f"copy{scale}"


@dataclass(frozen=True, eq=False)
class Step:
    """From `source` to `target`, each on its mesh; `fill` is what boxes without a sender get; `reduce` is None for
    plain copies. Boxes are in positions of the program's mesh."""

    source_mesh: Mesh
    source: Layout
    target_mesh: Mesh
    target: Layout
    boxes: Boxes
    reduce: Reduce | None
    fill: float | int | bool

    kind = "step"

    @cached_property
    def receivers_contribute(self) -> bool:
        """Whether every rank is one of the contributors of all that it receives."""
        return self.source_mesh == self.target_mesh and receivers_contribute(self.source, self.target)

    @property
    def slabs(self) -> int:
        """Copies of what a rank ends with that are held beside it before they are reduced, its own term not counted."""
        terms = self.reduce.contributors if self.reduce else 1
        return 0 if terms == 1 else terms - self.receivers_contribute


@dataclass(frozen=True, eq=False)
class Local(Step):
    """No rank receives anything."""

    kind = "local"


@dataclass(frozen=True, eq=False)
class Exchange(Step):
    """Ranks that differ only along the mesh dims `group` meet; between two meshes those that have a box in common."""

    group: tuple[int, ...] | None = ()
    kind = "exchange"


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank exchanges with others in one step, with those of its node and with those beyond."""

    received_near: int
    received_far: int
    sent_near: int
    sent_far: int

    @property
    def received(self) -> int:
        return self.received_near + self.received_far

    @classmethod
    def of(cls, boxes: Boxes, position: int, nodes: np.ndarray | None) -> Traffic:
        """`nodes`: the node of each mesh position; None: all are near each other."""
        counts = []
        elements = np.broadcast_to(boxes.elements[:, None], boxes.sender.shape)
        receiver = np.broadcast_to(boxes.receiver[:, None], boxes.sender.shape)
        moved = (boxes.sender != FILL) & (boxes.sender != receiver)
        for mine, other in ((receiver == position, boxes.sender), (boxes.sender == position, receiver)):
            rows = mine & moved
            far = 0 if nodes is None else int(elements[rows][nodes[other[rows]] != nodes[position]].sum())
            counts += [int(elements[rows].sum()) - far, far]
        return cls(*counts)


@dataclass(frozen=True, eq=False)
class Program:
    """The steps from layout `src` to layout `dst`.

    `rank` is a mesh position, or None for the program of all. `bytes_received`, `bytes_over_network`, `bytes_bound` and
    `peak_bytes` have one int per rank in mesh row-major order, or a single one if `rank` is given; `bytes_bound` is
    None where a layout is partial.

    Attributes:
        shape, dtype: of the whole tensor; the dtype by name.
        src, dst: layouts on `source_mesh` and `target_mesh`.
        steps: `Local` and `Exchange` steps, in order; none where nothing is to be done.
        rank: a mesh position, or None; `ranks` are the positions it is the program of.
        mesh: what positions are counted on. Between two meshes one mesh dim of everyone: the ranks of the source's mesh
            in its order, then those that only the target's has.
        topology: what it was planned for; None where bytes alone decided.
        others: routes that lost on that topology, the cheapest first.
        source_mesh, target_mesh: the meshes of `src` and `dst`; None: `mesh`.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    rank: int | None = None
    topology: Topology | None = None
    others: tuple[Route, ...] = ()
    source_mesh: Mesh = None  # type: ignore[assignment]
    target_mesh: Mesh = None  # type: ignore[assignment]
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("source_mesh", "target_mesh"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.mesh)
        object.__setattr__(self, "ranks", tuple(range(self.mesh.size)) if self.rank is None else (self.rank,))

    @property
    def exchanges(self) -> int:
        """Steps in which ranks meet."""
        return sum(isinstance(step, Exchange) for step in self.steps)

    @property
    def crosses(self) -> bool:
        """Whether source and target are on two meshes."""
        return self.source_mesh != self.target_mesh

    def members(self, step: Step, position: int) -> tuple[int, ...]:
        """The positions that meet in a step, itself included, ascending."""
        if not isinstance(step, Exchange):
            return (position,)
        if step.group is not None:
            return self._along(step.target_mesh, position, step.group)
        boxes = step.boxes
        peers = np.concatenate(
            [boxes.sender[boxes.receiver == position, 0], boxes.receiver[boxes.sender[:, 0] == position]]
        )
        return tuple(np.unique(np.append(peers, position)).tolist())

    def first_group(self, position: int) -> tuple[int, ...]:
        """The ranks of the first exchange of a mesh position, itself included, ascending; itself if there is none."""
        for step in self.steps:
            members = self.members(step, position)
            if len(members) > 1:
                return self._ranks(members)
        return self._ranks([position])

    def participants(self, position: int) -> tuple[int, ...]:
        """The ranks that run the program in step with a mesh position, itself included, ascending."""
        exchanges = [step for step in self.steps if isinstance(step, Exchange)]
        if not exchanges:
            return (self.mesh.rank_at(position),)
        if self.crosses:
            return self._ranks(range(self.mesh.size))
        return self._ranks(self._along(self.mesh, position, {m for step in exchanges for m in step.group or ()}))

    def _along(self, mesh: Mesh, position: int, mesh_dims: Collection[int]) -> tuple[int, ...]:
        """The positions along mesh dims of a mesh, the program's own or another; itself where it is not in it."""
        if mesh is self.mesh or mesh == self.mesh:
            return _positions_along(mesh, position, frozenset(mesh_dims))
        (at,) = mesh.positions_of(np.array([self.mesh.rank_at(position)])).tolist()
        if at < 0:
            return (position,)
        ranks = mesh.rank_array[list(mesh.subgroup(at, sorted(mesh_dims)))]
        return tuple(sorted(self.mesh.positions_of(ranks).tolist()))

    def _ranks(self, positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(map(self.mesh.rank_at, positions)))

    @property
    def is_identity(self) -> bool:
        """Nothing moves and nothing changes: the output is the input."""
        return not self.steps

    def local_shape(self, layout: Layout, position: int, mesh: Mesh | None = None) -> tuple[int, ...]:
        """The shape of the shard that a position holds under `layout` on `mesh` (the program's, unless given).

        A rank that is not in the mesh holds nothing: (0,) * max(tensor dims, 1).
        """
        mesh = mesh or self.mesh
        key = layout, position, mesh
        found = self._shapes.get(key)
        if found is None:
            at = self.coordinate_in(mesh, position)
            found = (0,) * max(len(self.shape), 1) if at is None else held_sizes(self.shape, layout, mesh.shape, at)
            if self.rank is not None:  # then they are those of its peers alone
                self._shapes[key] = found
        return found

    @cached_property
    def _shapes(self) -> dict[tuple[Layout, int, Mesh], tuple[int, ...]]:
        """Local shapes that were asked for, which is done again and again while a program is bound."""
        return {}

    def source_shape(self, position: int) -> tuple[int, ...]:
        """The shape of what a position holds at first."""
        return self.local_shape(self.src, position, self.source_mesh)

    def target_shape(self, position: int) -> tuple[int, ...]:
        """The shape of what a position ends with."""
        return self.local_shape(self.dst, position, self.target_mesh)

    def shape_before(self, step: Step, position: int) -> tuple[int, ...]:
        """The shape of what a position holds when a step begins."""
        return self.local_shape(step.source, position, step.source_mesh)

    def shape_after(self, step: Step, position: int) -> tuple[int, ...]:
        """The shape of what a position holds when a step is done."""
        return self.local_shape(step.target, position, step.target_mesh)

    def local_bytes(self, layout: Layout, position: int) -> int:
        """Bytes of the shard that a position holds under `layout`."""
        return self._bytes(self.local_shape(layout, position))

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * ITEMSIZE[self.dtype]

    @cached_property
    def bytes_received(self) -> list[int]:
        """What comes from other ranks in all steps together."""
        size = ITEMSIZE[self.dtype]
        exchanges = [step for step in self.steps if isinstance(step, Exchange)]
        return [sum([step.boxes.elements_received(r) for step in exchanges]) * size for r in self.ranks]

    @cached_property
    def bytes_over_network(self) -> list[int]:
        """Of `bytes_received`, what comes from another node; 0 without a topology."""
        size = ITEMSIZE[self.dtype]
        return [sum(self.traffic(step, r).received_far for step in self.steps) * size for r in self.ranks]

    @cached_property
    def cost_us(self) -> float | None:
        """Microseconds on the rank that takes longest, priced on the topology; None without one."""
        topology = self.topology
        if topology is None:
            return None
        prices = (
            price_step(step.source_mesh, step.source, step.target_mesh, step.target, self.shape, self.dtype, topology)
            for step in self.steps
        )
        return sum(price.us for price in prices) + (topology.call_us if self.steps else 0.0)

    def traffic(self, step: Step, position: int) -> Traffic:
        """Elements that a position receives and sends in a step, inside its node and beyond."""
        nodes = None
        if self.topology is not None and self.topology.node_size is not None:
            nodes = self.mesh.rank_array // self.topology.node_size
        return Traffic.of(step.boxes, position, nodes)

    @cached_property
    def bytes_bound(self) -> list[int] | None:
        """What each rank must receive at least: its target shard without what it holds. None with partial."""
        if self.src.has_partial or self.dst.has_partial:
            return None
        bound = []
        source, target = self.source_mesh, self.target_mesh
        for r in self.ranks:
            at, to = self.coordinate_in(source, r), self.coordinate_in(target, r)
            held = 0
            if at is not None and to is not None:
                held = elements_in_common(self.shape, self.src, (source.shape, at), self.dst, (target.shape, to))
            bound.append(self._bytes(self.target_shape(r)) - held * ITEMSIZE[self.dtype])
        return bound

    def coordinate_in(self, mesh: Mesh, position: int) -> tuple[int, ...] | None:
        """The coordinate of a position in a mesh, the program's own or another; None if it is not in it."""
        if mesh is not self.mesh and mesh != self.mesh:
            (position,) = mesh.positions_of(np.array([self.mesh.rank_at(position)])).tolist()
        return None if position < 0 else mesh.coordinate(position)

    @cached_property
    def peak_bytes(self) -> list[int]:
        """Input, output, and what a step holds beside them: a layout between steps, contributions not yet reduced, and
        what is packed or not yet unpacked for links that are not one-sided."""
        size = ITEMSIZE[self.dtype]
        peaks = []
        for r in self.ranks:
            original = self._bytes(self.source_shape(r))
            peak = original
            for i, step in enumerate(self.steps):
                before = self._bytes(self.shape_before(step, r)) if i else 0
                traffic = self.traffic(step, r)
                packed = 0
                if self.topology is not None:
                    packed += 0 if self.topology.node.one_sided else traffic.received_near + traffic.sent_near
                    packed += 0 if self.topology.network.one_sided else traffic.received_far + traffic.sent_far
                after = self._bytes(self.shape_after(step, r))
                peak = max(peak, original + before + packed * size + (1 + step.slabs) * after)
            peaks.append(peak)
        return peaks

    @cached_property
    def digest(self) -> int:
        """63 bits that differ for different requests: what ranks compare when they meet."""
        request: list[object] = [self.mesh.shape, self.mesh.ranks, self.shape, self.dtype, str(self.src), str(self.dst)]
        if self.crosses:
            request += [(mesh.shape, mesh.ranks) for mesh in (self.source_mesh, self.target_mesh)]
        if self.topology is not None or len(self.steps) > 1:
            request += [self.topology, *(str(step.target) for step in self.steps)]
        return int.from_bytes(hashlib.blake2b(repr(request).encode(), digest_size=8).digest(), "little") >> 1

    def explain(self, means: Sequence[object] = ()) -> str:
        """The program as text: each step with the mesh dims it moves along, its boxes and bytes; then the totals.

        `means`: what carries each step out, where that is known.
        """
        from .render.explain import explain  # told of programs, so it comes after them

        return explain(self, means)

    def __str__(self) -> str:
        return self.explain()

    def to_svg(self) -> str:
        """The program as a picture: `shardweave.draw`."""
        from .render.draw import draw

        return draw(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        from .render.serialise import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """The program that `to_dict` was called on.

        The steps are planned again, for the layouts that the program passes through, and all that `data` says has to be
        the same: whatever is read can be carried out. It takes as long as planning the steps did.

        Raises:
            ArgumentError: something that `to_dict` does not make; the text says where it is, what is there and what is
                allowed.
        """
        from .render.parse import program_of

        return program_of(data)

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that `to_json` was called on.

        Raises:
            ArgumentError: no JSON, or as for `from_dict`.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:  # numbers of over 4,300 digits are a ValueError
            raise ArgumentError(f"program: no JSON: {error}") from None
        return cls.from_dict(data)


@lru_cache(maxsize=4096)
def _positions_along(mesh: Mesh, position: int, mesh_dims: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(mesh.subgroup(position, sorted(mesh_dims))))


def format_bytes(n: int | float) -> str:
    """Binary units, three digits."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
