"""Redistributions and token dispatch under active dispatch modes: one shardweave operator, or torch's own collectives.

A mode that supports the operator sees its input and output tensors; the execution itself is below all modes. Selective
activation checkpointing is such a mode: it saves the operator's output if its policy would save that of the collectives
that torch issues for the same exchange, so that the recomputation in backward does not communicate again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

from ...errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])
REPORTS, REPLACES, UNKNOWN = "reports torch's own collectives", "replaces tensors", "is a dispatch mode not known"
_SEES_ONE_OPERATOR = None
_MODES: dict[tuple[str, str], str | None] = {
    # They save outputs by a policy, and return them in the recomputation.
    ("torch.utils.checkpoint", "_CachingTorchDispatchMode"): _SEES_ONE_OPERATOR,
    ("torch.utils.checkpoint", "_CachedTorchDispatchMode"): _SEES_ONE_OPERATOR,
    # They inspect the inputs and outputs of operators.
    ("torch.utils.flop_counter", "_FlopCounterMode"): _SEES_ONE_OPERATOR,
    ("torch.distributed._tools.mem_tracker", "MemTracker"): _SEES_ONE_OPERATOR,
    ("torch.distributed._tools.fsdp2_mem_tracker", "FSDPMemTracker"): _SEES_ONE_OPERATOR,
    ("torch.distributed._tools.memory_tracker", "MemoryProfileDispatchMode"): _SEES_ONE_OPERATOR,
    # Their users read which collectives torch issues.
    ("torch.distributed.tensor.debug", "CommDebugMode"): REPORTS,
    ("torch.utils._debug_mode", "DebugMode"): REPORTS,
    ("torch.utils._debug_mode._mode", "DebugMode"): REPORTS,
    # Their tensors have no memory, or that of several ranks.
    ("torch._subclasses.fake_tensor", "FakeTensorMode"): REPLACES,
    ("torch._subclasses.functional_tensor", "FunctionalTensorMode"): REPLACES,
    ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode"): REPLACES,
    ("torch.distributed._local_tensor", "LocalTensorMode"): REPLACES,
}
"""Why a mode gets torch's collectives, or None if it gets the operator, by the module and name of its type, so that
none has to be imported. Subclasses are not included."""

_TRACING = ("FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode")
_c10d: Any = torch.ops._c10d_functional
_DECISIONS = "shardweave::left_to_torch"
"""A key in the storage of a checkpointed region: the reasons why its redistributions, by index, were left to torch."""


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def under_modes() -> bool:
    """Whether dispatch modes are active, other than those of torch.compile, for which there are other operators."""
    return not torch.compiler.is_compiling() and count_dispatch_modes() > 0


def active_modes() -> Sequence[Any]:
    """The active dispatch modes, the innermost last."""
    return _get_current_dispatch_mode_stack() if count_dispatch_modes() else ()


def below_modes() -> AbstractContextManager[Any]:
    """A context without dispatch modes; those of torch.compile stay."""
    return _disable_current_modes() if under_modes() else nullcontext()


def below_modes_with_memory() -> AbstractContextManager[Any]:
    """`below_modes`, for calls that move the memory of their tensors.

    Raises:
        UnsupportedError: a fake tensor mode is active.
    """
    if not count_dispatch_modes():
        return nullcontext()
    refuse_fake_mode()
    return below_modes()


def is_fake() -> bool:
    """Whether torch.compile is tracing or a fake tensor mode is active. Calls and refusals then have no peers."""
    return torch.compiler.is_compiling() or (count_dispatch_modes() > 0 and detect_fake_mode() is not None)


def refuse_fake_mode() -> None:
    """
    Raises:
        UnsupportedError: a fake tensor mode is active.
    """
    if detect_fake_mode() is not None:
        raise UnsupportedError("a fake tensor mode is active: programs move real memory; allowed: under install()")


def hidden_from_modes(function: Function) -> Function:
    """The function, which runs below all dispatch modes."""

    @wraps(function)
    def hidden(*args: Any, **options: Any) -> Any:
        with below_modes():
            return function(*args, **options)

    return hidden  # type: ignore[return-value]


def why_not_under(modes: Sequence[Any], traced: bool = False) -> str | None:
    """The reason why torch executes a redistribution under these modes; or None.

    `traced`: it is carried out by torch's functional collectives, which every mode sees.

    A recomputed region follows the decisions of its forward, whatever modes are active now, because it can only return
    what was saved then.
    """
    for mode in modes:
        if isinstance(mode, _CachedTorchDispatchMode) and not traced:
            at = _counters(mode)[_DECISIONS]
            return mode.storage.get(_DECISIONS, {}).get(at, f"{_name(mode)} recomputes what torch carried out")
    for mode in reversed(modes):
        kind = type(mode)
        obstacle = _MODES.get((kind.__module__, kind.__qualname__), None if traced else UNKNOWN)
        if obstacle is not None and not (traced and _name(mode) in _TRACING):
            return f"{_name(mode)} {obstacle}"
    return None


def is_traced(x: torch.Tensor, modes: Sequence[Any]) -> bool:
    """Whether a tensor is fake, or traced by torch.compile or under these modes."""
    return (
        torch.compiler.is_compiling()
        or isinstance(x, FakeTensor | FunctionalTensor)
        or torch._is_functional_tensor(x)
        or any(_name(mode) in _TRACING for mode in modes)
    )


def traces_into_graph(modes: Sequence[Any]) -> bool | None:
    """Whether torch traces into a graph under these modes; None if it only finds out about outputs first, as torch's
    functionalization does with fake tensors."""
    names = set(map(_name, modes))
    if "ProxyTorchDispatchMode" in names:
        return True
    return None if {"FakeTensorMode", "FunctionalTensorMode"} <= names else False


def _name(mode: Any) -> str:
    return type(mode).__name__


def note_decision(modes: Sequence[Any], reason: str | None) -> None:
    """Record in the checkpointed regions among `modes` why a redistribution was left to torch; None if it was not."""
    for mode in modes:
        if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            counters = _counters(mode)
            at = counters[_DECISIONS]
            counters[_DECISIONS] += 1
            if isinstance(mode, _CachingTorchDispatchMode):
                mode.storage.setdefault(_DECISIONS, {})[at] = reason


def _counters(mode: _CachingTorchDispatchMode | _CachedTorchDispatchMode) -> dict[Any, int]:
    """The counters of a checkpointed region, which begin anew when it is recomputed."""
    if hasattr(mode, "func_counter"):
        return mode.func_counter
    # Before torch 2.13. A backward pass that recomputes the region has an id; -1 in forward.
    backward, attributes = torch._C._current_graph_task_id(), mode.__dict__
    if attributes.get(_DECISIONS, (None,))[0] != backward:
        attributes[_DECISIONS] = backward, defaultdict(int)
    return attributes[_DECISIONS][1]


Collective = tuple[Any, ...]
"""An operator of torch and its arguments."""


class _Request(NamedTuple):
    """What an operator computes during one call.

    Attributes:
        run: the results for the operator's tensors.
        fake: likewise, of tensors without memory.
    """

    run: Callable[[Any], Any]
    fake: Callable[[Any], Any] | None = None


_requests: dict[int, _Request] = {}
_handles = itertools.count()


def _run(x: torch.Tensor, request: int) -> torch.Tensor:
    """The operator of a redistribution; `request` is an index that is valid during one call only."""
    return _apart([_request(request).run(x)], [x])[0]


def _run_all(tensors: list[torch.Tensor | None], request: int) -> list[torch.Tensor]:
    """The operators of token dispatch; `request` as for `_run`."""
    return _apart(_request(request).run(tensors), tensors)


def _request(index: int) -> _Request:
    """
    Raises:
        UnsupportedError: the call is over.
    """
    if index not in _requests:
        raise UnsupportedError(
            "an operator that a dispatch mode recorded, after its call; allowed: a graph that torch.compile traces"
        )
    return _requests[index]


def _apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The results, copied where they share memory: an operator must not return that of an input, or the same twice."""
    taken = {x.untyped_storage()._cdata for x in given if x is not None}
    apart = []
    for result in results:
        memory = result.untyped_storage()._cdata
        apart.append(result.clone() if memory in taken else result)
        taken.add(memory)
    return apart


