"""shard_experts on MoE blocks of transformers, against the same block on one rank, if transformers is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.runtime.moe.options import DispatchOptions

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
HIDDEN, EXPERTS = 16, 6


def hide_own_kernels() -> None:
    """Take this repository's root off the path: transformers imports a package named `kernels`, if there is one."""
    root = Path(__file__).parents[3]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


def blocks() -> dict[str, nn.Module]:
    hide_own_kernels()
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    mixtral = MixtralConfig(hidden_size=HIDDEN, intermediate_size=24, num_local_experts=EXPERTS, num_experts_per_tok=2)
    qwen = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=12, num_experts=EXPERTS, num_experts_per_tok=3)
    made = {"mixtral": MixtralSparseMoeBlock(mixtral), "qwen3_moe": Qwen3MoeSparseMoeBlock(qwen)}
    for block in made.values():
        g = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
    return made


def step(block: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(20 + rank)
    x = torch.randn(2, 3 + rank, HIDDEN, generator=g).requires_grad_()
    y = block(x)
    y.backward(torch.randn(y.shape, generator=g))
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def as_on_one_rank(rank: int, implementation: str) -> None:
    hide_own_kernels()
    from shardweave.runtime.integrations.transformers import shard_experts

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    for name, block in blocks().items():
        block.experts.config._experts_implementation = implementation
        wanted = [step(blocks()[name], r) for r in range(size)]
        (dispatcher,) = shard_experts(block, mesh, max_tokens=16)
        assert block.experts.token_dispatcher is dispatcher and dispatcher.config.zero_rows
        assert all(isinstance(p, DTensor) for p in block.experts.parameters())
        for again in range(2):
            block.zero_grad()
            got = step(block, rank)
            for key, want in wanted[rank].items():
                if "experts" in key:
                    want = sum(w[key] for w in wanted)
                    result = got[key].full_tensor()
                else:
                    result = got[key]
                torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                x = torch.randn(1, again, HIDDEN)
                assert block(x).shape == x.shape  # a rank may have no tokens
        dispatcher.check()


@needs_transformers
@pytest.mark.multi
@pytest.mark.parametrize("size, implementation", [(1, "eager"), (2, "batched_mm"), (4, "eager"), (4, "grouped_mm")])
def test_blocks_as_on_one_rank(size, implementation):
    run_ranks(as_on_one_rank, size, implementation)


def refused(rank: int) -> None:
    hide_own_kernels()
    from shardweave.runtime.integrations.transformers import IMPLEMENTATION, shard_experts

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    with pytest.raises(ArgumentError, match="model: Linear without experts of transformers' experts interface"):
        shard_experts(nn.Linear(2, 2), mesh, max_tokens=4)
    block = blocks()["mixtral"]
    block.experts.config._experts_implementation = IMPLEMENTATION
    with pytest.raises((UnsupportedError, KeyError), match="shardweave"):
        block(torch.zeros(1, 1, HIDDEN))
    block.experts.config._experts_implementation = "eager"
    with pytest.raises(ArgumentError, match="quantize: 'mxfp8'; allowed here: None, since the model's experts"):
        shard_experts(block, mesh, max_tokens=4, options=DispatchOptions(quantize="mxfp8"))
    shard_experts(block, mesh, max_tokens=4)
    with pytest.raises(UnsupportedError, match="that are DTensors; allowed: experts that are not sharded"):
        shard_experts(block, mesh, max_tokens=4)
    with pytest.raises(ArgumentError, match="max_tokens, 4"):
        block(torch.zeros(1, 5, HIDDEN))
    other = blocks()["mixtral"]
    other.experts.config._experts_implementation = IMPLEMENTATION
    with pytest.raises(UnsupportedError, match="MixtralExperts is not sharded; call shard_experts first"):
        other(torch.zeros(1, 1, HIDDEN))
    wide = blocks()["mixtral"]
    wide.experts.num_experts = EXPERTS + 1
    with pytest.raises(UnsupportedError, match="allowed: the 7 experts along dim 0 of each"):
        shard_experts(wide, mesh, max_tokens=4)


@needs_transformers
@pytest.mark.multi
def test_refused_arguments():
    run_ranks(refused, 1)
