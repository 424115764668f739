"""The inner loop of DTensor's redistribution: a local tensor and two specs in, the target's local tensor out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import detect_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..errors import ArgumentError, UnsupportedError, WorldError
from ..planner import Program, check_local_shape, plan
from .collective import CollectiveWorld
from .dtypes import dtype_name
from .executor import BoundProgram
from .group_caches import forget_dead_groups, kept_with_group
from .specs import layout_of_spec, mesh_of
from .statistics import stats
from .worlds import AnyWorld, current_worlds, why_not_backend

Stock = Callable[..., torch.Tensor]
stock_redistribute_local_tensor: Stock = torch_redistribute.redistribute_local_tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KEPT = 2048


class _Bound:
    """A program on its world, ready to be called."""

    def __init__(self, program: Program, bound: BoundProgram | None, world: AnyWorld | None) -> None:
        self.program, self.bound, self.world = program, bound, world
        self.company = program.company(bound.position) if bound else ()
        self.announcer = world if isinstance(world, CollectiveWorld) and len(self.company) > 1 else None
        self.first = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bound is None or self.world is None:
            return x
        world, bound = self.world, self.bound
        if world.error is not None:
            # Before anything is pushed: buffers that peers kept ready may have found another use.
            raise world.error
        if world.busy:
            error = WorldError(
                f"rank {world.rank}: two threads redistribute at once; allowed: one call at a time, alike on all ranks"
            )
            world.fail(error)
            raise error
        world.busy = True
        stats().calls[world.name] += 1
        reply: Any = None
        try:
            if self.announcer is not None:
                self.announcer.announce(self.company, bound.token, self.first)
                self.first = False
            run = bound.run(x)
            while True:
                reply = world.answer(run.send(reply))
        except StopIteration as end:
            return end.value
        except BaseException as error:
            # Peers wait for this rank's next meeting: tell them that it will not come.
            text = f"rank {world.rank} failed in an earlier call: {type(error).__name__}: {error}"
            world.fail(error if isinstance(error, WorldError) else WorldError(text))
            raise
        finally:
            world.busy = False


_bound: dict[tuple, _Bound] = kept_with_group({})


def _bind(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, asked: str | None) -> _Bound:
    """Plan and bind a request; nothing is communicated, except what each rank posted when its world started."""
    reason = why_not_backend(x.device)
    if reason is not None and current.mesh.size() > 1:
        raise UnsupportedError(f"{reason} cannot carry programs; allowed: gloo, nccl")
    if current.tensor_meta is None:
        raise UnsupportedError("the source spec has no tensor_meta, so the global shape is not known")
    mesh = mesh_of(current.mesh)
    src, dst = layout_of_spec(current), layout_of_spec(target)
    coordinate = current.mesh.get_coordinate()
    assert coordinate is not None
    position = mesh.position(coordinate)
    program = plan(mesh, tuple(current.tensor_meta.shape), dtype_name(x.dtype), src, dst, rank=position)
    ranks = tuple(sorted(mesh.rank_at(p) for p in range(mesh.size)))
    if ranks[-1] >= dist.get_world_size():
        raise ArgumentError(
            f"mesh: it names rank {ranks[-1]}, the process group has {dist.get_world_size()} ranks; "
            f"allowed: 0..{dist.get_world_size() - 1}"
        )
    if program.is_identity:
        check_local_shape(program, position, x.shape)
        return _Bound(program, None, None)
    # Where nothing is exchanged nobody else has to be there.
    met = ranks if program.exchanges else (mesh.rank_at(position),)
    world, _ = current_worlds().choose(met, x.device, asked)
    if isinstance(world, CollectiveWorld):
        world.knows(_groups_of(current.mesh))
    try:
        check_local_shape(program, position, x.shape)
    except ArgumentError:
        with suppress(WorldError):  # peers that are gone need not be told
            world.refuse(program, position)
        raise
    return _Bound(program, BoundProgram(program, position, x.stride(), world, x.dtype, x.device), world)


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Process groups that every rank of a mesh has had since the mesh was made: of each dim, and of everyone.

    Never of a flattened mesh: such groups are made later, and some ranks may bind a program before, some after.
    """
    everyone = dist.distributed_c10d.GroupMember.WORLD
    assert everyone is not None
    try:
        return [everyone, *(mesh.get_group(m) for m in range(mesh.ndim))]
    except RuntimeError:  # a mesh that was made without process groups
        return [everyone]