_operator = torch.library.custom_op(
    "shardweave::redistribute", _run, mutates_args=(), schema="(Tensor x, int request) -> Tensor"
)


def operator_on_lists(name: str) -> Any:
    """An operator for `as_operator_on_lists`."""
    operator = torch.library.custom_op(
        f"shardweave::{name}", _run_all, mutates_args=(), schema="(Tensor?[] tensors, int request) -> Tensor[]"
    )
    operator.register_fake(lambda tensors, request: _request(request).fake(tensors))  # type: ignore[misc]
    return operator


def as_one_operator(
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    collectives: Callable[[torch.Tensor], list[Collective]],
) -> torch.Tensor:
    """Call `run(x)`, which redistributes `x`, as one operator that all active modes see; `run` itself is below them.

    Policies of selective activation checkpointing are applied to the collectives that torch would have issued instead:
    `collectives(x)`, each an operator and its arguments.
    """
    with _policies(lambda mode: partial(_policy, mode.policy_fn, collectives(x))):
        return _call(_operator, x, _Request(run))


def as_operator_on_lists(
    operator: Any,
    run: Callable[[list[Any], bool], list[torch.Tensor]],
    fake: Callable[[list[Any]], list[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    collective: Collective,
    like: torch.Tensor,
) -> list[torch.Tensor]:
    """Call `run(tensors, saved)` as one operator that all active modes see; `run` itself is below them.

    Policies of selective activation checkpointing are applied to `collective` before the call. `saved`: one of them
    saves the results, which then must be memory that nothing else uses.

    Args:
        operator: of `operator_on_lists`.
        fake: the results of `run` for tensors without memory.
        like: a tensor of the shape and dtype of the collective's result, for policies that ask for it.
    """
    saved = False

    def answered(mode: Any) -> Callable[..., Any]:
        nonlocal saved
        context = SelectiveCheckpointContext(is_recompute=isinstance(mode, _CachedTorchDispatchMode))
        context.op_output = like
        answer = _policy(mode.policy_fn, [collective], context)
        saved |= answer in _SAVING and isinstance(mode, _CachingTorchDispatchMode)
        return lambda *_, **__: answer

    with torch.no_grad(), _policies(answered):
        return _call(operator, [*tensors], _Request(lambda given: run(given, saved), fake))


def _call(operator: Any, given: Any, request: _Request) -> Any:
    handle = next(_handles)
    _requests[handle] = request
    try:
        return operator(given, handle)
    finally:
        del _requests[handle]


@contextmanager
def _policies(replacement: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """A context in which `replacement(mode)` is the policy of each checkpointed region."""
    # Before torch 2.13 policies are also applied when a region is recomputed.
    checkpointing = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    regions = [mode for mode in active_modes() if isinstance(mode, checkpointing) and hasattr(mode, "policy_fn")]
    policies = [mode.policy_fn for mode in regions]
    try:
        for mode in regions:
            mode.policy_fn = replacement(mode)
        yield
    finally:
        for mode, policy in zip(regions, policies, strict=True):
            mode.policy_fn = policy


_SAVING = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _policy(policy: Callable[..., Any], collectives: list[Collective], context: Any, *_: Any) -> Any:
    """A policy's answer for the first of torch's operators that it would save, or else for the first operator."""
    answers = [policy(context, operator, *args) for operator, *args in collectives]
    return next((answer for answer in answers if answer in _SAVING), answers[0])


def torchs_collectives(current: DTensorSpec, target: DTensorSpec, x: torch.Tensor) -> list[tuple[Any, ...]]:
    """The collectives that torch would issue to redistribute `x`, each as an operator and its arguments; a copy if it
    would issue none. All steps have `x` as input. Equal on all ranks, except for `x`."""
    steps = [_collective(x, current.mesh, *step) for step in _torchs_steps(current, target)]
    return [step for step in steps if step] or [(torch.ops.aten.clone.default, x)]


def _torchs_steps(current: DTensorSpec, target: DTensorSpec) -> list[tuple[int, Placement, Placement]]:
    """The steps that torch would take: mesh dim, placement before, placement after."""
    if current.mesh != target.mesh:
        return []
    try:
        steps = torch_redistribute._gen_transform_infos(current, target)
    except Exception:  # of any type: torch refuses some redistributions that shardweave supports
        return list(zip(range(current.mesh.ndim), current.placements, target.placements, strict=True))
    return [(step.mesh_dim, *step.src_dst_placements) for step in steps]


def _collective(
    x: torch.Tensor, mesh: DeviceMesh, dim: int, source: Placement, goal: Placement
) -> tuple[Any, ...] | None:
    size = mesh.size(dim)
    if source == goal or size == 1 or source.is_replicate() or goal.is_partial():
        return None
    try:
        name = str(mesh.get_group(dim).group_name)
    except RuntimeError:  # the mesh was made without process groups
        name = ""
    if source.is_partial():
        op = getattr(source, "reduce_op", "sum")
        if goal.is_shard():
            return _c10d.reduce_scatter_tensor.default, x, op, size, name
        return _c10d.all_reduce.default, x, op, name
    # From one sharded dim to another, torch gathers on CPUs and for strided shards.
    if isinstance(source, Shard) and isinstance(goal, Shard) and mesh.device_type != "cpu":
        return torch.ops._dtensor.shard_dim_alltoall.default, x, source.dim, goal.dim, name
    return _c10d.all_gather_into_tensor.default, x, size, name
