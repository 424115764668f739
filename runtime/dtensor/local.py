"""The inner loop of DTensor's redistribution: a local tensor and two specs in, the target's local tensor out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, UnsupportedError
from ...planner import Planner, Program, Topology, check_local_shape, check_shape, planner_of, position_of, title
from ..cache import forget_dead_groups, kept_with_group
from ..convert import dtype_name, layout_of_spec, mesh_of
from ..executor.bind import BoundProgram
from ..executor.call import Call, check_backend, check_ranks, refuse, transport_for
from ..executor.dispatch_modes import as_one_operator
from ..executor.local_slice import BoundSlice
from ..executor.lower import Reduction, check_reduction, explain_on
from ..transports.select import AnyTransport
from .partials import Plain, norms_in_turn, plain_request

Stock = Callable[..., torch.Tensor]
stock_redistribute_local_tensor: Stock = torch_redistribute.redistribute_local_tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_KEPT = 2048


class RedistributeOptions(NamedTuple):
    """What a caller may ask for besides the layouts; alike on all ranks."""

    transport: str | None = None
    topology: Topology | None = None
    reduction: Reduction = "ordered"


_default = RedistributeOptions()
_calls: dict[tuple, Callable[[torch.Tensor, bool], torch.Tensor]] = kept_with_group({})
_forms: dict[tuple, _Form] = kept_with_group({})


def requested_options(transport: Any = None, topology: Any = None, reduction: Any = None) -> RedistributeOptions:
    """What a caller asks for; None leaves it to what `install` was told.

    Raises:
        ArgumentError: a transport that is no name, a topology or a reduction that is none.
    """
    if transport is None and topology is None and reduction is None:
        return _default
    if transport is not None and not isinstance(transport, str):
        raise ArgumentError(f"transport: {transport!r}; allowed: a name, or None")
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology, or None")
    reduction = _default.reduction if reduction is None else check_reduction(reduction)
    return RedistributeOptions(transport, topology or _default.topology, reduction)


def set_default_options(options: RedistributeOptions) -> None:
    """From now on requests are carried out like this, except for what a caller asks for."""
    global _default
    _default = options


def default() -> RedistributeOptions:
    return _default


class _Form(NamedTuple):
    """What of a request is the same for tensors of all shapes."""

    planner: Planner
    meshes: tuple[DeviceMesh, DeviceMesh]  # so that no other has their ids


def _program(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> Program:
    """This rank's program, planned and checked; nothing is communicated."""
    form = _kept_form(x, current, target, options) or _form(x, current, target, options)
    return form.planner.program(_global_shape(current))


def _global_shape(spec: DTensorSpec) -> tuple[int, ...]:
    if spec.tensor_meta is None:
        raise UnsupportedError("the source spec has no tensor_meta, so the global shape is not known")
    return check_shape(spec.tensor_meta.shape)


