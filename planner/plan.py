"""Plans a request: one exchange, or the cheapest path of several where links differ or values are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..errors import ArgumentError
from .arguments import check_layout, check_shape, check_target, normalized_layouts, resolve_layout
from .bounded_fan_in import bound_fan_in
from .cost.cross_mesh_cost import cross_mesh_price
from .cost.priced_ranks import PRICED_WHOLE
from .cost.topology import NVLINK_NODE, Topology, TopologyName
from .cross_mesh_plan import plan_cross_mesh
from .exchange.build_steps import build_step
from .exchange.layout_change import LayoutChange
from .exchange.local_slice import LocalSlice
from .exchange.node_change import layout_change
from .layouts.dtypes import ITEMSIZE, check_dtype
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout
from .layouts.mesh import Mesh, whole_numbers
from .layouts.nodes import Nodes
from .layouts.placements import Shard
from .mesh_split import split_by_fan_in, split_by_nodes
from .node_paths import best_path
from .path import Path
from .program import Program
from .program_base import Requested
from .request import Request
from .search import Search


def plan(
    mesh: Mesh | Sequence[int],
    shape: Sequence[int],
    dtype: str,
    source: Layout | str,
    target: Layout | str,
    *,
    target_mesh: Mesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | TopologyName | None = None,
    max_bytes: int | None = None,
) -> Program:
    """Plan the redistribution of a tensor of the global `shape` from layout `source` to layout `target`.

    Args:
        mesh: a `Mesh` or its shape.
        shape: the global shape of the tensor.
        dtype: a name such as "bfloat16".
        source, target: layouts or their text form (`Layout.parse`).
        target_mesh: the mesh of `target`, if it is not `mesh`: of the same ranks, of some of them, or of others.
            Positions then refer to the ranks of both meshes, those of `mesh` first (`Program.mesh`).
        rank: a mesh position: plan its part only, in time proportional to the number of its peers. None: plan all
            ranks.
        topology: the links between ranks; the program is the cheapest found on them. On up to 32 ranks whose nodes are
            not the product of mesh dims, the ranks of a node may share what it receives, and add what it sends; with
            `max_bytes` such programs are not tried. A mesh dim that spans several nodes is split in two in the
            program, between nodes and inside them, at the same positions (as is one along which over 512 terms are
            summed). None: all links are alike, and bytes alone decide.
        max_bytes: the bytes that a rank may hold at most: input, output and intermediate results. On more than 128
            ranks this is checked by the estimates for 16 of them. Without a topology, plans that stay within it are
            compared by their costs on `NVLINK_NODE`, which the program does not state.

    Raises:
        ArgumentError: an argument is invalid, or no plan that was found stays within `max_bytes`; the message names the
            argument, its value and what is allowed.
        UnsupportedError: a reduction that is not defined for the dtype, or an unsupported target (partial products).
    """
    shape = check_shape(shape)
    return planner_of(
        mesh,
        len(shape),
        dtype,
        source,
        target,
        target_mesh=target_mesh,
        rank=rank,
        topology=topology,
        max_bytes=max_bytes,
    ).program(shape)


def planner_of(
    mesh: Mesh | Sequence[int],
    ndim: int,
    dtype: str,
    source: Layout | str,
    target: Layout | str,
    *,
    target_mesh: Mesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | TopologyName | None = None,
    max_bytes: int | None = None,
) -> Planner:
    """The cached planner for tensors of `ndim` dims and any sizes. Args and errors as for `plan`."""
    return _planner(Request(mesh, (1,) * ndim, dtype, source, target, target_mesh, rank, topology, max_bytes))


class Planner:
    """Plans one request for tensors of any shape; what depends on the layouts alone is computed once.

    Args:
        request: the request; only the number of dims of its shape counts.

    Attributes:
        local_slice: if each rank keeps a part of its shard, that slice, which needs no program; else None.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.mesh, _, self.dtype, self.source, self.target, self.target_mesh = request.fields()
        self.rank = request.rank
        self.is_cross_mesh = not self.mesh.same_ranks(self.target_mesh)
        self._changes: tuple[LayoutChange, ...] | None = None
        """The changes of a path that is the same for tensors of all shapes."""
        self.local_slice: LocalSlice | None = None
        if not self.is_cross_mesh and request.topology is None and request.max_bytes is None:
            layouts = normalized_layouts(self.mesh, len(request.shape), self.dtype, self.source, self.target)
            if len(layouts) == 1 or not layout_change(self.mesh, self.dtype, *layouts).reduced:
                self._changes = layout_changes(self.mesh, self.dtype, layouts)
            if self._changes and self.rank is not None and LocalSlice.applies(self._changes[0]):
                self.local_slice = LocalSlice(self._changes[0], self.rank)

    def on(self, topology: Topology) -> Planner:
        """The planner of the same request on a topology."""
        return _planner(replace(self.request, topology=topology))

    def program(self, shape: tuple[int, ...]) -> Program:
        """The program for a tensor of `shape` (sizes of 0 and up); cached.

        Raises:
            ArgumentError, UnsupportedError: as for `plan`.
        """
        return _cached_program(self, shape)

    def make(self, shape: tuple[int, ...]) -> Program:
        """A new program for a tensor of `shape`."""
        if self._changes is not None:
            steps = tuple([build_step(change, shape, self.rank) for change in self._changes])
            return Program(self.mesh, shape, self.dtype, self.source, self.target, steps, self.rank)
        request = self.request.with_shape(shape)
        program = _plan_cross_mesh(request) if self.is_cross_mesh else _plan_on_mesh(request)
        is_split = program.source_mesh != self.mesh or self.is_cross_mesh and program.target_mesh != self.target_mesh
        if not is_split:
            return program
        return replace(program, requested=Requested(self.mesh, self.source, self.target_mesh, self.target))


