"""The collectives of spmd_types on shardweave: the replacement of the forward of its autograd functions.

`spmd_types.redistribute`, `all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all`, and their backward, all end in
the forward of an autograd function, where the change of types, the axis and the dtype are known. Arguments, type
checking and the derivatives stay those of spmd_types. `spmd_types.set_dist` replaces less: the collectives that it
receives no longer tell which tensor dims are split and concatenated, so that copies remain before and after them, and
spmd_types 0.3.1 makes most of its collectives without it.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ....errors import ArgumentError, UnsupportedError
from ....planner import Mesh
from ...dtensor import redistribute_options
from ...dtensor.drop_in import backend_obstacle, count_left, why_not_plain, why_not_traced
from ...dtensor.in_graph import call_in_graph, remember
from ...dtensor.local import is_in
from ...dtensor.plain_calls import mesh_of_group, redistribute_plain
from ...dtensor.redistribute_options import RedistributeOptions
from ...executor.dispatch_modes import active_modes, is_traced, note_decision, why_not_under

_OTHER_AXIS = "an axis of a mesh that install(only=) leaves out"
_SPLIT_SIZES = "spmd_types: split sizes of an all-to-all, which differ between calls"
_OTHER_SIZES = "spmd_types: split sizes that are not those of torch.chunk"
_REFUSED = "spmd_types: sizes, strides or dims that it refuses or handles itself"
_logger = logging.getLogger(__name__)


class _Collective(NamedTuple):
    """A collective as the redistribution of a tensor on the mesh of the axis.

    Attributes:
        x: this rank's shard under `source`.
        shape: the global shape.
        source, target: layouts.
        squeezed: the dim of size 1 of the target's shard that the result does not have.
        moved: the dim of the result that is the first dim of the target's shard.
    """

    x: torch.Tensor
    shape: tuple[int, ...]
    source: str
    target: str
    squeezed: int | None = None
    moved: int | None = None

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """The result of spmd_types from the target's shard."""
        if self.squeezed is not None:
            out = out.squeeze(self.squeezed)
        return out if self.moved is None else out.movedim(0, self.moved)


def _all_reduce(x: torch.Tensor, mesh: Mesh, dst: Any, inplace: bool) -> _Collective | str:
    if not x.is_contiguous():
        return _REFUSED
    return _Collective(x, tuple(x.shape), "P", "R")


def _all_gather_stack(x: torch.Tensor, mesh: Mesh, dst: Any, gather_dim: int) -> _Collective | str:
    if not 0 <= gather_dim <= x.ndim:
        return _REFUSED
    return _all_gather(x.unsqueeze(gather_dim), mesh, dst, gather_dim)


def _all_gather(x: torch.Tensor, mesh: Mesh, dst: Any, gather_dim: int) -> _Collective | str:
    shape = _with_size(x, gather_dim, mesh.size * x.shape[gather_dim])
    return _Collective(x, shape, f"S{gather_dim}", "R")


def _all_gather_uneven(
    x: torch.Tensor, mesh: Mesh, dst: Any, gather_dim: int, split_sizes: Sequence[int]
) -> _Collective | str:
    if not _are_chunks(split_sizes, mesh.size) or x.shape[gather_dim] != split_sizes[_position(mesh)]:
        return _OTHER_SIZES
    shape = _with_size(x, gather_dim, sum(split_sizes))
    return _Collective(x, shape, f"S{gather_dim}", "R")


def _reduce_scatter_stack(x: torch.Tensor, mesh: Mesh, scatter_dim: int) -> _Collective | str:
    if not 0 <= scatter_dim < x.ndim or x.shape[scatter_dim] != mesh.size:
        return _REFUSED
    return _scattered(x, scatter_dim)._replace(squeezed=scatter_dim)


def _reduce_scatter(x: torch.Tensor, mesh: Mesh, scatter_dim: int) -> _Collective | str:
    if x.shape[scatter_dim] % mesh.size:
        return _REFUSED
    if _contiguous_results:
        return _scattered(x, scatter_dim)
    # In spmd_types' strides: the rounding of sums over the result may depend on them.
    return _scattered(x.movedim(scatter_dim, 0), 0)._replace(moved=scatter_dim)


