"""The runtime: transports, the executor of programs, DTensor, MoE and tracing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .dtensor.batch import redistribute_batch
from .dtensor.drop_in import redistribute_local_tensor
from .dtensor.fsdp import FSDPAllGather, FSDPReduceScatter, adapt_fsdp, restore_fsdp
from .dtensor.install import install, installed, is_installed, uninstall
from .dtensor.ordered_local import ordered_redistribute_local_tensor
from .dtensor.plan import plan, plan_batch, redistribute_cost
from .dtensor.prepare import prepare
from .dtensor.redistribute import explain, prepare_redistribute, redistribute
from .dtensor.redistribute_spmd import redistribute_spmd
from .executor.simulate import simulate
from .flight_recorder import dump_flight_records
from .moe.activation import silu_and_mul
from .moe.balance import BalancedExperts, balance_experts
from .moe.dispatcher import TokenDispatcher
from .moe.move_experts import move_experts, sum_replicas
from .moe.options import DispatchOptions
from .moe.parallel_style import ExpertParallel
from .moe.pending import PendingTokens
from .moe.permute_indices import generate_permute_indices
from .moe.routed import RoutedTokens, TokenLoad
from .moe.shares import share_of_tokens, whole_of_shares
from .moe.simulate import VirtualTokenDispatcher
from .statistics import Statistics, stats
from .tracing.record import record
from .transports.in_process import InProcessTransport
from .transports.shared_memory.pool_controls import PoolMemory, empty_cache, pool_memory, set_pool_limit

if TYPE_CHECKING:
    from .dtensor.distributed_checkpoint import LoadPlanner, SavePlanner, checkpointable_tensor
    from .moe.switch.token_switch import TokenSwitch as TokenSwitch
    from .moe.torchtitan import TorchtitanDispatcher
else:
    IMPORTED_ON_USE = {
        "LoadPlanner": ".dtensor.distributed_checkpoint",
        "SavePlanner": ".dtensor.distributed_checkpoint",
        "TokenSwitch": ".moe.switch.token_switch",
        "TorchtitanDispatcher": ".moe.torchtitan",
        "checkpointable_tensor": ".dtensor.distributed_checkpoint",
    }
    """The module of each name that is imported when it is first used: it imports torch.distributed.checkpoint, which
    takes as long as half of shardweave, or torchtitan, or it needs torch 2.15. TokenSwitch is not in `__all__`."""

    def __getattr__(name: str) -> Any:
        if name not in IMPORTED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(IMPORTED_ON_USE[name], __name__), name)
        except ImportError as error:
            if error.name != "torch.distributed._token_switch":
                raise
            import torch

            raise AttributeError(
                f"TokenSwitch: torch is {torch.__version__}; allowed: 2.15 or newer, for {error.name}"
            ) from error
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "BalancedExperts",
    "DispatchOptions",
    "ExpertParallel",
    "FSDPAllGather",
    "FSDPReduceScatter",
    "InProcessTransport",
    "LoadPlanner",
    "PoolMemory",
    "PendingTokens",
    "RoutedTokens",
    "SavePlanner",
    "Statistics",
    "TokenDispatcher",
    "TokenLoad",
    "TorchtitanDispatcher",
    "VirtualTokenDispatcher",
    "adapt_fsdp",
    "balance_experts",
    "checkpointable_tensor",
    "dump_flight_records",
    "empty_cache",
    "explain",
    "generate_permute_indices",
    "install",
    "installed",
    "is_installed",
    "move_experts",
    "ordered_redistribute_local_tensor",
    "plan",
    "plan_batch",
    "pool_memory",
    "record",
    "prepare",
    "prepare_redistribute",
    "redistribute",
    "redistribute_batch",
    "redistribute_cost",
    "redistribute_local_tensor",
    "redistribute_spmd",
    "restore_fsdp",
    "set_pool_limit",
    "share_of_tokens",
    "silu_and_mul",
    "simulate",
    "stats",
    "sum_replicas",
    "uninstall",
    "whole_of_shares",
]
