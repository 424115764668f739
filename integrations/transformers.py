"""Expert parallelism for MoE models of Transformers."""

from __future__ import annotations

from shardweave.runtime.integrations.transformers import experts_forward, shard_experts

__all__ = ["experts_forward", "shard_experts"]