def _reduce_scatter_uneven(
    x: torch.Tensor, mesh: Mesh, scatter_dim: int, split_sizes: Sequence[int]
) -> _Collective | str:
    if not _are_chunks(split_sizes, mesh.size) or x.shape[scatter_dim] != sum(split_sizes):
        return _OTHER_SIZES
    return _scattered(x, scatter_dim)


def _scattered(x: torch.Tensor, dim: int) -> _Collective:
    return _Collective(x, tuple(x.shape), "P", f"S{dim}")


def _all_to_all_stack(x: torch.Tensor, mesh: Mesh, split_dim: int, concat_dim: int) -> _Collective | str:
    if not (0 <= split_dim < x.ndim and 0 <= concat_dim < x.ndim) or x.shape[split_dim] != mesh.size:
        return _REFUSED
    # Rank r holds x[r], sharded along what becomes dim `concat_dim`; the result keeps its own index of the first dim.
    x = x.movedim(split_dim, 0).unsqueeze(concat_dim + 1)
    shape = _with_size(x, concat_dim + 1, mesh.size)
    return _Collective(x, shape, f"S{concat_dim + 1}", "S0", 0)


def _all_to_all(x: torch.Tensor, mesh: Mesh, split_dim: int, concat_dim: int) -> _Collective | str:
    if x.shape[split_dim] % mesh.size or split_dim == concat_dim:
        return _REFUSED
    shape = _with_size(x, concat_dim, mesh.size * x.shape[concat_dim])
    return _Collective(x, shape, f"S{concat_dim}", f"S{split_dim}")


def _all_to_all_uneven(x: torch.Tensor, mesh: Mesh, output_split_sizes: Any, input_split_sizes: Any) -> str:
    return _SPLIT_SIZES


