"""Token dispatch and combine for mixtures of experts, expert parallelism in models, and the balance of experts."""

from __future__ import annotations

from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.moe.balance import BalancedExperts, balance_experts
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.move_experts import move_experts, sum_replicas
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.parallel_style import ExpertParallel
from shardweave.runtime.moe.pending import PendingTokens
from shardweave.runtime.moe.permute_indices import generate_permute_indices
from shardweave.runtime.moe.routed import RoutedTokens, TokenLoad
from shardweave.runtime.moe.shard_tokens import gather_tokens, shard_tokens
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

__all__ = [
    "BalancedExperts",
    "DispatchOptions",
    "ExpertParallel",
    "PendingTokens",
    "RoutedTokens",
    "TokenDispatcher",
    "TokenLoad",
    "VirtualTokenDispatcher",
    "balance_experts",
    "gather_tokens",
    "generate_permute_indices",
    "move_experts",
    "shard_tokens",
    "silu_and_mul",
    "sum_replicas",
]