_planner = lru_cache(maxsize=4096)(Planner)
_cached_program = lru_cache(maxsize=4096)(Planner.make)


def redistribute_cost(
    mesh: Mesh | Sequence[int],
    shape: Sequence[int],
    dtype: str,
    source: Layout | str,
    target: Layout | str,
    topology: Topology = NVLINK_NODE,
) -> float:
    """The estimated microseconds of the program of `plan` on the slowest rank, without building the program; cached.

    Args and errors as for `plan`.
    """
    mesh = mesh if isinstance(mesh, Mesh | tuple) else whole_numbers("mesh", mesh)
    return _cost(mesh, shape if isinstance(shape, tuple) else check_shape(shape), dtype, source, target, topology)


@lru_cache(maxsize=65536)
def _cost(
    mesh: Mesh | tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    source: Layout | str,
    target: Layout | str,
    topology: Topology,
) -> float:
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    layouts = resolve_layout("source", source, mesh), resolve_layout("target", target, mesh)
    return _search(mesh, check_shape(shape), check_dtype(dtype), *layouts, topology, None).path.us


def _plan_on_mesh(request: Request) -> Program:
    mesh, shape, dtype, source, target, _ = request.fields()
    if request.topology is None and request.max_bytes is None:
        # A value is reduced; otherwise the direct exchange is the only candidate and `Planner` has handled it.
        ends = _split_ends(mesh, shape, source, target, None)
        layouts = _path_of_fewest_bytes(
            ends.mesh, shape, dtype, *normalized_layouts(ends.mesh, len(shape), dtype, ends.source, ends.reduced)
        )
        return _program(ends, shape, dtype, layouts, (), request.rank, None)
    ends, path = _search(mesh, shape, dtype, source, target, request.topology or NVLINK_NODE, request.max_bytes)
    return _program(ends, shape, dtype, path.layouts, path.others, request.rank, request.topology)


def _plan_cross_mesh(request: Request) -> Program:
    source_mesh, shape, dtype, source, target, target_mesh = request.fields()
    check_layout("source", source, source_mesh, shape, dtype)
    check_layout("target", target, target_mesh, shape, dtype)
    check_target(target, [None] * target_mesh.ndim)
    if request.topology is None and request.max_bytes is not None:
        return replace(_plan_cross_mesh(replace(request, topology=NVLINK_NODE)), topology=None)
    topology = request.topology
    if topology is not None:
        source_mesh, (source,) = split_by_nodes(source_mesh, shape, (source,), topology)
        target_mesh, (target,) = split_by_nodes(target_mesh, shape, (target,), topology)
        request = replace(request, mesh=source_mesh, source=source, target_mesh=target_mesh, target=target)
        if source_mesh.same_ranks(target_mesh):
            return _plan_on_mesh(request)
    return plan_cross_mesh(request)


