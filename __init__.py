"""shardweave: planned redistribution of DTensors, and token dispatch for MoE, with Triton kernels.

Here is what most programs need. The rest is in modules of their own:

- `shardweave.moe`: token dispatch, expert parallelism and the balance of experts.
- `shardweave.fsdp`, `shardweave.checkpoint`: FSDP2 and distributed checkpoints.
- `shardweave.memory`, `shardweave.tracing`: pools of shared memory; traces and flight records.
- `shardweave.integrations`: autoparallel, spmd_types, torchtitan, torch's TokenSwitch, Megatron-core, vLLM and
  Transformers.
- `shardweave.errors`: every exception.

`checkpoint` and `integrations` have to be imported by name, since they import other packages.

Imports are absolute here and have no side effects, because pytest imports this file again under the name of its folder.
"""

from __future__ import annotations

from shardweave.errors import ShardweaveError
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
    from shardweave import fsdp, memory, moe, tracing
except (ImportError, AttributeError) as error:
    lacking = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    if not str(lacking).startswith("torch."):
        raise
    import torch

    raise ImportError(
        f"shardweave cannot be imported with torch {torch.__version__}, which lacks a name that it uses: {error}; "
        f"docs/versions.md lists the versions of torch that are supported"
    ) from error
from shardweave.moe import DispatchOptions, TokenDispatcher
from shardweave.runtime.dtensor.batch import redistribute_batch
from shardweave.runtime.dtensor.plan import plan, plan_batch, redistribute_cost
from shardweave.runtime.dtensor.prepare import prepare
from shardweave.runtime.dtensor.redistribute import explain, prepare_redistribute, redistribute
from shardweave.runtime.executor.simulate import simulate
from shardweave.runtime.install import install, installed, is_installed, uninstall
from shardweave.runtime.statistics import stats

__version__ = "0.1.0"

__all__ = [
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "Batch",
    "DispatchOptions",
    "Layout",
    "Link",
    "Mesh",
    "Partial",
    "Program",
    "Replicate",
    "Shard",
    "ShardweaveError",
    "StridedShard",
    "TokenDispatcher",
    "Topology",
    "draw",
    "explain",
    "fsdp",
    "install",
    "installed",
    "is_installed",
    "memory",
    "moe",
    "plan",
    "plan_batch",
    "prepare",
    "prepare_redistribute",
    "redistribute",
    "redistribute_batch",
    "redistribute_cost",
    "simulate",
    "stats",
    "tracing",
    "uninstall",
]