def _with_size(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _are_chunks(sizes: Sequence[int], parts: int) -> bool:
    """Whether sizes are those into which torch.chunk divides their sum, with zeros at the end if there are fewer."""
    total = sum(sizes)
    longest = math.ceil(total / parts)
    return list(sizes) == [min(longest, max(0, total - i * longest)) for i in range(parts)]


def _position(mesh: Mesh) -> int:
    return mesh.rank_array.tolist().index(dist.get_rank())


_REQUESTS: dict[str, Callable[..., _Collective | str]] = {
    "_AllReduce": _all_reduce,
    "_AllGatherStack": _all_gather_stack,
    "_AllGatherShard": _all_gather,
    "_AllGatherUneven": _all_gather_uneven,
    "_ReduceScatterStack": _reduce_scatter_stack,
    "_ReduceScatterShard": _reduce_scatter,
    "_ReduceScatterUneven": _reduce_scatter_uneven,
    "_AllToAllStack": _all_to_all_stack,
    "_AllToAllShard": _all_to_all,
    "_AllToAllUneven": _all_to_all_uneven,
}
"""By autograd function: the request of a call, or the reason why spmd_types carries it out. The parameters after the
mesh are those of the function's forward."""
_originals: dict[Any, Any] = {}
"""The forward of each autograd function that is replaced."""
_contiguous_results = True
"""Whether spmd_types returns the result of a reduce-scatter contiguous: from 0.3, which has `async_op`."""


def bind_spmd_types(installed: bool) -> None:
    """Replace the forward of spmd_types' autograd functions, or restore it.

    Raises:
        ArgumentError: spmd_types is not installed.
    """
    for function, original in _originals.items():
        function.forward = original
    _originals.clear()
    if not installed:
        return
    try:
        collectives = import_module("spmd_types._collectives")
    except ImportError as error:
        raise ArgumentError(
            f"spmd_types: True, and it cannot be imported ({error}); allowed: False, or after pip install spmd_types"
        ) from error
    global _contiguous_results
    _contiguous_results = "async_op" in inspect.signature(collectives.reduce_scatter).parameters
    for name, request in _REQUESTS.items():
        function = getattr(collectives, name, None)
        names = list(inspect.signature(request).parameters)[2:]
        expected = ["ctx", "x", "axis", *names, "dtype_options"]
        if function is None or list(inspect.signature(function.forward).parameters) != expected:
            _logger.warning(
                "spmd_types has no %s with a forward of (%s), which is left to it", name, ", ".join(expected)
            )
            continue
        original = _originals[function] = vars(function)["forward"]
        function.forward = staticmethod(_forward(original.__func__, request, names, name))


def _forward(
    original: Callable[..., Any], request: Callable[..., _Collective | str], names: list[str], name: str
) -> Callable:
    """The forward of one of the autograd functions. `names` are those of the arguments between the axis and the dtype
    options; spmd_types keeps each under its name for the backward."""

    def in_graph(
        x: torch.Tensor, group: dist.ProcessGroup, *settings: Any, op_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> Any:
        """The result of the forward of a traced tensor, in the dtype that is communicated or in `out_dtype`."""
        dtypes = SimpleNamespace(op_dtype=op_dtype, out_dtype=out_dtype, async_op=False, backward_options={})
        out = _carry_out(partial(request, **dict(zip(names, settings, strict=True))), x, group, dtypes)
        if out is None:
            ctx = SimpleNamespace(mark_dirty=lambda _: None)
            out = original(ctx, x.clone() if "inplace" in names else x, group, *settings, dtypes)
        return out

    in_graph.__name__ = name

    # Without gradients Dynamo calls a forward without ctx if it has one parameter less than there are arguments.
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        x, axis, *settings, dtypes = args
        if axis.size() == 1:
            return original(ctx, *args)
        if torch.compiler.is_dynamo_compiling():
            call = remember(in_graph, axis, *settings, op_dtype=dtypes.op_dtype, out_dtype=dtypes.out_dtype)
            out = call_in_graph(x, call)
        else:
            carried = _carry_out(partial(request, **dict(zip(names, settings, strict=True))), x, axis, dtypes)
            if carried is None:
                return original(ctx, *args)
            out = carried
        ctx.axis, ctx.backward_options, ctx.rank = axis, dtypes.backward_options, axis.rank()
        for name, value in zip(names, settings, strict=True):
            setattr(ctx, name, value)
        if "inplace" in names and ctx.inplace:
            ctx.mark_dirty(x)
            return x.copy_(out)
        return out if out.dtype == dtypes.out_dtype else out.to(dtypes.out_dtype)

    return forward


def _carry_out(
    request_of: Callable[[torch.Tensor, Mesh], _Collective | str], x: torch.Tensor, axis: dist.ProcessGroup, dtypes: Any
) -> torch.Tensor | None:
    """The result of a collective in its communication dtype; None where spmd_types carries it out, which is counted."""
    options = redistribute_options.default
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    request: _Collective | str | None = None
    modes = active_modes()
    traced = is_traced(x, modes)
    reason = why_not_traced(x, options) if traced else why_not_plain(x)
    if reason is None:
        mesh = mesh_of_group(axis)
        request = request_of(x.to(dtypes.op_dtype).detach(), mesh)
        reason = request if isinstance(request, str) else _why_not(request, mesh, options, traced)
    if modes and reason is None:
        reason = why_not_under(modes, traced)
    if reason is None:
        assert isinstance(request, _Collective)
        try:
            async_op = getattr(dtypes, "async_op", False) and request.squeezed is None and request.moved is None
            given = request.x
            if async_op and not modes and request.source == "P" and x.dtype == dtypes.op_dtype:
                given = given.clone()  # a sum reads it when it is waited for, and spmd_types lets callers change it
            out = redistribute_plain(given, mesh, *request[1:4], options, (axis,), async_op)
            if modes and not traced:
                note_decision(modes, None)
            return request.finish(out)
        except UnsupportedError as error:
            reason = str(error)
    if modes and not traced:
        note_decision(modes, reason)
    source, target = (request.source, request.target) if isinstance(request, _Collective) else ("its src", "its dst")
    count_left(reason, modes, source, target, left_to="spmd_types")
    return None


def _why_not(request: _Collective, mesh: Mesh, options: RedistributeOptions, traced: bool) -> str | None:
    if options.only is not None:
        ranks = mesh.rank_array.tolist()
        mine = [other for other in options.only if is_in(other)]
        axes = (dist.get_process_group_ranks(group) for other in mine for group in other.get_all_groups())
        if ranks not in axes:
            return _OTHER_AXIS
    return None if traced else backend_obstacle(request.x.device)