class _Ends(NamedTuple):
    """A request on one mesh after mesh dims are split.

    Where too many terms are reduced to uneven shards, the parts of a mesh dim cut a tensor dim one after the other, and
    a last step brings the shards that are wanted.

    Attributes:
        mesh, source: the source.
        reduced: the layout on `mesh` in which values are reduced.
        target_mesh, target: the target, on a mesh of the same ranks in the same order. They are `mesh` and `reduced`
            unless a last step is needed.
    """

    mesh: Mesh
    source: Layout
    reduced: Layout
    target_mesh: Mesh
    target: Layout

    def last_change(self, dtype: str, nodes: Nodes | None) -> LayoutChange | None:
        """The change from `reduced` to `target`; None if no last step is needed."""
        if self.mesh == self.target_mesh:
            return None
        source, target = (
            self.reduced.without_size_one(self.mesh.shape), self.target.without_size_one(self.target_mesh.shape)
        )  # fmt: skip
        return layout_change(self.mesh, dtype, source, target, nodes, self.target_mesh)


def _split_ends(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, topology: Topology | None) -> _Ends:
    if topology is not None:
        mesh, (source, target) = split_by_nodes(mesh, shape, (source, target), topology)
    mesh, source, target = split_by_fan_in(mesh, shape, source, target)
    return _Ends(*split_by_fan_in(mesh, shape, source, target, uneven=True), mesh, target)


class _SearchResult(NamedTuple):
    """The ends after mesh dims are split, and the cheapest path from the source to the layout in which values are
    reduced; its price includes the last step."""

    ends: _Ends
    path: Path


@lru_cache(maxsize=4096)
def _search(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    source: Layout,
    target: Layout,
    topology: Topology,
    max_bytes: int | None,
) -> _SearchResult:
    normalized_layouts(mesh, len(shape), dtype, source, target)  # for its checks
    ends = _split_ends(mesh, shape, source, target, topology)
    mesh = ends.mesh
    start, end = ends.source.without_size_one(mesh.shape), ends.reduced.without_size_one(mesh.shape)
    source_bytes = math.prod(held_sizes(shape, start, mesh.shape, (0,) * mesh.ndim)) * ITEMSIZE[dtype]
    if start == end:
        if max_bytes is not None and source_bytes > max_bytes:
            raise ArgumentError(
                f"max_bytes: {max_bytes}; allowed: at least {source_bytes}, the size of a shard of ({start})"
            )
        return _SearchResult(ends, Path((start,), 0.0, source_bytes))
    search = Search(mesh, shape, dtype, start, end, topology)
    last = ends.last_change(dtype, topology.rank_nodes)
    last_price = None if last is None else cross_mesh_price(last, shape, topology)

    def with_last(path: Path) -> Path:
        """The path with the price of the last step."""
        if last_price is None:
            return path
        us, peak = path.us + round(last_price.us, 3), max(path.peak_bytes, source_bytes + last_price.peak_bytes)
        return replace(path, us=us, peak_bytes=peak, others=tuple(map(with_last, path.others)))

    if max_bytes is None:
        found = search.cheapest()
        path = best_path(mesh, shape, dtype, start, end, topology, found)
        if path is not found:
            path = replace(path, others=(replace(found, others=()), *found.others))
        return _SearchResult(ends, with_last(path))

    def peak_bytes(path: Path) -> int:
        """The bytes that a rank holds at most: exact from the boxes, or on a large mesh the estimate."""
        if mesh.size > PRICED_WHOLE:
            return with_last(path).peak_bytes
        return max(_program(ends, shape, dtype, path.layouts, (), None, topology).peak_bytes)

    return _SearchResult(ends, with_last(search.cheapest_within(max_bytes, peak_bytes)))


