"""A transformer of DTensors with data and tensor parallelism, compiled in one graph: its loss, its gradients, and what
selective checkpointing saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import run_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardweave

pytestmark = pytest.mark.multi
R, S0, S1 = Replicate(), Shard(0), Shard(1)
BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 4, 7, 8, 4, 10
SHAPES = {
    "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH), "wo": (WIDTH, WIDTH),
    "w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH),
}  # fmt: skip
"""Of a block's weights. "wo" and "w2" are sharded by rows along tp, the others by columns."""


def redistributed(x: torch.Tensor, *placements: Placement) -> torch.Tensor:
    """Of a DTensor; the dense reference has plain tensors."""
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """On local tensors, rows of the batch and heads: torch takes minutes to find a sharding of the operator."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        local = x.to_local() if isinstance(x, DTensor) else x
        return local.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False) if isinstance(q, DTensor) else out


class Block(nn.Module):
    """Weights are sharded along dp too, and gathered for use. Activations [B, T, width] are sharded by batch and by
    sequence, between layers."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        w, whole = self.gathered("wq", "wk", "wv", "wo"), redistributed(x, S0, R)
        y = attention(whole @ w["wq"], whole @ w["wk"], whole @ w["wv"])
        return x + redistributed(y @ w["wo"], S0, S1)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        w, whole = self.gathered("w1", "w2"), redistributed(x, S0, R)
        return x + redistributed(F.silu(whole @ w["w1"]) @ w["w2"], S0, S1)

    def gathered(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: redistributed(self.get_parameter(name), R, S0 if name in ("wo", "w2") else S1) for name in names}


def weights(block: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(block)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / WIDTH for name, shape in SHAPES.items()
    }


def activations() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def blocks_on(mesh: DeviceMesh) -> list[Block]:
    def place(name: str, weight: torch.Tensor) -> DTensor:
        return distribute_tensor(weight, mesh, (S0, S0 if name in ("wo", "w2") else S1), src_data_rank=None)

    return [Block({name: place(name, weight) for name, weight in weights(number).items()}) for number in (0, 1)]


def loss_of(blocks: list[Block], x: torch.Tensor, keep: CheckpointPolicy | None = None) -> torch.Tensor:
    """`keep` says what checkpointing of feed-forwards does with the results of collectives; None: no checkpointing."""
    for block in blocks:
        x = block.attend(x)
        if keep is None:
            x = block.feed_forward(x)
        else:
            contexts = partial(create_selective_checkpoint_contexts, partial(policy, keep))
            x = checkpoint(block.feed_forward, x, use_reentrant=False, context_fn=contexts)
    loss = (x * x).sum()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def policy(keep: CheckpointPolicy, _: Any, function: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    name = str(function)
    return keep if name.startswith("_c10d_functional.") else CheckpointPolicy.PREFER_RECOMPUTE


def collectives(graph: torch.fx.GraphModule) -> int:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sum(name.startswith("_c10d_functional.") and "wait_tensor" not in name for name in names)


def compiled_with_counts(function: Callable[..., torch.Tensor]) -> tuple[Callable[..., torch.Tensor], list[int]]:
    """A compiled function, and the numbers of collectives of its forward and its backward graph."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        counts.append(collectives(graph))
        return torch._dynamo.disable(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True), counts


def gradients(blocks: list[Block]) -> list[torch.Tensor]:
    """Whole; the parameters have none afterwards."""
    found = []
    for block in blocks:
        for parameter in block.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad)
            parameter.grad = None
    return found


def trained(rank: int, inductor: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dense = [Block(weights(number)) for number in (0, 1)]
    expected = loss_of(dense, activations())
    expected.backward()
    dense_gradients = gradients(dense)
    shardweave.install()
    blocks = blocks_on(mesh)
    x = distribute_tensor(activations(), mesh, (S0, S1), src_data_rank=None)

    def check(loss: torch.Tensor) -> None:
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        loss.backward()
        for got, want in zip(gradients(blocks), dense_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    if inductor:
        check(torch.compile(partial(loss_of, blocks), fullgraph=True)(x))
        return
    of_policy: dict[CheckpointPolicy | None, list[int]] = {}
    for keep in (None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        compiled, of_policy[keep] = compiled_with_counts(partial(loss_of, blocks, keep=keep))
        check(compiled(x))
    assert of_policy[None] == of_policy[CheckpointPolicy.MUST_SAVE]  # [forward, backward]
    forward, backward = of_policy[None]
    recomputed = of_policy[CheckpointPolicy.PREFER_RECOMPUTE][1] - backward
    assert of_policy[CheckpointPolicy.PREFER_RECOMPUTE][0] == forward and recomputed > 0
    assert not shardweave.stats().delegations
    dist.barrier()


def test_loss_gradients_and_checkpointing() -> None:
    run_ranks(trained, 4, False)


@pytest.mark.long
def test_compiled_by_inductor() -> None:
    run_ranks(trained, 4, True, timeout=600)
