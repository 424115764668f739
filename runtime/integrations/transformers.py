"""Experts of Hugging Face Transformers (5.23) over the ranks of a mesh: an implementation in its `ExpertsInterface`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...errors import ArgumentError, UnsupportedError
from ..moe.dispatcher import TokenDispatcher
from ..moe.expert_placement import experts_of_shards
from ..moe.options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions, refuse_options
from ..transports.choose_transport import TransportName

IMPLEMENTATION = "shardweave"
"""The name in transformers' `ExpertsInterface`."""


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    max_tokens: int,
    top_k: int | None = None,
    options: DispatchOptions = DEFAULT_OPTIONS,
    transport: TransportName | None = None,
) -> list[TokenDispatcher]:
    """Shard the experts of a transformers model over a 1-D mesh, and dispatch each rank's tokens to them.

    All modules whose class has `use_experts_implementation` are sharded, such as MixtralExperts and Qwen3MoeExperts;
    all ranks have the same weights before. Afterwards each rank passes its own tokens through the model, of any number
    up to `max_tokens`. Parameters of experts are DTensors, `Shard(0)`, with the gradient of all ranks' tokens; those of
    other modules, such as the router, are left as they are and have the gradient of this rank's tokens. The model's
    experts implementation, such as "eager" or "grouped_mm", computes the experts of each rank on the rows that it got;
    as on one rank, parameters that it does not use have no gradient: those of a rank without experts, and with "eager"
    those of a rank whose experts got no tokens.

    Args:
        max_tokens: the largest number of tokens of one forward call, batch times sequence length.
        top_k: K. Default: `num_experts_per_tok` of the model's config.
        options: as for TokenDispatcher, without `expert_map`, which follows from the model, `layout`, `payloads`,
            `quantize` and `scale_layout`. `zero_rows` is True by default: some implementations process all rows.
        transport: as for TokenDispatcher.

    Returns:
        The dispatcher of each module, in order of `model.modules()`, which also is its `token_dispatcher`.

    Raises:
        ArgumentError: a model without such modules; a setting that is not allowed.
        UnsupportedError: experts that are sharded already, or with parameters that do not have the experts along dim 0;
            as for TokenDispatcher.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules: list[Any] = [module for module in model.modules() if _is_experts(module)]
    if not modules:
        raise ArgumentError(f"model: {type(model).__name__} without experts of transformers' experts interface")
    for module in modules:
        _check(module)
    refuse_options(options, "expert_map", "layout", *OF_ROWS, why="since the model's experts take rows as they are")
    if options.zero_rows is None:
        options = replace(options, zero_rows=True)
    kind = mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    dispatchers = []
    for module in modules:
        experts, config = int(module.num_experts), module.config
        parameter = next(module.parameters())
        dispatcher = TokenDispatcher(
            mesh,
            num_experts=experts,
            top_k=config.num_experts_per_tok if top_k is None else top_k,
            hidden=config.hidden_size,
            max_tokens=max_tokens,
            dtype=parameter.dtype,
            options=replace(options, expert_map=experts_of_shards(experts, mesh)),
            device=device,
            transport=transport,
        )
        for name, value in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(value.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(placed, requires_grad=value.requires_grad))
        module.token_dispatcher = dispatcher
        if config._experts_implementation != IMPLEMENTATION:
            config._own_experts_implementation = config._experts_implementation
        dispatchers.append(dispatcher)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    for module in modules:
        module.config._experts_implementation = IMPLEMENTATION
    return dispatchers


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation "shardweave" in transformers' `ExpertsInterface`: [T, H], [T, K] and [T, K] to [T, H].

    Raises:
        UnsupportedError: the module's experts were not sharded by `shard_experts`.
        ArgumentError, CapacityError, TransportError: as for TokenDispatcher.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    dispatcher: TokenDispatcher | None = getattr(self, "token_dispatcher", None)
    if dispatcher is None:
        raise UnsupportedError(
            f'experts implementation "{IMPLEMENTATION}": {type(self).__name__} is not sharded; call shard_experts first'
        )
    implementation = self.config._own_experts_implementation
    own = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, type(self).forward.__wrapped__)
    routed = dispatcher.dispatch(hidden_states, top_k_index, top_k_weights)
    local = _LocalExperts(self)
    # Transformers' experts skip rows whose expert is the number of experts.
    rows = torch.arange(len(routed.x), device=routed.x.device)
    ids = torch.bucketize(rows, routed.offsets, right=True)[:, None]
    if local.num_experts:
        output = own(local, routed.x, ids, routed.weights[:, None]).to(routed.x.dtype)
    else:
        output = torch.zeros_like(routed.x)  # not all implementations take weights of no experts
    return dispatcher.combine(output, routed, weighted=False)


class _LocalExperts:
    """A module of experts as its experts implementation has it on one rank: with this rank's experts only."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_expert_parallel = True
        self.num_experts = len(next(p.to_local() for p in module.parameters(recurse=False) if isinstance(p, DTensor)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def _is_experts(module: nn.Module) -> bool:
    """Whether `use_experts_implementation` decorates the class."""
    return hasattr(module, "_is_expert_parallel") and hasattr(type(module).forward, "__wrapped__")


def _check(module: Any) -> None:
    parameters = dict(module.named_parameters())
    what = f"model: {type(module).__name__} with parameters"
    if any(isinstance(p, DTensor) for p in parameters.values()):
        raise UnsupportedError(f"{what} that are DTensors; allowed: experts that are not sharded")
    wrong = {name: tuple(p.shape) for name, p in parameters.items() if not p.dim() or len(p) != module.num_experts}
    if wrong or not parameters or module.num_experts < 1:
        raise UnsupportedError(f"{what} {wrong}; allowed: the {module.num_experts} experts along dim 0 of each")
