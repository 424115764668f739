"""FSDP2's own gathers and reduce-scatters, which never call `redistribute`, as programs on shardweave's worlds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError, UnsupportedError
from ..planner import Mesh, plan
from .calls import Call, check_backend, world_for
from .dtypes import dtype_name
from .executor import BoundProgram
from .group_caches import forget_dead_groups, kept_with_group
from .redistribution import How, default

_KEPT = 2048
_calls: dict[tuple, Call] = kept_with_group({})
_handed_out = WeakTensorKeyDictionary()
"""As keys, what `allocate` gave FSDP."""


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
        """Gather [n] of each rank to [group size * n], complete on return, also with `async_op`.

        Raises:
            ArgumentError: sizes, dtypes or devices that do not fit each other.
            UnsupportedError: the process group cannot carry programs on the device.
            WorldError: the ranks could not meet.
        """
        _check(input_tensor, output_tensor, group.size())
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
        """Reduce [group size * n] of each rank and leave [n] on each, complete on return, also with `async_op`.

        Raises:
            ArgumentError: sizes, dtypes or devices that do not fit each other.
            UnsupportedError: another op than SUM, AVG and PREMUL_SUM with its factor; a dtype that is not reduced; the
                process group cannot carry programs on the device.
            WorldError: the ranks could not meet.
        """
        _check(output_tensor, input_tensor, group.size())
        source, factor = _read_op(op)
        _carry(output_tensor, input_tensor, group, input_tensor.numel(), source, "S0")
        if factor is not None:
            output_tensor.mul_(factor)


def adapt_fsdp(module: torch.nn.Module) -> None:
    """From now on the gathers and reduce-scatters of every `fully_shard`-ed module in `module`, which may be one
    itself, run on shardweave: like `DTensor.redistribute` under `install`, with what it was told if it was called.

    Every rank must do it, at the same point of the program. Parameters and gradients keep their meaning; the all-reduce
    of hybrid sharding stays with torch, which has no place for another.

    Args:
        module: after `fully_shard` of it, or of modules in it.

    Raises:
        ArgumentError: nothing in `module` is sharded by FSDP2.
        UnsupportedError: the process group cannot carry programs on the devices of the parameters; a module has
            parameters on several meshes, whose collectives torch cannot replace.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not sharded:
        raise ArgumentError(f"module: nothing in {type(module).__name__} is an FSDPModule; call fully_shard first")
    meshes = {parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)}
    for mesh in meshes:
        check_backend(torch.device(mesh.device_type), mesh.size())
    gather, scatter = FSDPAllGather(), FSDPReduceScatter()
    for part in sharded:
        try:
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(scatter)
        except ValueError as error:
            raise UnsupportedError(f"module: {error}") from error


def _check(shard: torch.Tensor, whole: torch.Tensor, size: int) -> None:
    if whole.numel() != size * shard.numel() or whole.dtype != shard.dtype or whole.device != shard.device:
        raise ArgumentError(
            f"tensors of {shard.numel()} {shard.dtype} on {shard.device} and {whole.numel()} {whole.dtype} on "
            f"{whole.device} among {size} ranks; allowed: the one {size} times as large as the other, all else alike"
        )


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
    output: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, numel: int, source: str, target: str
) -> None:
    """Take the flat tensor of `numel` elements that `x` is this rank's part of from one layout to the other."""
    x = x.detach().reshape(-1)
    # Views and buffers that are kept outlive inference mode.
    with torch.inference_mode(False), torch.no_grad():
        forget_dead_groups()
        how = default()
        ranks = tuple(dist.get_process_group_ranks(group))
        key = group, numel, x.dtype, x.device, source, target, how
        call = _calls.get(key)
        if call is None:
            call = _bind(x, group, ranks, numel, source, target, how)
            if len(_calls) >= _KEPT:
                _calls.pop(next(iter(_calls)))
            _calls[key] = call
        result = call(x)
    if call.bound is not None and output in _handed_out and output.shape == result.shape:
        output.set_(result)
    else:
        output.copy_(result.view(output.shape))


def _bind(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
    numel: int,
    source: str,
    target: str,
    how: How,
) -> Call:
    check_backend(x.device, len(ranks), how.world)
    position = ranks.index(dist.get_rank())
    mesh = Mesh((len(ranks),), ranks=ranks)
    program = plan(mesh, (numel,), dtype_name(x.dtype), source, target, rank=position, topology=how.topology)
    if program.is_identity:
        return Call(None, None, ())
    world, _ = world_for(tuple(sorted(ranks)), x.device, how.world, groups=[group])
    bound = BoundProgram(program, position, x.stride(), world, x.dtype, x.device, how.reduction)
    return Call(bound, world, program.company(position))
