"""A transformer like DeepSeek-V3, with latent attention and mixtures of experts, and its placement on a mesh of data,
expert and tensor parallelism.

For recording on fake tensors, which hold no ids: so routing is balanced, and each rank sends as many tokens to every
rank. The exchange of tokens is no redistribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .transformer import FEED_FORWARD, OUTSIDE, Block, FeedForward, Transformer, rotated


@dataclass(frozen=True)
class DeepSeekSizes:
    """Of a model; without arguments DeepSeek-V3's own, without its prediction of several tokens."""

    blocks: int = 61
    dense_blocks: int = 3
    width: int = 7168
    heads: int = 128
    query_rank: int = 1536
    key_value_rank: int = 512
    plain_head: int = 128
    rotary_head: int = 64
    value_head: int = 128
    hidden: int = 18432
    experts: int = 256
    expert_hidden: int = 2048
    top_k: int = 8
    vocabulary: int = 129280
    rope_base: float = 10_000.0


class LatentAttention(nn.Module):
    """Causal attention whose queries, keys and values are projected from narrow vectors. These are computed where the
    sequence is sharded, so that narrow tensors are gathered."""

    def __init__(self, sizes: DeepSeekSizes) -> None:
        super().__init__()
        self.sizes = sizes
        head = sizes.plain_head + sizes.rotary_head
        self.wq_a = nn.Linear(sizes.width, sizes.query_rank, bias=False)
        self.q_norm = nn.RMSNorm(sizes.query_rank)
        self.wq_b = nn.Linear(sizes.query_rank, sizes.heads * head, bias=False)
        self.wkv_a = nn.Linear(sizes.width, sizes.key_value_rank + sizes.rotary_head, bias=False)
        self.kv_norm = nn.RMSNorm(sizes.key_value_rank)
        self.wkv_b = nn.Linear(sizes.key_value_rank, sizes.heads * (sizes.plain_head + sizes.value_head), bias=False)
        self.whole = nn.Identity()  # where the sequence is gathered
        self.wo = nn.Linear(sizes.heads * sizes.value_head, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        s = self.sizes
        latent, rotary = self.wkv_a(x).split([s.key_value_rank, s.rotary_head], dim=-1)
        q = _heads(self.wq_b(self.q_norm(self.wq_a(x))), s.plain_head + s.rotary_head)
        kv = _heads(self.wkv_b(self.kv_norm(latent)), s.plain_head + s.value_head)
        q_plain, q_rotary = q.split([s.plain_head, s.rotary_head], dim=-1)
        k_plain, v = kv.split([s.plain_head, s.value_head], dim=-1)
        k_rotary = rotated(_local(self.whole(rotary)).unsqueeze(1), angles)  # [B, 1, T, rotary], of all heads
        q = torch.cat((q_plain, rotated(q_rotary, angles)), dim=-1)
        k = torch.cat((k_plain, k_rotary.expand(-1, k_plain.shape[1], -1, -1)), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class BalancedExperts(nn.Module):
    """A SwiGLU for each expert, on the tokens that balanced routing sends it."""

    def __init__(self, sizes: DeepSeekSizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.group: dist.ProcessGroup | None = None
        self.w1 = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.expert_hidden))
        self.w2 = nn.Parameter(torch.empty(sizes.experts, sizes.expert_hidden, sizes.width))
        self.w3 = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.expert_hidden))

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, T, width], a part of a sum over tensor parallelism, of x [B, T, width] and scores [B, T, experts]."""
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        weights = _local(scores).topk(self.top_k, dim=-1).values.softmax(-1)  # [B, T, K]
        rows = self._swapped(_local(x).flatten(0, 1).repeat_interleave(self.top_k, dim=0))
        groups = rows.view(len(w1), -1, rows.shape[1])  # [E of this rank, tokens of each, width]
        done = torch.bmm(F.silu(torch.bmm(groups, w1)) * torch.bmm(groups, w3), w2)
        rows = self._swapped(done.view_as(rows)).view(*weights.shape, -1)
        return (rows * weights.unsqueeze(-1)).sum(2)

    def _swapped(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.group is None else all_to_all_single_autograd(rows, None, None, self.group)


class Mixture(nn.Module):
    """Routed experts, and a shared one."""

    def __init__(self, sizes: DeepSeekSizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = BalancedExperts(sizes)
        self.shared = FeedForward(sizes.width, sizes.expert_hidden)
        self.whole, self.whole_scores = nn.Identity(), nn.Identity()
        self.summed = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, scores = self.whole(x), self.whole_scores(self.router(x))
        return self.summed(self.experts(whole, scores) + self.shared(whole))


def deep_seek(sizes: DeepSeekSizes) -> Transformer:
    """The first blocks have plain feed-forwards."""

    def block(number: int) -> Block:
        dense = number < sizes.dense_blocks
        feed_forward = FeedForward(sizes.width, sizes.hidden) if dense else Mixture(sizes)
        return Block(sizes.width, LatentAttention(sizes), feed_forward)

    blocks = map(block, range(sizes.blocks))
    return Transformer(sizes.vocabulary, sizes.width, blocks, sizes.rotary_head, sizes.rope_base)


def _heads(x: torch.Tensor, head: int) -> torch.Tensor:
    """[B, heads of this rank, T, head]"""
    return x.unflatten(-1, (-1, head)).transpose(1, 2)


def _local(x: torch.Tensor) -> torch.Tensor:
    """A tensor that is equal on all ranks along tp. Each computes a part with it, so its gradients are summed."""
    return x.to_local(grad_placements=(Partial(),)) if isinstance(x, DTensor) else x


_GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
_OF_SEQUENCES = ColwiseParallel(input_layouts=Shard(1))
_ATTENTION: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(),
    "attention.wq_a": SequenceParallel(),
    "attention.q_norm": SequenceParallel(),
    "attention.wq_b": _OF_SEQUENCES,
    "attention.wkv_a": SequenceParallel(),
    "attention.kv_norm": SequenceParallel(),
    "attention.wkv_b": _OF_SEQUENCES,
    "attention.whole": _GATHERED,
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
}
_MIXTURE: dict[str, ParallelStyle] = {
    "feed_forward_norm": SequenceParallel(),
    "feed_forward.router": SequenceParallel(),
    "feed_forward.whole": _GATHERED,
    "feed_forward.whole_scores": _GATHERED,
    "feed_forward.shared.w1": ColwiseParallel(),
    "feed_forward.shared.w2": RowwiseParallel(output_layouts=Partial()),
    "feed_forward.shared.w3": ColwiseParallel(),
    "feed_forward.summed": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(1)),
}


def share(
    model: Transformer,
    data: DeviceMesh,
    expert_data: DeviceMesh,
    experts: DeviceMesh,
    tensor: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Place a model, whose parameters are on "meta", on a mesh.

    Args:
        data, expert_data: what FSDP2 shards all parameters over, and those of experts; replicas along the first of two.
        experts: of expert and tensor parallelism; each rank along the first has a part of the experts.
        tensor: of heads, columns and the vocabulary, and of the sequence between them.
    """
    parallelize_module(model, tensor, OUTSIDE)
    for block in model.blocks:
        mixture = block.feed_forward if isinstance(block.feed_forward, Mixture) else None
        parallelize_module(block, tensor, _ATTENTION | (_MIXTURE if mixture else FEED_FORWARD))
        if mixture:
            cuts: dict[str, list[Placement]] = {"w1": [Shard(0), Shard(2)], "w2": [Shard(0), Shard(1)]}
            for name, weight in list(mixture.experts.named_parameters()):
                placed = distribute_tensor(weight, experts, cuts["w2" if name == "w2" else "w1"])
                mixture.experts.register_parameter(name, nn.Parameter(placed))
            mixture.experts.group = experts.get_group(0)
            sharded = fully_shard(mixture.experts, mesh=expert_data, mp_policy=policy)
            sharded.set_gradient_divide_factor(data.size())
        fully_shard(block, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)
