"""FSDP2's all-gathers and reduce-scatters on shardweave."""

from __future__ import annotations

from shardweave.runtime.dtensor.fsdp import FSDPAllGather, FSDPReduceScatter, adapt_fsdp, restore_fsdp

__all__ = ["FSDPAllGather", "FSDPReduceScatter", "adapt_fsdp", "restore_fsdp"]
