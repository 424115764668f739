"""shardweave: planned redistribution of DTensors, and token dispatch for MoE, with Triton kernels.

Imports are absolute here and have no side effects, because pytest imports this file again under the name of its folder.
"""

from typing import TYPE_CHECKING, Any

from shardweave.errors import (
    ArgumentError,
    CapacityError,
    DisagreementError,
    LayoutSyntaxError,
    MeetingTimeoutError,
    PeerError,
    ShardweaveError,
    TransportError,
    UnsupportedError,
)
from shardweave.planner import (
    NVLINK_INFINIBAND,
    NVLINK_NODE,
    Batch,
    Layout,
    Link,
    Mesh,
    Partial,
    Program,
    Replicate,
    Shard,
    StridedShard,
    Topology,
    draw,
)
from shardweave.runtime import (
    ExpertParallel,
    FSDPAllGather,
    FSDPReduceScatter,
    LoadPlanner,
    PoolMemory,
    RoutedTokens,
    SavePlanner,
    TokenDispatcher,
    TokenLoad,
    TorchtitanDispatcher,
    VirtualTokenDispatcher,
    adapt_fsdp,
    bind,
    empty_cache,
    explain,
    generate_permute_indices,
    install,
    installed,
    is_installed,
    ordered_redistribute_local_tensor,
    plan,
    plan_batch,
    pool_memory,
    prepare,
    record,
    redistribute,
    redistribute_batch,
    redistribute_cost,
    redistribute_local_tensor,
    restore_fsdp,
    set_pool_limit,
    share_of_tokens,
    silu_and_mul,
    simulate,
    stats,
    uninstall,
    whole_of_shares,
)

if TYPE_CHECKING:
    from shardweave.runtime.moe.token_switch import TokenSwitch as TokenSwitch
else:

    def __getattr__(name: str) -> Any:
        """Return TokenSwitch. Not in `__all__`, since torch has its interface from 2.15 on."""
        if name != "TokenSwitch":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from shardweave.runtime.moe.token_switch import TokenSwitch
        except ImportError as error:
            if error.name != "torch.distributed._token_switch":
                raise
            import torch

            raise AttributeError(
                f"TokenSwitch: torch is {torch.__version__}; allowed: 2.15 or newer, for {error.name}"
            ) from error
        return TokenSwitch


__version__ = "0.1.0"

__all__ = [
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "ArgumentError",
    "Batch",
    "CapacityError",
    "DisagreementError",
    "ExpertParallel",
    "FSDPAllGather",
    "FSDPReduceScatter",
    "Layout",
    "LayoutSyntaxError",
    "Link",
    "LoadPlanner",
    "MeetingTimeoutError",
    "Mesh",
    "Partial",
    "PoolMemory",
    "PeerError",
    "Program",
    "Replicate",
    "RoutedTokens",
    "SavePlanner",
    "Shard",
    "ShardweaveError",
    "StridedShard",
    "TokenDispatcher",
    "TokenLoad",
    "Topology",
    "TorchtitanDispatcher",
    "UnsupportedError",
    "VirtualTokenDispatcher",
    "TransportError",
    "adapt_fsdp",
    "bind",
    "draw",
    "empty_cache",
    "explain",
    "generate_permute_indices",
    "install",
    "installed",
    "is_installed",
    "ordered_redistribute_local_tensor",
    "plan",
    "plan_batch",
    "pool_memory",
    "record",
    "prepare",
    "redistribute",
    "redistribute_batch",
    "redistribute_cost",
    "redistribute_local_tensor",
    "restore_fsdp",
    "set_pool_limit",
    "share_of_tokens",
    "silu_and_mul",
    "simulate",
    "stats",
    "uninstall",
    "whole_of_shares",
]
