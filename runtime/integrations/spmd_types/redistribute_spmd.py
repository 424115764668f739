"""`redistribute_spmd`: redistribution of a plain tensor whose distribution is given by the types of spmd_types, along
several mesh axes in one exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from ....errors import ArgumentError, UnsupportedError, shown
from ....planner import (
    Layout,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Topology,
    TopologyName,
    check_shape,
    held_sizes,
)
from ...convert_specs import check_dtype_argument
from ...dtensor.in_graph import call_in_graph, remember
from ...dtensor.plain_calls import redistribute_plain
from ...dtensor.redistribute_options import RedistributeOptions, call_options
from ...executor.call import refuse_unplanned, why_no_data
from ...executor.choose_algorithm import Reduction
from ...executor.dispatch_modes import active_modes, is_traced
from ...process_group_cache import ProcessGroupCache, forget_dead_groups
from ...traced.redistribution import TRACED_TYPES
from ...transports.choose_transport import TransportName
from .distribution import (
    Axes,
    Distribution,
    assert_types,
    axes_of,
    distribution_of,
    spmd_types_package,
    type_text,
    types_of,
    without_type_checks,
)

_DUAL: dict[str | int | None, str | int | None] = {"R": "P", "P": "R", "I": "I"}
"""The type of the gradient of a tensor of each type; that of a shard is the same shard."""
_SpmdTypes = Mapping[Any, Any] | Any


class _Exchange(NamedTuple):
    """One direction of a redistribution.

    Attributes:
        source, target: the layouts. Axes on which a replicated value becomes partial stay replicated in them.
        keeps: whether this rank keeps its values: on those axes the first rank does, and the others have zeros.
    """

    source: Layout
    target: Layout
    keeps: bool


class _Request(NamedTuple):
    """A redistribution on the mesh of the axes that take part.

    Attributes:
        mesh: the ranks that make the call together.
        groups: the process groups of the axes.
        shape: the global shape over these axes.
        forward, backward: the exchange of the value and that of its gradient.
    """

    mesh: Mesh
    groups: tuple[dist.ProcessGroup, ...]
    shape: tuple[int, ...]
    forward: _Exchange
    backward: _Exchange

    def reversed(self) -> _Request:
        """The redistribution of the gradient."""
        return self._replace(forward=self.backward, backward=self.forward)


class _Dtypes(NamedTuple):
    communicated: torch.dtype
    result: torch.dtype
    backward: torch.dtype
    gradient: torch.dtype

    def reversed(self) -> _Dtypes:
        return _Dtypes(self.backward, self.gradient, self.communicated, self.result)


def redistribute_spmd(
    x: torch.Tensor,
    mesh: DeviceMesh,
    src: _SpmdTypes,
    dst: _SpmdTypes,
    *,
    shape: Sequence[int] | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction | None = None,
) -> torch.Tensor:
    """Redistribute a plain tensor from one distribution to another, both given by the types of spmd_types: what
    `spmd_types.redistribute` does along one axis, along any number of axes in one exchange.

    Args:
        x: this rank's tensor, which is neither changed nor aliased, except where nothing has to be done.
        mesh: a mesh with names. Every rank must call that has the same coordinates as this one on the axes that take no
            part: those whose type stays, unless they shard a tensor dim that another axis shards as well.
        src, dst: the type of each axis, R, I, P, S(dim) or V: a mapping from axes to types, or an
            `spmd_types.SpmdType`, whose `PartitionSpec` gives the order in which several axes shard a tensor dim. An
            axis is the name of a mesh dim (or a member of an enumeration with such a value), its process group, or the
            `MeshAxis` that `spmd_types.get_local_type` returns. Several mesh dims are one axis by the name that
            `DeviceMesh._flatten` gave them, if `mesh` is the root mesh, or by the process group of the flattened mesh.
            Both name the same axes. V stays V, unless the PartitionSpec says what it shards.
        shape: the global shape over the axes with known shards (V without a PartitionSpec has none); shards are those
            of torch.chunk and may be uneven. None: in `src` all ranks hold shards of the same shape.
        forward_dtype: the dtype that is communicated and returned. None: the dtype of `x`.
        backward_dtype: the dtype in which gradients are communicated; they are returned in the dtype of `x`. None: the
            dtype of `x`.
        transport, topology, reduction: as for `redistribute`.

    Returns:
        This rank's tensor of the distribution `dst`. Differentiable any number of times, with gradients as in
        spmd_types, where that of R is P, that of P is R, and those of I and S keep their type.

    Under torch.compile, the program becomes torch's functional collectives in the graph; there an axis is a name, a
    member of an enumeration or a process group, no `MeshAxis`, and `transport` has no effect.

    While spmd_types checks types, the types of `x` are checked against `src`, and the result gets those of `dst`; both
    must name all axes that `x` has types of.

    Raises:
        ArgumentError: types, a mesh or a shape that do not fit each other; raised before anything is communicated.
        UnsupportedError: shards along a mesh dim whose ranks do not ascend; a tensor
            subclass; a backend that cannot carry programs; a dtype that cannot be reduced.
        TransportError: a peer died, timed out, or made a different request.
    """
    if torch.compiler.is_dynamo_compiling():
        call = remember(
            _of_lists,
            mesh,
            _listed(src),
            _listed(dst),
            shape=shape,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            transport=transport,
            topology=topology,
            reduction=reduction,
        )
        return call_in_graph(x, call)
    try:
        _check(x, mesh, forward_dtype, backward_dtype)
        options = call_options(transport, topology, reduction)
        with without_type_checks():
            request = _request(x, mesh, src, dst, None if shape is None else check_shape(shape))
        assert_types(x, mesh, src, complete=True)
        own = x.dtype
        dtypes = _Dtypes(forward_dtype or own, forward_dtype or own, backward_dtype or own, own)
        with without_type_checks():
            if request is not None:
                out = _RedistributeSpmd.apply(x, request, dtypes, options)
            else:
                out = x if own == dtypes.result else x.to(dtypes.result)
        assert_types(out, mesh, dst)
        return out
    except (ArgumentError, UnsupportedError) as error:
        with without_type_checks():
            refuse_unplanned(error, [mesh] if isinstance(mesh, DeviceMesh) else [])
        raise


def _listed(value: Any) -> Any:
    """An argument of types for `_of_lists`: a list of axes and types, S(dim) as an int, and the entries of
    the PartitionSpec. Dynamo passes no objects of spmd_types to functions that it runs."""
    types, spec = (value, None) if isinstance(value, dict) else (value.local_type, value.partition_spec)
    kinds = [(axis, kind if isinstance(kind, Enum) else kind.dim) for axis, kind in types.items()]
    return kinds, None if spec is None else list(spec)


def _of_lists(x: torch.Tensor, mesh: DeviceMesh, src: Any, dst: Any, **options: Any) -> torch.Tensor:
    """`redistribute_spmd` of types that `_listed` made into lists."""
    spmd = spmd_types_package()

    def types(kinds: list[tuple[Any, Any]], spec: list[Any] | None) -> Any:
        of_axes = {axis: spmd.S(kind) if isinstance(kind, int) else kind for axis, kind in kinds}
        return of_axes if spec is None else spmd.SpmdType(of_axes, spmd.PartitionSpec(*spec))

    return redistribute_spmd(x, mesh, types(*src), types(*dst), **options)


class _RedistributeSpmd(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, request: _Request, dtypes: _Dtypes, options: RedistributeOptions
    ) -> torch.Tensor:
        ctx.request, ctx.dtypes, ctx.options = request, dtypes, options
        source, target, keeps = request.forward
        local = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        local = local.to(dtypes.communicated)
        if source == target:  # R and I differ in the gradient only
            out = local
        else:
            groups = request.groups
            out = redistribute_plain(local, request.mesh, request.shape, source, target, options, groups)
        if not keeps:
            # Zeros that depend on the exchange: else torch.compile would remove or move it, on this rank alone.
            out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0)
        return (out.view_as(out) if out is x else out).to(dtypes.result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        with without_type_checks():
            backward = ctx.request.reversed(), ctx.dtypes.reversed(), ctx.options
            return _RedistributeSpmd.apply(gradient, *backward), None, None, None


def _check(x: Any, mesh: Any, forward_dtype: Any, backward_dtype: Any) -> None:
    if type(x) not in TRACED_TYPES and not isinstance(x, AsyncCollectiveTensor):
        if isinstance(x, torch.Tensor):
            raise UnsupportedError(f"x: a {type(x).__name__}; allowed: a torch.Tensor")
        raise ArgumentError(f"x: {shown(x)}; allowed: a torch.Tensor")
    if not is_traced(x, active_modes()) and (obstacle := why_no_data(x)) is not None:
        raise UnsupportedError(f"x: {obstacle}; allowed: a strided tensor with data")
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        raise ArgumentError(f"mesh: {shown(mesh)}; allowed: a DeviceMesh with names")
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"mesh: {mesh}, without rank {dist.get_rank()}; allowed: called on the ranks of the mesh")
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        check_dtype_argument(name, dtype)


# With the mesh, whose id is in the key.
_requests: ProcessGroupCache[tuple, tuple[DeviceMesh, _Request | None]] = ProcessGroupCache(2048)


def _request(x: torch.Tensor, mesh: DeviceMesh, src: Any, dst: Any, shape: tuple[int, ...] | None) -> _Request | None:
    """The request of a call, from the cache if it was made before; None if no type changes."""
    forget_dead_groups()
    key: tuple | None = None
    (src_types, src_spec), (dst_types, dst_spec) = types_of(src), types_of(dst)
    if isinstance(src_types, Mapping) and isinstance(dst_types, Mapping):
        key = id(mesh), tuple(src_types.items()), src_spec, tuple(dst_types.items()), dst_spec, x.shape, shape
        try:
            if (cached := _requests.get(key)) is not None:
                return cached[1]
        except TypeError:  # an element that cannot be hashed is no type, which `distribution_of` reports
            key = None
    axes = axes_of(mesh, src, dst)
    request = _new_request(x, axes, distribution_of("src", src, axes, x), distribution_of("dst", dst, axes, x), shape)
    if key is not None:
        _requests[key] = mesh, request
    return request


def _new_request(
    x: torch.Tensor, axes: Axes, src: Distribution, dst: Distribution, shape: tuple[int, ...] | None
) -> _Request | None:
    names, sizes, coordinate = axes.names, axes.sizes, axes.coordinate
    for name, a, b in zip(names, src.kinds, dst.kinds, strict=True):
        if (a is None) != (b is None):
            given, missing = ("src", "dst") if b is None else ("dst", "src")
            raise ArgumentError(f"{missing}: no type of axis {name!r}, which {given} names; allowed: the same axes")
        if a != b and "V" in (a, b):
            change = f"{type_text(a)} to {type_text(b)}"
            raise ArgumentError(f"src, dst: {change} on axis {name!r}; allowed: V on both, or S(dim) in place of V")
    if shape is not None and len(shape) != x.ndim:
        raise ArgumentError(f"shape: {shape} for a tensor of {x.ndim} dims; allowed: the global shape")
    if shape is not None:
        kinds = tuple("R" if size == 1 else kind for size, kind in zip(sizes, src.kinds, strict=True))
        held = held_sizes(shape, _layout(kinds, src.orders), sizes, coordinate)
        if tuple(x.shape) != held:
            raise ArgumentError(f"x: {list(x.shape)}; allowed: {list(held)}, this rank's shard of shape={shape}")
    changed = {m for m, (a, b) in enumerate(zip(src.kinds, dst.kinds, strict=True)) if a != b and sizes[m] > 1}
    touched = {kind for m in changed for kind in (src.kinds[m], dst.kinds[m]) if isinstance(kind, int)}
    # The order of cuts alone may change.
    touched.update(d for d in {*src.orders, *dst.orders} if src.orders.get(d) != dst.orders.get(d))
    cut = {m for d in touched for orders in (src.orders, dst.orders) for m in orders.get(d, ())}
    dims = sorted(changed | cut)
    if not dims:
        return None
    if touched and (unordered := axes.unordered.intersection(dims)):
        raise UnsupportedError(
            f"mesh: the ranks along {names[min(unordered)]!r} do not ascend, and their process group has another "
            f"order; allowed: a mesh whose ranks ascend along the axes that take part"
        )
    at = tuple(slice(None) if m in dims else coordinate[m] for m in range(len(sizes)))
    mesh = Mesh([sizes[m] for m in dims], ranks=axes.ranks[at].flatten().tolist())
    source, target = (tuple(kinds[m] for m in dims) for kinds in (src.kinds, dst.kinds))
    orders = tuple(
        {d: tuple(map(dims.index, cuts)) for d, cuts in of.orders.items() if d in touched} for of in (src, dst)
    )
    groups = tuple(axes.groups[m] for m in dims)
    global_shape = list(x.shape)
    for d in {*orders[0], *orders[1]}:
        parts = [mesh.shape[m] for m in orders[0].get(d, ())]
        global_shape[d] = math.prod([x.shape[d], *parts]) if shape is None else shape[d]
    at_mesh = tuple(coordinate[m] for m in dims)
    forward = _exchange(at_mesh, source, target, *orders)
    dual_source, dual_target = (tuple(_DUAL.get(k, k) for k in kinds) for kinds in (target, source))
    backward = _exchange(at_mesh, dual_source, dual_target, *orders[::-1])
    return _Request(mesh, groups, tuple(global_shape), forward, backward)


def _exchange(
    coordinate: tuple[int, ...],
    source: tuple[str | int | None, ...],
    target: tuple[str | int | None, ...],
    source_orders: dict[int, tuple[int, ...]],
    target_orders: dict[int, tuple[int, ...]],
) -> _Exchange:
    """The exchange of the rank at a coordinate, from the kinds of the axes and the mesh dims that shard each tensor
    dim."""
    split = [m for m, pair in enumerate(zip(source, target, strict=True)) if pair in (("R", "P"), ("I", "P"))]
    target = tuple("R" if m in split else kind for m, kind in enumerate(target))
    keeps = not any(coordinate[m] for m in split)
    return _Exchange(_layout(source, source_orders), _layout(target, target_orders), keeps)


def _layout(kinds: tuple[str | int | None, ...], orders: dict[int, tuple[int, ...]]) -> Layout:
    placements: list[Placement] = [
        Shard(kind) if isinstance(kind, int) else Partial("sum") if kind == "P" else Replicate() for kind in kinds
    ]
    return Layout(placements, orders)
