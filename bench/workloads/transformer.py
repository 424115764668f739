"""A small Llama-like transformer, with bytes as tokens, and its placement on a mesh of data and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Sizes:
    """Of a model. Each rank along tp holds `heads / tp` heads. A token is a byte."""

    blocks: int = 4
    width: int = 128
    heads: int = 8
    hidden: int = 352
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions, over as many heads as this rank's weights have."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2)  # [B, heads/tp, T, head]
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a feed-forward, each between a norm and a residual sum."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.width)
        self.feed_forward: nn.Module = FeedForward(sizes.width, sizes.hidden)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """The mean cross-entropy, a scalar, of the tokens [B, T] that follow `tokens` [B, T]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        angles = angles_of(tokens.shape[1], sizes.width // sizes.heads)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.output(self.norm(x))  # [B, T, vocabulary], whole on every rank along tp
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def angles_of(length: int, head: int) -> torch.Tensor:
    """Rotary angles [T, head / 2]."""
    rates = 10_000.0 ** -(torch.arange(0, head, 2) / head)
    return torch.outer(torch.arange(length), rates)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def build(sizes: Sizes, mesh: DeviceMesh, seed: int) -> Transformer:
    """The model of a seed; a collective.

    Along `mesh["tp"]` heads, the SwiGLU's columns and the vocabulary are sharded, and activations between them by
    sequence; along `mesh["dp"]` every parameter is, by FSDP2.
    """
    torch.manual_seed(seed)
    model = Transformer(sizes)
    shard_tensors(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def shard_tensors(model: Transformer, tensor: DeviceMesh) -> None:
    """The tensor parallelism of `build` alone."""
    outside: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tensor, outside)
    whole_sequence = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    styles: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": whole_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, tensor, styles)
