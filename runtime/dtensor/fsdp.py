"""FSDP2's own gathers and reduce-scatters, which never call `redistribute`, as programs on shardweave's transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import ArgumentError, UnsupportedError
from ...planner import Mesh, plan, title
from ..cache import forget_dead_groups, kept_with_group
from ..convert import dtype_name
from ..executor.bind import BoundProgram
from ..executor.call import Call, check_backend, refuse, transport_for
from ..executor.copies import contiguous_strides
from ..executor.dispatch_modes import below_modes
from ..transports.rendezvous import remarks
from ..transports.select import publish_settings
from .local import RedistributeOptions, default
from .overlap import overlaps_itself

_KEPT = 2048
_calls: dict[tuple, Call] = kept_with_group({})
_handed_out = WeakTensorKeyDictionary()
"""As keys, what `allocate` gave FSDP."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")
"""The attributes in which FSDP2's parameter groups keep what they communicate by. They say to it which process group
each call is for, so that one object serves groups on any meshes."""
_replaced: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""By adapted parameter group, what it communicated by before."""
# Not compared: of a pipeline's stages some may be sharded alone.
remarks["adapt_fsdp()"] = lambda: "called" if _replaced else "not called"


class _OwnMemory:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for a call's input or output.

        As an output it is a place holder: a call lets the tensor refer to the memory that its result came to lie in, so
        that nothing is copied once more. Views made of it before the call keep the memory that it had.
        """
        buffer = torch.empty(tuple(size), dtype=dtype, device=device)
        _handed_out[buffer] = None
        return buffer


class FSDPAllGather(_OwnMemory, AllGather):
    """For `FSDPModule.set_custom_all_gather`: the program `S0 -> R` of a flat tensor on the ranks of the group."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather n elements of each rank to [group size * n], complete on return, also with `async_op`.

        Args:
            output_tensor, input_tensor: of any shape and strides, and of as many elements as said: what counts is the
                order of their elements. They may overlap; the input is read before the output is written.
            group: with this rank in it.

        Raises:
            ArgumentError: sizes, dtypes or devices that do not fit each other; a tensor subclass; an output in which
                several elements share one place; a group without this rank. Nothing has been communicated.
            UnsupportedError: the process group cannot carry programs on the device.
            TransportError: the ranks could not meet.
        """
        given = ("input_tensor", input_tensor), ("output_tensor", output_tensor)
        with _telling(input_tensor, output_tensor, group):
            _check(*given, output_tensor, group)
        _carry(output_tensor, input_tensor, group, output_tensor.numel(), "S0", "R")


