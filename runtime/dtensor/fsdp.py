"""`adapt_fsdp`: FSDP2's all-gathers and reduce-scatters, which never call `redistribute`, on shardweave's
transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import ArgumentError, UnsupportedError, shown
from ...kernels import on_device
from ..executor.call import check_backend, refuse, transport_for, why_no_data
from ..executor.dispatch_modes import below_modes
from ..statistics import log_level
from ..transports.rendezvous.peer_reports import remarks
from ..transports.select import publish_settings
from . import redistribute_options
from .fsdp_labels import why_permuted
from .local import PLAIN_TENSORS
from .overlap import overlaps_itself
from .plain_calls import mesh_of_group, plain_call

_logger = logging.getLogger(__name__)
_allocated = WeakTensorKeyDictionary()
"""The tensors that `allocate` returned, as keys."""
_COMM_ATTRIBUTES = ("_all_gather_comm", "_reduce_scatter_comm")
"""The attributes in which FSDP2's parameter groups hold their collectives. Each call passes its process group, so one
object serves groups on any mesh."""
_originals: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The replaced collectives of each adapted parameter group."""
# Not compared between ranks: in a pipeline only some stages may be sharded.
remarks["adapt_fsdp()"] = lambda: "called" if _originals else "not called"


class _Allocator:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate uninitialised memory for the input or output of a call.

        An output is a placeholder: the call makes the tensor refer to the memory of the result, which saves a copy.
        Views that were made before the call keep the earlier memory.
        """
        buffer = torch.empty(tuple(size), dtype=dtype, device=device)
        _allocated[buffer] = None
        return buffer


class FSDPAllGather(_Allocator, AllGather):
    """An all-gather for `FSDPModule.set_custom_all_gather`, carried out as the program `S0 -> R` of a flat tensor on
    the ranks of the group."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather n elements from each rank into [group size * n]. The output is complete on return, also with
        `async_op`.

        Args:
            output_tensor: [group size * n] elements; any shape and strides.
            input_tensor: [n] elements of the same dtype and device; any shape and strides. It may overlap the output:
                it is read before the output is written.
            group: a process group of which this rank is a member.

        Raises:
            ArgumentError: sizes, dtypes or devices that do not match; a tensor subclass; an output in which several
                elements share memory; a group without this rank. Raised before anything is communicated.
            UnsupportedError: the process group cannot carry programs on the device.
            TransportError: a peer died, timed out, or made a different request.
        """
        tensors = ("input_tensor", input_tensor), ("output_tensor", output_tensor)
        with _refusing(input_tensor, output_tensor, group):
            _check(*tensors, output_tensor, group)
        _redistribute_flat(output_tensor, input_tensor, group, output_tensor.numel(), "S0", "R")


class FSDPReduceScatter(_Allocator, ReduceScatter):
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, carried out as the program `P -> S0` or `Pavg -> S0`
    of a flat tensor.

    Values are added in ascending order of ranks, 16-bit floats in float32, and rounded once. The factor of `PREMUL_SUM`
    multiplies the sum, in the dtype of the tensor.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce [group size * n] elements over the ranks and leave n elements on each. The output is complete on
        return, also with `async_op`.

        Args:
            output_tensor: [n] elements.
            input_tensor: [group size * n] elements.
            group: as for `FSDPAllGather`.
            op: SUM, AVG, or PREMUL_SUM with its factor.

        Raises:
            ArgumentError: as for `FSDPAllGather`; a factor whose product cannot be cast to the dtype of the output.
            UnsupportedError: another op; a dtype that cannot be reduced; the process group cannot carry programs on the
                device.
            TransportError: a peer died, timed out, or made a different request.
        """
        tensors = ("output_tensor", output_tensor), ("input_tensor", input_tensor)
        with _refusing(input_tensor, output_tensor, group):
            _check(*tensors, output_tensor, group)
            source, factor = _read_op(op)
            if factor is not None and not torch.can_cast(torch.result_type(output_tensor, factor), output_tensor.dtype):
                raise ArgumentError(
                    f"op: a factor of {factor} for {output_tensor.dtype}; allowed: whole factors for integers"
                )
        _redistribute_flat(output_tensor, input_tensor, group, input_tensor.numel(), source, "S0", factor)