def run_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, asked: str | None = None
) -> torch.Tensor:
    """Carry a plain local tensor from one spec to another on the same mesh.

    Raises:
        ArgumentError: a local tensor that does not fit its spec, layouts that do not fit the tensor.
        UnsupportedError: placements or dtypes that programs do not carry.
        WorldError: the ranks could not meet.
    """
    if torch.is_inference_mode_enabled():
        # Views and buffers that are kept outlive the mode, and tensors made in it can never leave it.
        with torch.inference_mode(False):
            return run_redistribution(x, current, target, asked)
    if x.is_conj() or x.is_neg():
        # Programs move bytes, and these say something else than their bytes.
        x = x.resolve_conj().resolve_neg()
    if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
        raise UnsupportedError("a fake tensor mode is active: programs move real memory; allowed: under install()")
    forget_dead_groups()
    if asked is not None and not isinstance(asked, str):
        raise ArgumentError(f"world: {asked!r}; allowed: a name, or None")
    key = (current, target, x.shape, x.stride(), x.dtype, x.device, asked)
    found = _bound.get(key)
    if found is None:
        found = _bind(x, current, target, asked)
        if len(_bound) >= _KEPT:
            _bound.pop(next(iter(_bound)))
        _bound[key] = found
    return found(x)


def why_delegate(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec) -> str | None:
    """Why torch itself has to carry a call out, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if type(x) not in _PLAIN:
        return f"local tensor is a {type(x).__name__}"
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if modes:
        return f"{type(modes[-1]).__name__} is watching"
    if x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return f"local tensor is {x.layout} on {x.device}"
    if any(b.is_partial() and a.is_shard() for a, b in zip(current.placements, target.placements, strict=True)):
        return "shard to partial, which torch refuses"
    return why_not_backend(x.device)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """torch's inner loop of the same name and signature, carried out by shardweave where it can be.

    Left to torch, and counted in `stats().delegations` with the reason: tracing, fake and other wrapped tensors, active
    dispatch modes, placements that programs do not carry, one rank, unknown backends. The result is complete when it is
    returned, also with `async_op`. A plan is chosen by shardweave: `use_graph_based_transform` only reaches torch.

    Raises:
        ArgumentError: the local tensor does not fit its spec.
        WorldError: the ranks could not meet.
    """
    reason = None
    x = local_tensor
    if type(x) is AsyncCollectiveTensor:
        x = x.wait()
    if current_spec.mesh != target_spec.mesh:
        reason = "another mesh, which torch refuses"
    elif current_spec.mesh.get_coordinate() is None:
        return local_tensor
    else:
        for name, spec in (("current_spec", current_spec), ("target_spec", target_spec)):
            if len(spec.placements) != spec.mesh.ndim:
                raise ArgumentError(
                    f"{name}: {len(spec.placements)} placements for a mesh of {spec.mesh.ndim} dims; allowed: one each"
                )
        torch_redistribute.assert_no_mixed_partial_types(current_spec.placements)
        torch_redistribute.assert_no_mixed_partial_types(target_spec.placements)
        reason = why_delegate(x, current_spec, target_spec)
    if reason is None:
        try:
            return run_redistribution(x.detach() if x.requires_grad else x, current_spec, target_spec)
        except UnsupportedError as error:
            reason = str(error)
    stats().delegations[reason] += 1
    options = {"async_op": async_op, "is_explicit": is_explicit}
    if use_graph_based_transform is not None:
        options["use_graph_based_transform"] = use_graph_based_transform
    return stock_redistribute_local_tensor(local_tensor, current_spec, target_spec, **options)
