"""Token dispatch for MoE layers of Megatron-core."""

from __future__ import annotations

from shardweave.runtime.integrations.megatron import MegatronDispatcher, use_megatron_dispatchers

__all__ = ["MegatronDispatcher", "use_megatron_dispatchers"]
