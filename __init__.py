"""shardweave: planned redistribution of DTensors, and token dispatch for MoE, with Triton kernels.

Imports are absolute here and have no side effects, because pytest imports this file again under the name of its folder.
"""

from __future__ import annotations

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

try:
    from shardweave import runtime
except (ImportError, AttributeError) as error:
    lacking = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    if not str(lacking).startswith("torch."):
        raise
    import torch

    raise ImportError(
        f"shardweave cannot be imported with torch {torch.__version__}, which lacks a name that it uses: {error}; "
        f"docs/versions.md lists the versions of torch that are supported"
    ) from error
from shardweave.runtime import (
    BalancedExperts,
    DispatchOptions,
    ExpertParallel,
    FSDPAllGather,
    FSDPReduceScatter,
    PendingTokens,
    PoolMemory,
    RoutedTokens,
    TokenDispatcher,
    TokenLoad,
    VirtualTokenDispatcher,
    adapt_fsdp,
    balance_experts,
    dump_flight_records,
    empty_cache,
    explain,
    generate_permute_indices,
    install,
    installed,
    is_installed,
    move_experts,
    ordered_redistribute_local_tensor,
    plan,
    plan_batch,
    pool_memory,
    prepare,
    prepare_redistribute,
    record,
    redistribute,
    redistribute_batch,
    redistribute_cost,
    redistribute_local_tensor,
    redistribute_spmd,
    restore_fsdp,
    set_pool_limit,
    share_of_tokens,
    silu_and_mul,
    simulate,
    stats,
    sum_replicas,
    uninstall,
    whole_of_shares,
)

if TYPE_CHECKING:
    from shardweave.runtime import LoadPlanner, SavePlanner, TorchtitanDispatcher, checkpointable_tensor
    from shardweave.runtime import TokenSwitch as TokenSwitch
else:

    def __getattr__(name: str) -> Any:
        """Return what the runtime imports when it is first used."""
        if name in runtime.IMPORTED_ON_USE:
            return getattr(runtime, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "ArgumentError",
    "BalancedExperts",
    "Batch",
    "CapacityError",
    "DisagreementError",
    "DispatchOptions",
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
    "PendingTokens",
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
    "balance_experts",
    "checkpointable_tensor",
    "draw",
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
