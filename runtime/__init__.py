"""Carries programs out: worlds, the executor, the DTensor drop-in."""

from .checkpoints import LoadPlanner, SavePlanner
from .drop_in import redistribute_local_tensor
from .dtensor import bind, explain, redistribute
from .dtensor_batches import redistribute_batch
from .expert_parallel import ExpertParallel
from .fsdp import FSDPAllGather, FSDPReduceScatter, adapt_fsdp, restore_fsdp
from .in_process import InProcessWorld
from .install import install, installed, is_installed, uninstall
from .ordered_local import ordered_redistribute_local_tensor
from .permute_indices import generate_permute_indices
from .planning import plan, plan_batch, redistribute_cost
from .pool_limit import PoolMemory, empty_cache, pool_memory, set_pool_limit
from .preparing import prepare
from .recorder import record
from .routed_tokens import RoutedTokens, TokenLoad
from .simulate import simulate
from .statistics import Statistics, stats
from .token_activation import silu_and_mul
from .token_dispatcher import TokenDispatcher
from .token_shares import share_of_tokens, whole_of_shares
from .torchtitan_dispatcher import TorchtitanDispatcher
from .virtual_dispatcher import VirtualTokenDispatcher

__all__ = [
    "ExpertParallel",
    "FSDPAllGather",
    "FSDPReduceScatter",
    "InProcessWorld",
    "LoadPlanner",
    "PoolMemory",
    "RoutedTokens",
    "SavePlanner",
    "Statistics",
    "TokenDispatcher",
    "TokenLoad",
    "TorchtitanDispatcher",
    "VirtualTokenDispatcher",
    "adapt_fsdp",
    "bind",
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
