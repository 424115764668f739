"""shardweave: redistribution of sharded tensors by plan, with Triton kernels.

Imports are absolute here, and nothing is registered: test runners import this file once more under the name of its
folder.
"""

from shardweave.errors import (
    ArgumentError,
    DisagreementError,
    LayoutSyntaxError,
    MeetingTimeoutError,
    PeerError,
    ShardweaveError,
    UnsupportedError,
    WorldError,
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
    explain,
    install,
    installed,
    is_installed,
    ordered_redistribute_local_tensor,
    plan,
    plan_batch,
    redistribute,
    redistribute_batch,
    redistribute_cost,
    redistribute_local_tensor,
    simulate,
    stats,
    uninstall,
)

__version__ = "0.1.0"

__all__ = [
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "ArgumentError",
    "Batch",
    "DisagreementError",
    "Layout",
    "LayoutSyntaxError",
    "Link",
    "MeetingTimeoutError",
    "Mesh",
    "Partial",
    "PeerError",
    "Program",
    "Replicate",
    "Shard",
    "ShardweaveError",
    "StridedShard",
    "Topology",
    "UnsupportedError",
    "WorldError",
    "draw",
    "explain",
    "install",
    "installed",
    "is_installed",
    "ordered_redistribute_local_tensor",
    "plan",
    "plan_batch",
    "redistribute",
    "redistribute_batch",
    "redistribute_cost",
    "redistribute_local_tensor",
    "simulate",
    "stats",
    "uninstall",
]
