"""`redistribute_spmd`: redistribution of a plain tensor whose distribution is given by the types of spmd_types, along
several mesh axes in one exchange."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, UnsupportedError, shown
from ...planner import Layout, Mesh, Partial, Placement, Replicate, Shard, Topology, check_shape, held_sizes
from ..convert_specs import mesh_of, unordered_dims
from ..executor.call import refuse_unplanned
from ..executor.choose_algorithm import Reduction
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from .local import PLAIN_TENSORS
from .plain_calls import redistribute_plain
from .redistribute_options import RedistributeOptions, call_options

_DUAL: dict[str | int | None, str | int | None] = {"R": "P", "P": "R", "I": "I"}
"""The type of the gradient of a tensor of each type; that of a shard is the same shard."""
_SpmdTypes = Mapping[Any, Any] | Any


class _Distribution(NamedTuple):
    """The distribution of a tensor over the axes of a mesh.

    Attributes:
        kinds: for each mesh dim "R", "I", "V", "P", the sharded tensor dim, or None for an axis that is not named.
        orders: the mesh dims of more than one rank that shard each tensor dim, in the order of the cuts.
    """

    kinds: tuple[str | int | None, ...]
    orders: dict[int, tuple[int, ...]]


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
    transport: str | None = None,
    topology: Topology | None = None,
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
            `MeshAxis` that `spmd_types.get_local_type` returns. Both name the same axes. V stays V, unless the
            PartitionSpec says what it shards.
        shape: the global shape over the axes with known shards (V without a PartitionSpec has none); shards are those
            of torch.chunk and may be uneven. None: in `src` all ranks hold shards of the same shape.
        forward_dtype: the dtype that is communicated and returned. None: the dtype of `x`.
        backward_dtype: the dtype in which gradients are communicated; they are returned in the dtype of `x`. None: the
            dtype of `x`.
        transport, topology, reduction: as for `redistribute`.

    Returns:
        This rank's tensor of the distribution `dst`. Differentiable any number of times, with gradients as in
        spmd_types, where that of R is P, that of P is R, and those of I and S keep their type.

    While spmd_types checks types, the types of `x` are checked against `src`, and the result gets those of `dst`; both
    must name all axes that `x` has types of.

    Raises:
        ArgumentError: types, a mesh or a shape that do not fit each other; raised before anything is communicated.
        UnsupportedError: torch.compile is tracing; shards along a mesh dim whose ranks do not ascend; a tensor
            subclass; a backend that cannot carry programs; a dtype that cannot be reduced.
        TransportError: a peer died, timed out, or made a different request.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "redistribute_spmd: torch.compile is tracing; allowed there: spmd_types.redistribute, one axis at a time"
        )
    try:
        _check(x, mesh, forward_dtype, backward_dtype)
        options = call_options(transport, topology, reduction)
        with _without_type_checks():
            request = _request(x, mesh, src, dst, None if shape is None else check_shape(shape))
        _assert_types(x, mesh, src, complete=True)
        own = x.dtype
        dtypes = _Dtypes(forward_dtype or own, forward_dtype or own, backward_dtype or own, own)
        with _without_type_checks():
            if request is not None:
                out = _RedistributeSpmd.apply(x, request, dtypes, options)
            else:
                out = x if own == dtypes.result else x.to(dtypes.result)
        _assert_types(out, mesh, dst)
        return out
    except (ArgumentError, UnsupportedError) as error:
        with _without_type_checks():
            refuse_unplanned(error, [mesh] if isinstance(mesh, DeviceMesh) else [])
        raise


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
            return torch.zeros_like(out, dtype=dtypes.result)
        return (out.view_as(out) if out is x else out).to(dtypes.result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        with _without_type_checks():
            backward = ctx.request.reversed(), ctx.dtypes.reversed(), ctx.options
            return _RedistributeSpmd.apply(gradient, *backward), None, None, None


def _check(x: Any, mesh: Any, forward_dtype: Any, backward_dtype: Any) -> None:
    if type(x) not in (*PLAIN_TENSORS, AsyncCollectiveTensor):
        if isinstance(x, torch.Tensor):
            raise UnsupportedError(f"x: a {type(x).__name__}; allowed: a torch.Tensor")
        raise ArgumentError(f"x: {shown(x)}; allowed: a torch.Tensor")
    if x.layout is not torch.strided or x.is_meta or x.is_quantized:
        raise UnsupportedError(f"x: {x.layout} on {x.device}, of {x.dtype}; allowed: a strided tensor with data")
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        raise ArgumentError(f"mesh: {shown(mesh)}; allowed: a DeviceMesh with names")
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"mesh: {mesh}, without rank {dist.get_rank()}; allowed: called on the ranks of the mesh")
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name}: {dtype!r}; allowed: a torch.dtype, or None")


# With the mesh, whose id is in the key.
_requests: ProcessGroupCache[tuple, tuple[DeviceMesh, _Request | None]] = ProcessGroupCache(2048)


def _request(x: torch.Tensor, mesh: DeviceMesh, src: Any, dst: Any, shape: tuple[int, ...] | None) -> _Request | None:
    """The request of a call, from the cache if it was made before; None if no type changes."""
    forget_dead_groups()
    key: tuple | None = None
    (src_types, src_spec), (dst_types, dst_spec) = _types_of(src), _types_of(dst)
    if isinstance(src_types, Mapping) and isinstance(dst_types, Mapping):
        key = id(mesh), tuple(src_types.items()), src_spec, tuple(dst_types.items()), dst_spec, x.shape, shape
        try:
            if (cached := _requests.get(key)) is not None:
                return cached[1]
        except TypeError:  # an element that cannot be hashed is no type, which `_distribution` reports
            key = None
    request = _new_request(x, mesh, _distribution("src", src, mesh, x), _distribution("dst", dst, mesh, x), shape)
    if key is not None:
        _requests[key] = mesh, request
    return request


def _types_of(value: Any) -> tuple[Any, Any]:
    """The types of the axes and the PartitionSpec of an argument; None if it has none."""
    if not isinstance(value, Mapping) and isinstance(value, _spmd_types().SpmdType):
        return value.local_type, value.partition_spec
    return value, None


def _new_request(
    x: torch.Tensor, device_mesh: DeviceMesh, src: _Distribution, dst: _Distribution, shape: tuple[int, ...] | None
) -> _Request | None:
    names = device_mesh.mesh_dim_names
    assert names is not None
    for name, a, b in zip(names, src.kinds, dst.kinds, strict=True):
        if (a is None) != (b is None):
            given, missing = ("src", "dst") if b is None else ("dst", "src")
            raise ArgumentError(f"{missing}: no type of axis {name!r}, which {given} names; allowed: the same axes")
        if a != b and "V" in (a, b):
            raise ArgumentError(
                f"src, dst: {_text(a)} to {_text(b)} on axis {name!r}; allowed: V on both, or S(dim) in place of V"
            )
    if shape is not None and len(shape) != x.ndim:
        raise ArgumentError(f"shape: {shape} for a tensor of {x.ndim} dims; allowed: the global shape")
    sizes, coordinate = tuple(device_mesh.shape), device_mesh.get_coordinate()
    assert coordinate is not None
    if shape is not None:
        kinds = tuple("R" if size == 1 else kind for size, kind in zip(sizes, src.kinds, strict=True))
        held = held_sizes(shape, _layout(kinds, src.orders), sizes, tuple(coordinate))
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
    whole = mesh_of(device_mesh)
    if touched and (unordered := set(dims).intersection(unordered_dims(device_mesh))):
        raise UnsupportedError(
            f"mesh: the ranks along {names[min(unordered)]!r} do not ascend, and their process group has another "
            f"order; allowed: a mesh whose ranks ascend along the axes that take part"
        )
    at = tuple(slice(None) if m in dims else coordinate[m] for m in range(len(sizes)))
    mesh = Mesh([sizes[m] for m in dims], ranks=whole.rank_array.reshape(sizes)[at].flatten().tolist())
    source, target = (tuple(kinds[m] for m in dims) for kinds in (src.kinds, dst.kinds))
    orders = tuple(
        {d: tuple(map(dims.index, cuts)) for d, cuts in of.orders.items() if d in touched} for of in (src, dst)
    )
    groups = tuple(device_mesh.get_group(m) for m in dims)
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


def _distribution(argument: str, value: Any, mesh: DeviceMesh, x: torch.Tensor) -> _Distribution:
    """The distribution that an argument gives.

    Raises:
        ArgumentError: it is of another type, or names axes or tensor dims that are not there.
    """
    spmd, names = _spmd_types(), list(mesh.mesh_dim_names or ())
    local, spec = _types_of(value)
    if not isinstance(local, Mapping):
        raise ArgumentError(f"{argument}: {shown(value)}; allowed: a mapping of axes to types, or an SpmdType")

    def mesh_dim(axis: Any) -> int:
        m = _mesh_dim(axis, mesh)
        if m is None:
            allowed = ", ".join(map(repr, names))
            raise ArgumentError(f"{argument}: axis {shown(axis)}; allowed: {allowed}, or the process group of one")
        return m

    kinds: list[str | int | None] = [None] * len(names)
    orders: dict[int, tuple[int, ...]] = {}
    for axis, kind in local.items():
        if kinds[mesh_dim(axis)] is not None:
            raise ArgumentError(f"{argument}: axis {names[mesh_dim(axis)]!r} has two types; allowed: one")
        if isinstance(kind, spmd.Shard):
            if not -x.ndim <= kind.dim < x.ndim:
                allowed = f"{-x.ndim}..{x.ndim - 1}" if x.ndim else "none, the tensor has no dims"
                raise ArgumentError(f"{argument}: {kind} on axis {shown(axis)}; allowed dims: {allowed}")
            d = kinds[mesh_dim(axis)] = kind.dim % x.ndim
            orders[d] = (*orders.get(d, ()), mesh_dim(axis))
        elif kind in (spmd.R, spmd.I, spmd.V, spmd.P):
            kinds[mesh_dim(axis)] = kind.value
        else:
            raise ArgumentError(f"{argument}: {shown(kind)} on axis {shown(axis)}; allowed: R, I, V, P, S(dim)")
    for d, cuts in orders.items():
        if len([m for m in cuts if mesh.size(m) > 1]) > 1:
            raise ArgumentError(
                f"{argument}: axes {[names[m] for m in cuts]} shard tensor dim {d}; allowed: one, or an SpmdType whose "
                f"PartitionSpec gives their order"
            )
    if spec is not None and len(spec) > x.ndim:
        raise ArgumentError(f"{argument}: a PartitionSpec of {len(spec)} dims; allowed: up to {x.ndim}")
    for d, entry in enumerate(spec or ()):
        cuts = tuple(mesh_dim(axis) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None)
        for m in cuts:
            if kinds[m] not in (None, "V"):
                raise ArgumentError(
                    f"{argument}: axis {names[m]!r} is {_text(kinds[m])} and shards tensor dim {d}; allowed: V, once"
                )
            kinds[m] = d
        if cuts:
            orders[d] = cuts
    larger = {d: tuple(m for m in cuts if mesh.size(m) > 1) for d, cuts in orders.items()}
    return _Distribution(tuple(kinds), {d: cuts for d, cuts in larger.items() if cuts})


def _mesh_dim(axis: Any, mesh: DeviceMesh) -> int | None:
    """The mesh dim of an axis: of its name, a member of an enumeration of names, its process group, or the `MeshAxis`
    by which spmd_types identifies the groups of equal strides. None if the mesh has no such axis."""
    name = getattr(axis, "value", axis)
    if isinstance(name, str):
        names = mesh.mesh_dim_names or ()
        return names.index(name) if name in names else None
    spmd = _spmd_types()
    if not isinstance(axis, dist.ProcessGroup | spmd.MeshAxis):
        return None
    groups = mesh.get_all_groups()
    if axis in groups:
        return groups.index(axis)
    normalized = spmd.normalize_axis(axis)
    axes = [spmd.normalize_axis(group) for group in groups]
    return axes.index(normalized) if normalized in axes else None


def _text(kind: str | int | None) -> str:
    return f"S({kind})" if isinstance(kind, int) else str(kind)


def _spmd_types() -> Any:
    """The package.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return import_module("spmd_types")
    except ImportError as error:
        raise ArgumentError(f"src, dst: types of spmd_types, which cannot be imported ({error})") from error