def adapt_fsdp(module: torch.nn.Module) -> None:
    """Run the all-gathers and reduce-scatters of every `fully_shard`-ed module in `module`, itself included, on
    shardweave, with the topology and reduction of `install` if it was called.

    Every rank must call it, at the same point of the program; calling it again has no effect. Modules whose parameters
    are on several meshes, such as experts inside a model, are supported. Parameters and gradients keep their values.
    The all-reduce of hybrid sharding stays with torch, which has no hook for it. `restore_fsdp` undoes it.

    Args:
        module: a module to which, or to parts of which, `fully_shard` has been applied.

    Raises:
        ArgumentError: `module` is no module, or no part of it is sharded by FSDP2.
        UnsupportedError: the process group cannot carry programs on the device of a module's parameters; the text names
            the module. A tensor-parallel parameter that was strided before it was sharded, such as a fused weight, so
            that its placements do not describe its data; the text names the parameter. No module is adapted then.
    """
    groups = list(_parameter_groups(module))
    for name, group in groups:
        _check_group(name, group, lambda parameter: _name_in(module, parameter))
    for _, group in groups:
        _adapt_group(group)
    _logger.log(
        log_level(logging.INFO), "%d parameter groups of %s run on shardweave", len(groups), type(module).__name__
    )
    publish_settings()


@cache
def adapt_fsdp_when_first_used() -> None:
    """Adapt every module of this process to which `fully_shard` is applied, as `adapt_fsdp` does, before its first
    all-gather; for programs that cannot call it. Not undone.

    That all-gather raises the errors of `adapt_fsdp`.
    """
    initialize, adapted = FSDPParamGroup.lazy_init, WeakSet[Any]()

    @wraps(initialize)
    def lazy_init(group: Any) -> None:
        initialize(group)
        if group not in adapted:  # FSDPModule.unshard initialises it again
            _check_group(str(group), group, lambda parameter: parameter._param_fqn or parameter._module_info.param_name)
            _adapt_group(group)
            adapted.add(group)
            publish_settings()

    FSDPParamGroup.lazy_init = lazy_init  # type: ignore[method-assign]


def _check_group(name: str, group: Any, name_of: Callable[[Any], str]) -> None:
    """Check that a parameter group can be adapted.

    Args:
        name: the module of the group.
        name_of: the name of one of its parameters.

    Raises:
        UnsupportedError: as `adapt_fsdp`.
    """
    mesh = group.mesh_info.mesh
    try:
        check_backend(torch.device(mesh.device_type), mesh.size())
    except UnsupportedError as error:
        raise UnsupportedError(f"module: {name!r}: {error}") from error
    for parameter in group.fsdp_params:
        if (why := why_permuted(parameter)) is not None:
            raise UnsupportedError(
                f"module: parameter {name_of(parameter)!r}: {why}; allowed: plain shards of that dim, or "
                f"fully_shard(shard_placement_fn=) along another one"
            )


def _adapt_group(group: Any) -> None:
    ours = dict(zip(_COMM_ATTRIBUTES, (FSDPAllGather(), FSDPReduceScatter()), strict=True))
    for name, comm in ours.items():
        before = getattr(group, name)
        if not isinstance(before, type(comm)):
            _originals.setdefault(group, {})[name] = before
            setattr(group, name, comm)


def restore_fsdp(module: torch.nn.Module) -> None:
    """Restore the collectives that the `fully_shard`-ed modules in `module` had before `adapt_fsdp`.

    Collectives that were set after `adapt_fsdp`, as by `FSDPModule.set_custom_all_gather`, are kept, and modules that
    are not adapted are not changed. Every rank must call it, at the same point of the program.

    Args:
        module: the module that was passed to `adapt_fsdp`, a part of it, or a module that contains it.

    Raises:
        ArgumentError: `module` is no module, or no part of it is sharded by FSDP2.
    """
    groups = list(_parameter_groups(module))
    for _, group in groups:
        for name, before in _originals.pop(group, {}).items():
            if isinstance(getattr(group, name), _Allocator):
                setattr(group, name, before)
    _logger.log(log_level(logging.INFO), "%d parameter groups of %s run on torch", len(groups), type(module).__name__)


