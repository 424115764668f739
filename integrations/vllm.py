"""Token dispatch for fused MoE kernels of vLLM."""

from __future__ import annotations

from shardweave.runtime.integrations.vllm import VLLMPrepareFinalize

__all__ = ["VLLMPrepareFinalize"]