def _program(
    ends: _Ends,
    shape: tuple[int, ...],
    dtype: str,
    layouts: tuple[Layout, ...],
    others: tuple[Path, ...],
    rank: int | None,
    topology: Topology | None,
) -> Program:
    nodes = None if topology is None else topology.rank_nodes
    last = ends.last_change(dtype, nodes)
    changes = layout_changes(ends.mesh, dtype, layouts, nodes, None if last is None else last.positions)
    steps = tuple([build_step(change, shape, rank) for change in (*changes, *([last] if last else []))])
    mesh, meshes = (ends.mesh, ()) if last is None else (last.positions, (ends.mesh, ends.target_mesh))
    return Program(mesh, shape, dtype, ends.source, ends.target, steps, rank, topology, others, *meshes)


def _path_of_fewest_bytes(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """The layouts of the path that receives the fewest bytes: the direct exchange, or a reduce-scatter first. Steps of
    more than `MAX_FAN_IN` terms are done in stages.

    A step counts the bytes of the largest shard, the receiver's own part included, so that every rank computes the same
    figure. The direct exchange wins ties: two ranks that each receive the other's whole value move as many bytes as two
    that reduce a half each and then exchange halves, in one step instead of two.
    """
    change = layout_change(mesh, dtype, source, target)
    if not change.reduced:
        return source, target
    size, first = ITEMSIZE[dtype], (0,) * mesh.ndim

    def bytes_and_steps(path: _ScatterPath) -> tuple[int, int]:
        nbytes = 0
        for layout, contributors in path.received:
            nbytes += math.prod(held_sizes(shape, layout, mesh.shape, first)) * contributors * size
        return nbytes, len(path.layouts)

    paths = [path for path in _scatter_paths(change, len(shape)) if path.dim is None or shape[path.dim] > 1]
    return min(paths, key=bytes_and_steps).staged


class _ScatterPath(NamedTuple):
    """A path for a value that is reduced.

    Attributes:
        dim: the tensor dim along which the value is reduce-scattered first; None for the direct exchange.
        layouts: the source, the intermediate layout if there is one, the target.
        received: of each step, its target layout and the number of contributors.
        staged: `layouts` with steps of more than `MAX_FAN_IN` terms in stages.
    """

    dim: int | None
    layouts: tuple[Layout, ...]
    received: tuple[tuple[Layout, int], ...]
    staged: tuple[Layout, ...]


@lru_cache(maxsize=1024)
def _scatter_paths(change: LayoutChange, ndim: int) -> list[_ScatterPath]:
    """The direct path, and all paths through a reduce-scatter of a tensor of `ndim` dims."""
    mesh, source, target = change.source_mesh, change.source, change.target
    dims: dict[tuple[Layout, ...], int | None] = {(source, target): None}
    for base in (source, target) if set(change.split) <= set(change.reduced) else (source,):
        for dim in range(ndim):
            if (scattered := _scattered(base, change.reduced, dim)) not in (source, target):
                dims.setdefault((source, scattered, target), dim)
    return [
        _ScatterPath(
            dim,
            layouts,
            tuple([(b, layout_change(mesh, change.dtype, a, b).contributors) for a, b in pairwise(layouts)]),
            bound_fan_in(mesh, layouts),
        )
        for layouts, dim in dims.items()
    ]


@lru_cache(maxsize=4096)
def layout_changes(
    mesh: Mesh,
    dtype: str,
    layouts: tuple[Layout, ...],
    nodes: Nodes | None = None,
    positions: Mesh | None = None,
) -> tuple[LayoutChange, ...]:
    """The changes from each layout to the next."""
    return tuple([layout_change(mesh, dtype, a, b, nodes, mesh, positions) for a, b in pairwise(layouts)])


def _scattered(base: Layout, mesh_dims: Sequence[int], tensor_dim: int) -> Layout:
    """`base` with `mesh_dims` sharding `tensor_dim`, cut last; mesh dims that shard in `base` already are unchanged."""
    return base.with_placement([m for m in mesh_dims if not isinstance(base.placements[m], Shard)], Shard(tensor_dim))
