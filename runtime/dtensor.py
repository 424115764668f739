"""DTensors in, DTensors out: `redistribute` with a shard order, and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from ..errors import ArgumentError, UnsupportedError
from ..planner import Topology
from ..planner.layout import Orders
from ..planner.mesh import whole_numbers
from .group_caches import kept_with_group
from .lowering import Reduction
from .redistribution import How, explain_redistribution, how_asked, run_redistribution
from .specs import normal_placements


def redistribute(
    dtensor: DTensor,
    placements: Sequence[Placement],
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    world: str | None = None,
    topology: Topology | None = None,
    reduction: Reduction | None = None,
) -> DTensor:
    """A DTensor of the same values with other placements, on the same mesh or on another.

    Args:
        dtensor: any placements of replicate, shard, strided shard and partial, in any shard order.
        placements: one per mesh dim of the target's mesh. Targets may be partial (sum, avg, max, min), which torch
            refuses.
        device_mesh: the target's mesh, if it is another: of the same ranks, of some of them, or of none. Every rank of
            either mesh has to call; one that is not in the target's mesh gets a DTensor with an empty local tensor, and
            one that is in neither keeps its own.
        shard_order: tensor dim -> mesh dims, the first cut first; tensor dims left out are cut in ascending mesh dims.
        world: "shared_memory", "collective", or None to choose by what the ranks share (`SHARDWEAVE_WORLD` asks too).
        topology: what the ranks are linked by, for which the program is planned; alike on all ranks. None: what
            `install` was told, else bytes alone decide.
        reduction: "ordered" or "fast", as for `install`; None: what that was told.

    Returns:
        A DTensor that shares no memory with the input, except where nothing is to be done. Differentiable any number of
        times; the gradient of a partial input is replicated.

    Raises:
        ArgumentError: placements or an order that do not fit; raised before anything is communicated.
        UnsupportedError: bitwise partials, a backend that cannot carry programs.
        WorldError: a peer died, did not come, or asked for something else.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    how = how_asked(world, topology, reduction)
    target = target_of(dtensor, placements, device_mesh, shard_order)
    if dtensor.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(dtensor, target, how)
    return _run(dtensor, target, how, False)


