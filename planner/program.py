"""A program: what every rank, or one rank, does to get from one layout to another. It prints and serialises itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from ..errors import ArgumentError
from .cost import Price, price
from .dtypes import ITEMSIZE
from .exchange import FILL, Boxes, Change
from .index_sets import held_box
from .layout import Layout, Partial
from .mesh import Mesh, whole_numbers
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
    """From `source` to `target`; `fill` is what boxes without a sender get; `reduce` is None for plain copies."""

    source: Layout
    target: Layout
    boxes: Boxes
    reduce: Reduce | None
    fill: float | int | bool

    kind = "step"

    @property
    def receivers_contribute(self) -> bool:
        """Whether every rank is one of the contributors of all that it receives.

        So it is where what a rank ends with lies within what it holds, partial values apart.
        """
        wanted = dict(self.target.orders)
        within = all(wanted.get(d, ())[: len(order)] == order for d, order in self.source.orders)
        pairs = zip(self.source.placements, self.target.placements, strict=True)
        return within and not any(isinstance(b, Partial) and a != b for a, b in pairs)


@dataclass(frozen=True, eq=False)
class Local(Step):
    """No rank receives anything."""

    kind = "local"


@dataclass(frozen=True, eq=False)
class Exchange(Step):
    """Ranks that differ only along the mesh dims `group` meet."""

    group: tuple[int, ...] = ()
    kind = "exchange"


@dataclass(frozen=True)
class _Traffic:
    """Elements that one rank exchanges with others in one step, with those of its node and with those beyond."""

    received_near: int
    received_far: int
    sent_near: int
    sent_far: int

    @property
    def received(self) -> int:
        return self.received_near + self.received_far

    @classmethod
    def of(cls, boxes: Boxes, position: int, nodes: np.ndarray | None) -> _Traffic:
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
        topology: what it was planned for; None where bytes alone decided.
        others: routes that lost on that topology, the cheapest first.
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
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(range(self.mesh.size)) if self.rank is None else (self.rank,))

    @property
    def exchanges(self) -> int:
        return sum(isinstance(step, Exchange) for step in self.steps)

    def first_met(self, position: int) -> tuple[int, ...]:
        """The ranks of the first exchange of a mesh position, itself included, ascending; itself if there is none."""
        return self._ranks_along(position, next((s.group for s in self.steps if isinstance(s, Exchange)), ()))

    def company(self, position: int) -> tuple[int, ...]:
        """The ranks that run the program in step with a mesh position, itself included, ascending."""
        return self._ranks_along(position, [m for s in self.steps if isinstance(s, Exchange) for m in s.group])

    def _ranks_along(self, position: int, mesh_dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(map(self.mesh.rank_at, self.mesh.subgroup(position, sorted(set(mesh_dims))))))

    @property
    def is_identity(self) -> bool:
        """Nothing moves and nothing changes: the output is the input."""
        return not self.steps

    def local_shape(self, layout: Layout, position: int) -> tuple[int, ...]:
        """The shape of the shard that a mesh position holds under `layout`."""
        box = held_box(self.shape, layout, self.mesh.shape, self.mesh.coordinate(position))
        return tuple(high - low for low, high in box)

    def local_bytes(self, layout: Layout, position: int) -> int:
        return math.prod(self.local_shape(layout, position)) * ITEMSIZE[self.dtype]

    @cached_property
    def bytes_received(self) -> list[int]:
        size = ITEMSIZE[self.dtype]
        return [sum(step.boxes.elements_received(r) for step in self.steps) * size for r in self.ranks]

    @cached_property
    def bytes_over_network(self) -> list[int]:
        """Of `bytes_received`, what comes from another node; 0 without a topology."""
        size = ITEMSIZE[self.dtype]
        return [sum(self._traffic(step, r).received_far for step in self.steps) * size for r in self.ranks]

    @cached_property
    def cost_us(self) -> float | None:
        """Microseconds on the rank that takes longest, priced on the topology; None without one."""
        prices = self._prices
        return None if prices is None else sum(p.us for p in prices)

    @cached_property
    def _prices(self) -> list[Price] | None:
        if self.topology is None:
            return None
        node_size = self.topology.node_size
        changes = (Change(self.mesh, self.shape, self.dtype, s.source, s.target, node_size) for s in self.steps)
        return [price(change, self.topology) for change in changes]

    def _traffic(self, step: Step, position: int) -> _Traffic:
        nodes = None
        if self.topology is not None and self.topology.node_size is not None:
            nodes = self.mesh.rank_array // self.topology.node_size
        return _Traffic.of(step.boxes, position, nodes)

    @cached_property
    def bytes_bound(self) -> list[int] | None:
        """What each rank must receive at least: its target shard without what it holds. None with partial."""
        if self.src.has_partial or self.dst.has_partial:
            return None
        bound = []
        for r in self.ranks:
            coordinate = self.mesh.coordinate(r)
            source, target = (held_box(self.shape, x, self.mesh.shape, coordinate) for x in (self.src, self.dst))
            held = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(source, target, strict=True)]
            wanted = [b - a for a, b in target]
            bound.append((math.prod(wanted) - math.prod(held)) * ITEMSIZE[self.dtype])
        return bound

    @cached_property
    def peak_bytes(self) -> list[int]:
        """Input, output, and what a step holds beside them: a layout between steps, contributions not yet reduced, and
        what is packed or not yet unpacked for links that are not one-sided."""
        size = ITEMSIZE[self.dtype]
        peaks = []
        for r in self.ranks:
            original = self.local_bytes(self.src, r)
            peak = original
            for i, step in enumerate(self.steps):
                before = self.local_bytes(step.source, r) if i else 0
                traffic = self._traffic(step, r)
                staged = traffic.received if step.reduce and step.reduce.contributors > 1 else 0
                if self.topology is not None:
                    staged += 0 if self.topology.node.one_sided else traffic.received_near + traffic.sent_near
                    staged += 0 if self.topology.network.one_sided else traffic.received_far + traffic.sent_far
                peak = max(peak, original + before + staged * size + self.local_bytes(step.target, r))
            peaks.append(peak)
        return peaks

    @cached_property
    def digest(self) -> int:
        """63 bits that differ for different requests: what ranks compare when they meet."""
        request: list[object] = [self.mesh.shape, self.mesh.ranks, self.shape, self.dtype, str(self.src), str(self.dst)]
        if self.topology is not None or len(self.steps) > 1:
            request += [self.topology, *(str(step.target) for step in self.steps)]
        return int.from_bytes(hashlib.blake2b(repr(request).encode(), digest_size=8).digest(), "little") >> 1

    def along(self, step: Step) -> str:
        """The mesh dims that an exchange moves along, by name; empty for a local step."""
        names = self.mesh.names or tuple(map(str, range(self.mesh.ndim)))
        return ", ".join(names[m] for m in step.group) if isinstance(step, Exchange) else ""

    def notes(self, step: Step) -> list[str]:
        """What a step takes: boxes, bytes, reduction, fill."""
        notes = [f"{len(step.boxes)} box{'' if len(step.boxes) == 1 else 'es'}"]
        if isinstance(step, Exchange):
            size = ITEMSIZE[self.dtype]
            most = max(step.boxes.elements_received(r) for r in self.ranks) * size
            notes.append(f"receives at most {format_bytes(most)}")
            if self.topology is not None and self.topology.node_size is not None:
                far = max(self._traffic(step, r).received_far for r in self.ranks) * size
                notes[-1] += f" ({format_bytes(far)} over the network)"
        if step.reduce:
            notes.append(str(step.reduce))
        if (step.boxes.sender == FILL).any():
            notes.append(f"fills the rest with {step.fill}")
        return notes

    def totals(self) -> list[str]:
        """Lines of text: bytes, bound and peak; on a topology the price too, and the routes that lost."""
        received = max(self.bytes_received)
        if self.bytes_bound is None:
            bound = "no bound with partial"
        else:
            over = [a - b for a, b in zip(self.bytes_received, self.bytes_bound, strict=True)]
            bound = f"bound {format_bytes(max(self.bytes_bound))}, {'met exactly' if not any(over) else 'not met'}"
        lines = [f"received {format_bytes(received)} ({bound}), peak {format_bytes(max(self.peak_bytes))}"]
        if self.topology is not None and self.cost_us is not None:
            over_network = format_bytes(max(self.bytes_over_network))
            lines.append(f"{self.cost_us:.1f} µs on {self.topology.name}, {over_network} over the network")
            for other in self.others:
                way = " → ".join(f"({stop})" for stop in other.stops)
                reason = f"{other.us / self.cost_us:.2f}×" if other.us > self.cost_us else "over max_bytes"
                lines.append(f"  not {way}: {other.us:.1f} µs, {reason}")
        return lines

    def explain(self) -> str:
        """The program as text: each step with the mesh dims it moves along, its boxes and bytes; then the totals."""
        title = f"{self.src} → {self.dst}   {self.dtype}{list(self.shape)} on {self.mesh}"
        lines = [title if self.rank is None else f"{title}, rank {self.rank}"]
        if self.is_identity:
            lines.append("  nothing to do: the output is the input")
        for number, step in enumerate(self.steps, 1):
            along = self.along(step)
            what = f"  {number}. {step.kind:<8} {step.source} → {step.target}"
            lines += [f"{what}   along {along}" if along else what, "     " + ", ".join(self.notes(step))]
        return "\n".join([*lines, *(f"  {line}" for line in self.totals())])

    __str__ = explain

    def to_svg(self) -> str:
        """The program as a picture: `shardweave.draw`."""
        from .drawing import draw  # a drawing is made of programs, so it comes after them

        return draw(self)

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return {
            "mesh": {"shape": self.mesh.shape, "names": self.mesh.names, "ranks": self.mesh.ranks},
            "shape": self.shape,
            "dtype": self.dtype,
            "src": str(self.src),
            "dst": str(self.dst),
            "rank": self.rank,
            "steps": [
                {
                    "kind": step.kind,
                    "source": str(step.source),
                    "target": str(step.target),
                    "group": step.group if isinstance(step, Exchange) else None,
                    "reduce": step.reduce and {f.name: getattr(step.reduce, f.name) for f in fields(step.reduce)},
                    "fill": repr(step.fill),
                    "boxes": {
                        f.name: v.tolist() if isinstance(v := getattr(step.boxes, f.name), np.ndarray) else v
                        for f in fields(step.boxes)
                    },
                }
                for step in self.steps
            ],
            "topology": None if self.topology is None else self.topology.to_dict(),
            "others": [
                {"stops": [str(x) for x in o.stops], "us": o.us, "peak_bytes": o.peak_bytes} for o in self.others
            ],
            "exchanges": self.exchanges,
            "bytes_received": self.bytes_received,
            "bytes_bound": self.bytes_bound,
            "bytes_over_network": self.bytes_over_network,
            "peak_bytes": self.peak_bytes,
            "cost_us": self.cost_us,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: dict) -> Program:
        """The program that `to_dict` was called on."""
        mesh = Mesh(**data["mesh"])
        ndim = len(data["shape"])
        steps: list[Step] = []
        for entry in data["steps"]:
            raw = entry["boxes"]
            n, axes = len(raw["receiver"]), len(raw["axes"])
            contributors = entry["reduce"]["contributors"] if entry["reduce"] else 1
            width = {"sender": contributors, "source_start": ndim, "target_start": ndim}
            arrays = {
                name: np.array(raw[name], dtype=np.int64).reshape(n, width.get(name, axes))
                for name in ("sender", "source_start", "target_start", "extent", "source_step", "target_step")
            }
            boxes = Boxes(np.array(raw["receiver"], dtype=np.int64), axes=tuple(raw["axes"]), **arrays)
            fill = _read_fill(entry["fill"])
            common = (Layout.parse(entry["source"]), Layout.parse(entry["target"]), boxes)
            reduce = Reduce(**entry["reduce"]) if entry["reduce"] else None
            if entry["kind"] == "exchange":
                steps.append(Exchange(*common, reduce, fill, tuple(entry["group"])))
            else:
                steps.append(Local(*common, reduce, fill))
        return cls(
            mesh,
            tuple(data["shape"]),
            data["dtype"],
            Layout.parse(data["src"]),
            Layout.parse(data["dst"]),
            tuple(steps),
            data["rank"],
            None if data["topology"] is None else Topology.from_dict(data["topology"]),
            tuple(
                Route(tuple(Layout.parse(stop) for stop in other["stops"]), other["us"], other["peak_bytes"])
                for other in data["others"]
            ),
        )

    @classmethod
    def from_json(cls, text: str) -> Program:
        return cls.from_dict(json.loads(text))


def _read_fill(text: str) -> float | int | bool:
    """The fill that `repr` wrote: JSON itself knows no infinity."""
    if text in ("True", "False"):
        return text == "True"
    return float(text) if any(c in text for c in ".einf") else int(text)


def format_bytes(n: int | float) -> str:
    """Binary units, three digits."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"


_MOST_ELEMENTS = 1 << 58  # of 16 bytes each, 2**62


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = whole_numbers("shape", shape)
    if any(n < 0 for n in sizes):
        raise ArgumentError(f"shape: {sizes} has a negative size; allowed: 0 and up")
    if math.prod(max(n, 1) for n in sizes) > _MOST_ELEMENTS:
        raise ArgumentError(f"shape: {sizes} has more than 2**58 elements; allowed: what 64-bit offsets reach")
    return sizes