class FSDPReduceScatter(_OwnMemory, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`: the program `P -> S0`, or `Pavg -> S0`, of a flat tensor.

    Values are added in the ascending order of ranks, 16-bit floats in float32, and rounded once; a factor of
    `PREMUL_SUM` multiplies the sum, in the tensor's dtype.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce [group size * n] of each rank and leave n elements on each, complete on return, also with `async_op`.

        Args:
            output_tensor, input_tensor, group: as for `FSDPAllGather`.
            op: SUM, AVG, or PREMUL_SUM with its factor.

        Raises:
            ArgumentError: as for `FSDPAllGather`; a factor whose product is of another kind of dtype.
            UnsupportedError: another op than SUM, AVG and PREMUL_SUM with its factor; a dtype that is not reduced; the
                process group cannot carry programs on the device.
            TransportError: the ranks could not meet.
        """
        given = ("output_tensor", output_tensor), ("input_tensor", input_tensor)
        with _telling(input_tensor, output_tensor, group):
            _check(*given, output_tensor, group)
            source, factor = _read_op(op)
            if factor is not None and not torch.can_cast(torch.result_type(output_tensor, factor), output_tensor.dtype):
                raise ArgumentError(
                    f"op: a factor of {factor} for {output_tensor.dtype}; allowed: whole ones for integers"
                )
        _carry(output_tensor, input_tensor, group, input_tensor.numel(), source, "S0", factor)


def adapt_fsdp(module: torch.nn.Module) -> None:
    """From now on the gathers and reduce-scatters of every `fully_shard`-ed module in `module`, which may be one
    itself, run on shardweave: like `DTensor.redistribute` under `install`, with what it was told if it was called.

    Modules whose parameters are on several meshes, as experts and what is around them, are adapted like others. Every
    rank must do it, at the same point of the program; doing it twice is doing it once. Parameters and gradients keep
    their meaning; the all-reduce of hybrid sharding stays with torch, which has no place for another. `restore_fsdp`
    undoes it.

    Args:
        module: after `fully_shard` of it, or of modules in it.

    Raises:
        ArgumentError: nothing in `module` is sharded by FSDP2.
        UnsupportedError: the process group cannot carry programs on the device of the parameters of a module, which is
            named. No module has been adapted then.
    """
    groups = list(_parameter_groups(module))
    for name, group in groups:
        mesh = group.mesh_info.mesh
        try:
            check_backend(torch.device(mesh.device_type), mesh.size())
        except UnsupportedError as error:
            raise UnsupportedError(f"module: {name!r}: {error}") from error
    ours = dict(zip(_COMMS, (FSDPAllGather(), FSDPReduceScatter()), strict=True))
    for _, group in groups:
        before = {name: getattr(group, name) for name in _COMMS}
        for name, comm in ours.items():
            if not isinstance(before[name], type(comm)):
                _replaced.setdefault(group, {})[name] = before[name]
                setattr(group, name, comm)
    publish_settings()


def restore_fsdp(module: torch.nn.Module) -> None:
    """Give the `fully_shard`-ed modules in `module` back what they communicated by before `adapt_fsdp`.

    What was set after `adapt_fsdp`, as by `FSDPModule.set_custom_all_gather`, stays; modules that are not adapted stay
    as they are. Every rank must do it, at the same point of the program.

    Args:
        module: what was given to `adapt_fsdp`, or a part of it, or what contains it.

    Raises:
        ArgumentError: nothing in `module` is sharded by FSDP2.
    """
    for _, group in list(_parameter_groups(module)):
        for name, before in _replaced.pop(group, {}).items():
            if isinstance(getattr(group, name), _OwnMemory):
                setattr(group, name, before)


def _parameter_groups(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's parameter groups in `module`, each with the name of its module there: one for each mesh on which a
    sharded module has parameters.

    `FSDPModule.set_custom_all_gather` refuses where there are several, and says nowhere what was set before.
    """
    sharded = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    if not sharded:
        raise ArgumentError(f"module: nothing in {type(module).__name__} is an FSDPModule; call fully_shard first")
    seen = set()
    for name, part in sharded:
        state = part._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None and group not in seen:  # several modules may share one
                seen.add(group)
                yield name or type(part).__name__, group


@contextmanager
def _telling(x: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    """The ranks of the group are told when this rank refuses an argument in the block."""
    try:
        yield
    except ArgumentError as error:
        ours = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
        # Of tensors without elements nothing is exchanged.
        if ours and group.size() > 1 and isinstance(x, torch.Tensor) and (x.numel() or output.numel()):
            ranks, options = tuple(sorted(dist.get_process_group_ranks(group))), default()
            check_backend(x.device, len(ranks), options.transport)
            refuse(transport_for(ranks, x.device, options.transport, groups=[group])[0], ranks, ranks, error)
        raise


def _check(
    shard: tuple[str, torch.Tensor], whole: tuple[str, torch.Tensor], output: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """All that can be refused is refused here, before anything is communicated."""
    for name, x in (shard, whole):
        if type(x) not in (*_PLAIN, AsyncCollectiveTensor):
            raise ArgumentError(f"{name}: a {type(x).__name__}; allowed: a torch.Tensor")
        if x.layout is not torch.strided or x.is_meta or x.is_quantized:
            raise ArgumentError(f"{name}: {x.layout} on {x.device}, of {x.dtype}; allowed: a strided tensor with data")
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ArgumentError(f"group: {group!r}; allowed: a process group that this rank is in")
    (_, own), (_, all_), size = shard, whole, group.size()
    if all_.numel() != size * own.numel() or all_.dtype != own.dtype or all_.device != own.device:
        raise ArgumentError(
            f"tensors of {own.numel()} {own.dtype} on {own.device} and {all_.numel()} {all_.dtype} on "
            f"{all_.device} among {size} ranks; allowed: the one {size} times as large as the other, all else alike"
        )
    if type(output) is AsyncCollectiveTensor or overlaps_itself(output):
        raise ArgumentError(
            f"output_tensor: a {type(output).__name__} of {list(output.shape)} with strides {list(output.stride())}; "
            "allowed: memory in which each element has a place of its own"
        )
    if output.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("output_tensor: made under torch.inference_mode(); allowed: only there")


def _read_op(op: Any) -> tuple[str, float | torch.Tensor | None]:
    """The layout that means the same, and what the sum is multiplied by."""
    name = getattr(op, "op", op).name
    if name in ("SUM", "AVG"):
        return {"SUM": "P", "AVG": "Pavg"}[name], None
    if name == "PREMUL_SUM" and hasattr(op, "op"):
        _, factor = op.__getstate__()  # torch has no other way to read it
        return "P", factor
    raise UnsupportedError(f"op: {name} of {op!r}; allowed: SUM, AVG, PREMUL_SUM with its factor")


def _carry(
    output: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    numel: int,
    source: str,
    target: str,
    factor: float | torch.Tensor | None = None,
) -> None:
    """Take the flat tensor of `numel` elements that `x` is this rank's part of from one layout to the other."""
    with below_modes(), torch.no_grad():
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        flat = _flat(x)
        # Views and buffers that are kept outlive inference mode.
        with torch.inference_mode(False), torch.no_grad():
            forget_dead_groups()
            options = default()
            key = group, numel, x.dtype, x.device, source, target, options
            call = _calls.get(key)
            if call is None:
                call = _bind(x.dtype, x.device, group, numel, source, target, options)
                if len(_calls) >= _KEPT:
                    _calls.pop(next(iter(_calls)))
                _calls[key] = call
            result = call(flat)
        if call.bound is not None and output in _handed_out and output.shape == result.shape:
            output.set_(result)
        elif call.bound is not None or not output.is_set_to(x):
            # Without a program the result is the input itself, which the output may overlap.
            output.copy_((result if call.bound is not None else result.clone()).view(output.shape))
        if factor is not None:
            output.mul_(factor)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in their order, in memory one after the other: a view where they lie so.

    Programs are bound for such memory, and for none else: whatever the strides and bits of `x`, no key has to tell
    them apart.
    """
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _bind(
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    numel: int,
    source: str,
    target: str,
    options: RedistributeOptions,
) -> Call:
    ranks = tuple(dist.get_process_group_ranks(group))
    check_backend(device, len(ranks), options.transport)
    position = ranks.index(dist.get_rank())
    mesh = Mesh((len(ranks),), ranks=ranks)
    program = plan(mesh, (numel,), dtype_name(dtype), source, target, rank=position, topology=options.topology)
    if program.is_identity:
        return Call(None, None, ())
    transport, _ = transport_for(tuple(sorted(ranks)), device, options.transport, groups=[group])
    participants = program.participants(position)
    with transport.rendezvous.making_ready(participants, partial(title, program)):
        bound = BoundProgram(
            program, position, contiguous_strides((numel,)), transport, dtype, device, options.reduction
        )
    return Call(bound, transport, participants)
