"""Distributed checkpoints of DTensors of any layout, for torch.distributed.checkpoint."""

from __future__ import annotations

from shardweave.runtime.dtensor.distributed_checkpoint import LoadPlanner, SavePlanner, checkpointable_tensor

__all__ = ["LoadPlanner", "SavePlanner", "checkpointable_tensor"]