def _assert_types(x: torch.Tensor, mesh: DeviceMesh, value: Any, *, complete: bool = False) -> None:
    """While spmd_types checks types: check those of `x`, or give it these. With `complete`, `x` may have no others.

    Raises:
        ArgumentError: `x` has types of axes that are not named.
        spmd_types.SpmdTypeError: `x` has other types.
    """
    spmd = sys.modules["spmd_types"]
    if not spmd.is_type_checking():
        return

    def group(axis: Any) -> dist.ProcessGroup:
        return mesh.get_group(_mesh_dim(axis, mesh))

    local, spec = _types_of(value)
    kinds = {group(axis): kind for axis, kind in local.items()}
    if spec is not None:
        entries = (entry if entry is None or isinstance(entry, tuple) else (entry,) for entry in spec)
        spec = spmd.PartitionSpec(*(entry if entry is None else tuple(map(group, entry)) for entry in entries))
        kinds |= {axis: spmd.V for entry in spec if entry is not None for axis in entry}
    spmd.assert_type(x, kinds, partition_spec=spec)
    named = {spmd.normalize_axis(axis) for axis in kinds}
    if complete and (others := [axis for axis in spmd.get_local_type(x) if axis not in named]):
        raise ArgumentError(f"src: no type of axes {others}, of which x has one; allowed: all axes of x")


def _without_type_checks() -> AbstractContextManager[Any]:
    """A context in which spmd_types does not check types: it would check those of the mesh's own tensor."""
    spmd = sys.modules.get("spmd_types")
    return spmd.no_typecheck() if spmd is not None and spmd.is_type_checking() else nullcontext()