def _parameter_groups(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's parameter groups in `module` with the names of their modules: one per mesh on which a sharded module has
    parameters.

    `FSDPModule.set_custom_all_gather` supports one group only, and does not return the previous collective.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module: {shown(module)}; allowed: a torch.nn.Module")
    sharded = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    if not sharded:
        raise ArgumentError(f"module: no part of {type(module).__name__} is an FSDPModule; call fully_shard first")
    seen = set()
    for name, part in sharded:
        state = part._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None and group not in seen:  # several modules may share one
                seen.add(group)
                yield name or type(part).__name__, group


def _name_in(module: torch.nn.Module, parameter: Any) -> str:
    """The name of one of FSDP2's parameters in `module`."""
    info = parameter._module_info
    owner = next((name for name, part in module.named_modules() if part is info.module), "")
    return f"{owner}.{info.param_name}" if owner else info.param_name


@contextmanager
def _refusing(x: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    """Tell the ranks of the group when an `ArgumentError` is raised in the block."""
    try:
        yield
    except ArgumentError as error:
        is_member = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
        # Tensors without elements are not exchanged.
        if is_member and group.size() > 1 and isinstance(x, torch.Tensor) and (x.numel() or output.numel()):
            ranks, options = tuple(sorted(dist.get_process_group_ranks(group))), redistribute_options.default
            check_backend(x.device, len(ranks), options.transport)
            transport, _ = transport_for(ranks, x.device, options.transport, groups=[group])
            refuse(transport, ranks, ranks, error, all_meet=True)
        raise


def _check(
    shard: tuple[str, torch.Tensor], whole: tuple[str, torch.Tensor], output: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Validate the arguments, before anything is communicated."""
    for name, x in (shard, whole):
        if type(x) not in PLAIN_TENSORS and not isinstance(x, AsyncCollectiveTensor):
            raise ArgumentError(f"{name}: a {type(x).__name__}; allowed: a torch.Tensor")
        if (obstacle := why_no_data(x)) is not None:
            raise ArgumentError(f"{name}: {obstacle}; allowed: a strided tensor with data")
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ArgumentError(f"group: {group!r}; allowed: a process group that this rank is in")
    (_, own), (_, all_), size = shard, whole, group.size()
    if all_.numel() != size * own.numel() or all_.dtype != own.dtype or all_.device != own.device:
        raise ArgumentError(
            f"tensors of {own.numel()} {own.dtype} on {own.device} and {all_.numel()} {all_.dtype} on "
            f"{all_.device} among {size} ranks; allowed: one {size} times as large as the other, of the same dtype "
            f"and device"
        )
    if isinstance(output, AsyncCollectiveTensor) or overlaps_itself(output):
        raise ArgumentError(
            f"output_tensor: a {type(output).__name__} of {list(output.shape)} with strides {list(output.stride())}; "
            "allowed: no two elements in the same memory"
        )
    if output.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("output_tensor: made under torch.inference_mode(); allowed: only there")


def _read_op(op: Any) -> tuple[str, float | torch.Tensor | None]:
    """The source layout of the op, and the factor of the sum."""
    name = getattr(op, "op", op).name
    if name in ("SUM", "AVG"):
        return {"SUM": "P", "AVG": "Pavg"}[name], None
    if name == "PREMUL_SUM" and hasattr(op, "op"):
        _, factor = op.__getstate__()  # torch has no other accessor
        return "P", factor
    raise UnsupportedError(f"op: {name} of {op!r}; allowed: SUM, AVG, PREMUL_SUM with its factor")


def _redistribute_flat(
    output: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    numel: int,
    source: str,
    target: str,
    factor: float | torch.Tensor | None = None,
) -> None:
    """Redistribute a flat tensor of `numel` elements, of which `x` is this rank's part, into `output`."""
    with below_modes(), torch.no_grad():
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        flat = _flat(x)
        # Cached views and buffers outlive inference mode.
        with torch.inference_mode(False), torch.no_grad(), on_device(x.device):
            options = redistribute_options.default
            call = plain_call(flat, mesh_of_group(group), (numel,), source, target, options, (group,))
            result = call(flat)
        if call.bound is not None and output in _allocated and output.shape == result.shape:
            output.set_(result)
        elif call.bound is not None or not output.is_set_to(x):
            # Without a program the result is the input itself, which may overlap the output.
            output.copy_((result if call.bound is not None else result.clone()).view(output.shape))
        if factor is not None:
            output.mul_(factor)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` as a contiguous vector; a view where `x` is contiguous.

    Programs are bound for contiguous memory only, so cache keys need not contain strides and conjugate bits.
    """
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