def explain(
    dtensor: DTensor,
    placements: Sequence[Placement],
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    world: str | None = None,
    topology: Topology | None = None,
    reduction: Reduction | None = None,
) -> str:
    """What `redistribute` does with the same arguments, as this rank sees it: the program's steps with their bytes, the
    world, and the means that it picks for each step and why. Nothing is moved.

    Every rank of the mesh calls, or has redistributed before: which world it is follows from what each has posted.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute`.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    how = how_asked(world, topology, reduction)
    return explain_redistribution(
        plain_local(dtensor), dtensor._spec, target_of(dtensor, placements, device_mesh, shard_order), how
    )


def target_of(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    shard_order: Mapping[int, Sequence[int]] | None,
) -> DTensorSpec:
    """The spec that is asked for; kept.

    Raises:
        ArgumentError: placements, a mesh or an order that do not fit.
    """
    if type(placements) is not tuple:
        if not isinstance(placements, Sequence):
            raise ArgumentError(f"placements: {placements!r}; allowed: a sequence of Replicate, Shard, Partial")
        placements = tuple(placements)
    order = None if shard_order is None else _given_order(shard_order)
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise ArgumentError(f"device_mesh: {device_mesh!r}; allowed: a DeviceMesh, or None")
    mesh = dtensor._spec.mesh if device_mesh is None else device_mesh
    # The mesh itself: meshes of the same ranks are equal, but their process groups may differ.
    key = (dtensor._spec, id(mesh), placements, order)
    try:
        target = _targets.get(key)
    except TypeError:  # a placement that cannot be hashed is none: the spec's own check names it
        target = None
    if target is None:
        target = _target_spec(dtensor, mesh, placements, order)
        if len(_targets) >= _KEPT_TARGETS:
            _targets.pop(next(iter(_targets)))
        _targets[key] = target
    return target


_KEPT_TARGETS = 2048
_targets: dict[tuple, DTensorSpec] = kept_with_group({})


def _given_order(shard_order: Mapping[int, Sequence[int]]) -> Orders:
    """`shard_order` as sorted tuples of whole numbers."""
    try:
        return tuple((dim, whole_numbers("shard_order", cuts)) for dim, cuts in sorted(shard_order.items()))
    except (AttributeError, TypeError):
        pass
    raise ArgumentError(f"shard_order: {shard_order!r}; allowed: a mapping of tensor dims to sequences of mesh dims")


def _target_spec(
    dtensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], order: Orders | None
) -> DTensorSpec:
    """The spec asked for, checked; made once per request, since building and hashing it costs more than a meeting."""
    normal = normal_placements("placements", placements, mesh.ndim, dtensor.ndim)
    return DTensorSpec(mesh, normal, dtensor._spec.tensor_meta, **_ordered(normal, order, dtensor.ndim))


def _ordered(placements: Sequence[Placement], order: Orders | None, ndim: int) -> dict[str, Any]:
    """The `shard_order` argument of a spec, checked."""
    if order is None:
        return {}
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Shard:
            cuts.setdefault(placement.dim, []).append(mesh_dim)
        elif not isinstance(placement, Replicate | Partial):
            raise ArgumentError(
                f"shard_order: given together with {placement} on mesh dim {mesh_dim}; give one of them"
            )
    given: dict[int, tuple[int, ...]] = {}
    for tensor_dim, mesh_dims in order:
        if not isinstance(tensor_dim, int) or not -ndim <= tensor_dim < ndim:
            allowed = f"{-ndim}..{ndim - 1}" if ndim else "none, the tensor has no dims"
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim!r}; allowed: {allowed}")
        tensor_dim %= ndim
        if tensor_dim in given:
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim} is given twice; allowed: once each")
        if sorted(mesh_dims) != cuts.get(tensor_dim, []):
            raise ArgumentError(
                f"shard_order: tensor dim {tensor_dim} has {tuple(mesh_dims)}; allowed: each of the mesh dims that "
                f"cut it, {tuple(cuts.get(tensor_dim, []))}, once"
            )
        given[tensor_dim] = tuple(mesh_dims)
    entries = [ShardOrderEntry(tensor_dim=d, mesh_dims=given.get(d, tuple(c))) for d, c in sorted(cuts.items())]
    return {"shard_order": tuple(entries)}


def plain_local(x: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, without gradient; of a rank that is not in its mesh an empty one."""
    local = x._local_tensor
    if type(local) is AsyncCollectiveTensor:
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(f"dtensor: its local tensor is a {type(local).__name__}; allowed: a plain tensor")
    if local.requires_grad:
        local = local.detach()
    if x._spec.mesh.get_coordinate() is None:
        return local.new_empty((0,) * max(x.ndim, 1))
    return local


def is_in(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def _run(x: DTensor, target: DTensorSpec, how: How | None, requires_grad: bool) -> DTensor:
    if is_in(x._spec.mesh) or is_in(target.mesh):
        local = run_redistribution(plain_local(x), x._spec, target, how)
    else:
        local = x._local_tensor
    return as_dtensor(local, target, requires_grad)


def as_dtensor(local: torch.Tensor, target: DTensorSpec, requires_grad: bool = False) -> DTensor:
    # Without __init__, which does nothing but costs more than the rest. mypy knows the public constructor only.
    return DTensor.__new__(DTensor, local, target, requires_grad=requires_grad)  # type: ignore[call-arg]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: DTensorSpec, how: How | None) -> DTensor:  # type: ignore[override]
        ctx.source, ctx.how = x._spec, how
        return _run(x, target, how, x.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None]:  # type: ignore[override]
        source: DTensorSpec = ctx.source
        # A gradient is not made partial again: it would have to be reduced later, which costs more than keeping it.
        same = gradient._spec.mesh == source.mesh
        kept = [
            Replicate() if p.is_partial() and not (same and gradient.placements[m].is_partial()) else p
            for m, p in enumerate(source.placements)
        ]
        strided = source.use_strided_shard_as_shard_order
        order = {} if strided else {"shard_order": source.shard_order}
        target = DTensorSpec(
            source.mesh,
            tuple(kept),
            gradient._spec.tensor_meta,
            use_strided_shard_as_shard_order=strided,
            **order,  # type: ignore[arg-type]
        )
        return _Redistribute.apply(gradient, target, ctx.how), None, None