def _form_key(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> tuple:
    source = current.placements, current.shard_order, current.use_strided_shard_as_shard_order, id(current.mesh)
    wanted = target.placements, target.shard_order, target.use_strided_shard_as_shard_order, id(target.mesh)
    ndim = None if current.tensor_meta is None else len(current.tensor_meta.shape)
    return source, wanted, ndim, x.dtype, x.device, options


def _kept_form(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> _Form | None:
    return _forms.get(_form_key(x, current, target, options))


def _form(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> _Form:
    ndim = len(_global_shape(current))
    check_backend(x.device, max(current.mesh.size(), target.mesh.size()), options.transport)
    mesh, other = mesh_of(current.mesh), mesh_of(target.mesh)
    planner = planner_of(
        mesh,
        ndim,
        dtype_name(x.dtype),
        layout_of_spec(current),
        layout_of_spec(target),
        target_mesh=other,
        rank=position_of(dist.get_rank(), mesh, other),
        topology=options.topology,
    )
    for named in (mesh, other):
        check_ranks(named)
    if len(_forms) >= _KEPT:
        _forms.pop(next(iter(_forms)))
    form = _forms[_form_key(x, current, target, options)] = _Form(planner, (current.mesh, target.mesh))
    return form


def _transport(
    program: Program, x: torch.Tensor, options: RedistributeOptions, *meshes: DeviceMesh
) -> tuple[AnyTransport, str]:
    # Where nothing is exchanged nobody else has to be there.
    participants = tuple(sorted(program.mesh.rank_array.tolist())) if program.exchanges else (dist.get_rank(),)
    return transport_for(participants, x.device, options.transport, *meshes)


def _bind(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """Plan and bind a request; nothing is communicated, except what each rank posted when its transport started."""
    form = _kept_form(x, current, target, options)
    if form is None:
        if plain := plain_request(current, target):
            for spec in (plain.current, plain.target):
                layout_of_spec(spec)  # raises before a mask is applied, and released
            if between := norms_in_turn(current, target):
                return partial(_run_in_turn, list(pairwise([current, *between, target])), options)
            return partial(_run_transformed, plain, options)
        form = _form(x, current, target, options)
    planner, shape = form.planner, _global_shape(current)
    if planner.local_slice is not None:
        transport, _ = transport_for((dist.get_rank(),), x.device, options.transport)
        with _nobody_waits():
            return Call(BoundSlice(planner, planner.local_slice, shape, x, transport), transport, ())
    program = planner.program(shape)
    (position,) = program.ranks
    if program.is_identity:
        with _nobody_waits():
            check_local_shape(program, position, x.shape)
        return Call(None, None, ())
    transport, _ = _transport(program, x, options, current.mesh, target.mesh)
    try:
        check_local_shape(program, position, x.shape)
    except ArgumentError as error:
        refuse(transport, program.participants(position), program.first_group(position), error)
        raise
    participants = program.participants(position)
    meets = len(participants) > 1  # else nobody can be waited for
    with transport.rendezvous.making_ready(participants, partial(title, program)) if meets else nullcontext():
        bound = BoundProgram(program, position, x.stride(), transport, x.dtype, x.device, options.reduction)
    return Call(bound, transport, participants)


@contextmanager
def _nobody_waits() -> Iterator[None]:
    """Of arguments that are refused here, peers need not know."""
    try:
        yield
    except ArgumentError as error:
        error.peers_know = True
        raise


def _run_in_turn(
    requests: list[tuple[DTensorSpec, DTensorSpec]], options: RedistributeOptions, x: torch.Tensor, later: bool
) -> torch.Tensor:
    for current, target in requests:
        x = run_redistribution(x, current, target, options)
    return x


def _run_transformed(plain: Plain, options: RedistributeOptions, x: torch.Tensor, later: bool) -> torch.Tensor:
    # Looked up by the strides that it has now.
    x = plain.before(x) if plain.before else x
    found = run_redistribution(x, plain.current, plain.target, options, later and plain.after is None)
    return plain.after(found) if plain.after else found


def explain_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> str:
    """What `run_redistribution` does with the same arguments."""
    if plain := plain_request(current, target):
        current, target = plain.current, plain.target
    program = _program(x, current, target, options)
    if program.is_identity:
        return program.explain()
    transport, why = _transport(program, x, options, current.mesh, target.mesh)
    return f"{explain_on(program, transport, options.reduction)}\n  on transport {transport.name}: {why}"


def run_redistribution(
    x: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    options: RedistributeOptions | None = None,
    later: bool = False,
) -> torch.Tensor:
    """Carry a plain local tensor from one spec to another, on the same mesh or another; `options` is by default what
    `install` was told. With `later` the last exchange may be waited for when the tensor is first used. Dispatch modes
    see one operator.

    Raises:
        ArgumentError: a local tensor that does not fit its spec, layouts that do not fit the tensor.
        UnsupportedError: placements or dtypes that programs do not carry.
        TransportError: the ranks could not meet.
    """
    if torch.is_inference_mode_enabled():
        # Views and buffers that are kept outlive the mode, and tensors made in it can never leave it.
        with torch.inference_mode(False):
            return run_redistribution(x, current, target, options, later)
    if _active_modes():
        if detect_fake_mode() is not None:
            raise UnsupportedError("a fake tensor mode is active: programs move real memory; allowed: under install()")
        # What a mode saves or counts is complete: `later` says nothing here.
        return as_one_operator(lambda y: run_redistribution(y, current, target, options), x, current, target)
    if x.is_conj() or x.is_neg():
        # Programs move bytes, and these say something else than their bytes.
        x = x.resolve_conj().resolve_neg()
    return _bound(x, current, target, options or _default)(x, later)


def refuse_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, error: ArgumentError
) -> None:
    """Tell the ranks that `run_redistribution` with these arguments would meet that this one does not make the call."""
    if plain := plain_request(current, target):
        current, target = plain.current, plain.target
    program = _program(x, current, target, options)
    if not program.is_identity:
        (position,) = program.ranks
        transport, _ = _transport(program, x, options, current.mesh, target.mesh)
        refuse(transport, program.participants(position), program.first_group(position), error)


def bind_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> None:
    """Make ready what `run_redistribution` does with the same specs and a tensor of the same form."""
    if torch.is_inference_mode_enabled():
        # As when it runs: what is kept outlives the mode.
        with torch.inference_mode(False):
            return bind_redistribution(x, current, target, options)
    if plain := plain_request(current, target):
        if between := norms_in_turn(current, target):
            for one, next_one in pairwise([current, *between, target]):
                bind_redistribution(x, one, next_one, options)
                x = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # norms and replicas are of one shape
            return
        like = x if plain.before is None else torch.empty_like(x)
        bind_redistribution(like, plain.current, plain.target, options)
        return
    found = _bound(x, current, target, options)
    assert isinstance(found, Call)
    found.build(x)


def _bound(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    forget_dead_groups()
    # The meshes themselves as well: those of the same ranks are equal, but their process groups may differ.
    key = (current, target, id(current.mesh), id(target.mesh), x.shape, x.stride(), x.dtype, x.device, options)
    found = _calls.get(key)
    if found is None:
        found = _bind(x, current, target, options)
        if len(_calls) >= _KEPT:
            _calls.pop(next(iter(_calls)))
        _calls[key] = found
    return found
