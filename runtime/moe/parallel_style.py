"""ExpertParallel: a ParallelStyle with which `parallelize_module` shards a module's experts and dispatches tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import ArgumentError, UnsupportedError
from ..convert_specs import unordered_dims
from ..transports.choose_transport import TransportName
from .dispatcher import TokenDispatcher
from .expert_placement import experts_of_shards
from .options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions, refuse_options
from .shard_tokens import gather_tokens, shard_tokens


class ExpertParallel(ParallelStyle):
    """Shard experts over a 1-D mesh, dispatch each rank's tokens to the ranks of their experts and combine the results.

    For a module whose parameters have the experts along dim 0, and whose `forward(x, offsets)` maps x [R, H], rows
    grouped by expert, to [R, H]. offsets, int32 [E_local], are the ends of the groups, as `torch._grouped_mm` takes
    them; rows past the last are zero with `zero_rows=True` and otherwise not initialised. A forward whose third
    parameter is named `out` also gets memory for its result, `RoutedTokens.output_buffer()`, or None where gradients
    are recorded; if it returns that tensor, the combine need not copy it. Afterwards

    - the module is called as `experts(x, topk_ids, topk_weights)`, with local tensors [T, H], [T, K] and [T, K] and no
      keyword arguments, and returns each token's weighted sum, [T, H];
    - its parameters are DTensors, `Shard(0)`, so forward reads them by `to_local()`. Their gradients are of all ranks'
      tokens. E need not be divisible: ranks have the experts that torch.chunk gives them. `fully_shard` over another
      mesh dim may follow. Shards are in order of the process group, as torch scatters and gathers them: ascending
      ranks, whatever the order in the mesh;
    - `experts.token_dispatcher` is the TokenDispatcher, for `check` and `explain`.

    Args:
        top_k, hidden, max_tokens, dtype, transport: as for TokenDispatcher. `num_experts` follows from the module. Its
            forward runs within `routed.kept()`.
        options: as for TokenDispatcher, without `expert_map`, which follows from the module, `layout`, `payloads`,
            `quantize` and `scale_layout`.
        replicated_over: a 1-D mesh, such as mesh["tp"], whose ranks call with equal tokens. Each rank dispatches a
            share of them and returns all results; `max_tokens` is of a share. If the experts' mesh does not include
            these ranks, gradients of parameters are of the share's tokens and have to be summed over the ranks.

    Raises, by `parallelize_module`:
        ArgumentError: parameters with different numbers of experts, or a setting that is not allowed.
        UnsupportedError: a number of experts that does not divide, on a mesh whose ranks do not ascend; as for
            TokenDispatcher. By the constructor: `replicated_over` a mesh whose ranks do not ascend.
    """

    def __init__(
        self,
        *,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        options: DispatchOptions = DEFAULT_OPTIONS,
        transport: TransportName | None = None,
        replicated_over: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if replicated_over is not None and not (isinstance(replicated_over, DeviceMesh) and replicated_over.ndim == 1):
            raise ArgumentError(f"replicated_over: {replicated_over!r}; allowed: a 1-D DeviceMesh, or None")
        self._replicated_over = replicated_over
        if replicated_over is not None and unordered_dims(replicated_over):
            raise UnsupportedError(
                f"replicated_over: ranks {replicated_over.mesh.tolist()} do not ascend; allowed: ascending ranks"
            )
        refuse_options(
            options, "expert_map", "layout", *OF_ROWS, why="since the module gets the rows of its experts as they are"
        )
        self._transport, self._options = transport, options
        self._model: dict[str, Any] = {"top_k": top_k, "hidden": hidden, "max_tokens": max_tokens, "dtype": dtype}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the module's parameters and register its dispatch and combine.

        Raises:
            ArgumentError: parameters with different numbers of experts, or a setting that is not allowed.
            UnsupportedError: a number of experts that does not divide, on a mesh whose ranks do not ascend; as for
                TokenDispatcher.
        """
        sizes = {name: p.shape[0] if p.dim() else None for name, p in module.named_parameters()}
        numbers = set(sizes.values())
        if len(numbers) != 1 or None in numbers:
            raise ArgumentError(f"module: parameters of {sizes} experts; allowed: all with the experts along dim 0")
        (experts,) = numbers
        assert experts is not None
        kind, expert_map = device_mesh.device_type, experts_of_shards(experts, device_mesh)
        dispatcher = TokenDispatcher(
            device_mesh,
            num_experts=experts,
            **self._model,
            options=replace(self._options, expert_map=expert_map),
            device=torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind,
            transport=self._transport,
        )
        lends = [*inspect.signature(module.forward).parameters][2:3] == ["out"]
        module.token_dispatcher = dispatcher  # type: ignore[assignment]
        # Hooks would have to keep the dispatch of a call on the module, where a call of another thread replaces it.
        forward: Any = _ExpertForward(module.forward, dispatcher, self._replicated_over, lends)
        module.forward = forward
        return distribute_module(module, device_mesh, _shard)


def _shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))


class _ExpertForward:
    """The forward of a parallelized module: its own, `experts`, between a dispatch and a combine."""

    def __init__(
        self,
        experts: Callable[..., torch.Tensor],
        dispatcher: TokenDispatcher,
        replicated_over: DeviceMesh | None,
        lends: bool,
    ) -> None:
        self._experts, self._dispatcher = experts, dispatcher
        self._replicated_over, self._lends = replicated_over, lends

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        if len(inputs) != 3 or named or any(isinstance(i, DTensor) for i in inputs):
            kinds = ", ".join([*(type(i).__name__ for i in inputs), *(f"{name}=" for name in named)])
            raise ArgumentError(f"inputs: ({kinds}); allowed: x, topk_ids and topk_weights, local tensors")
        x, ids, weights = inputs
        if self._replicated_over is not None:
            x, ids, weights = (shard_tokens(i, self._replicated_over) for i in inputs)
        routed = self._dispatcher.dispatch(x, ids, weights)
        given: list[torch.Tensor | None] = [routed.x, routed.offsets]
        if self._lends:
            given.append(None if torch.is_grad_enabled() else routed.output_buffer())
        with routed.kept():
            output = self._experts(*given)
        y = self._dispatcher.combine(output, routed)
        return y if self._replicated_over is None else gather_tokens(y, self._replicated_over, len(inputs[0]))
