"""Models with token dispatch in regions of selective activation checkpointing: our own, and torchtitan's."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import end_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardweave
from shardweave.integrations.torchtitan import TorchtitanDispatcher

E, K, H, T, LAYERS = 4, 2, 16, 24, 3
DTYPE = torch.bfloat16
aten: Any = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
EXAMPLE = Path(__file__).parents[3] / "examples" / "torchtitan_training.py"


class MoE(nn.Module):
    """Experts behind a TokenDispatcher, ExpertParallel or TorchtitanDispatcher, which its first forward makes."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.settings = kind, settings
        self.router = nn.Linear(H, E, bias=False, dtype=DTYPE)
        world = dist.get_world_size()
        self.experts = Experts(E if kind == "parallel" else E // world)
        self.dispatcher: Any = None
        if kind == "parallel":
            style = shardweave.moe.ExpertParallel(top_k=K, hidden=H, max_tokens=T, dtype=DTYPE, **settings)
            parallelize_module(self, init_device_mesh("cpu", (world,)), {"experts": style})
        if kind == "torchtitan":
            config = TorchtitanDispatcher.Config(num_experts=E, top_k=K, num_max_tokens_per_rank=T)
            self.dispatcher = config.build()
            self.dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(K)
        if self.kind == "parallel":
            return self.experts(x, ids, weights)
        if self.kind == "torchtitan":
            rows, counts, metadata = self.dispatcher.dispatch(x, weights, ids, torch.empty(0))
            return self.dispatcher.combine(self.experts(rows, counts.cumsum(0)), metadata, x)
        if self.dispatcher is None:
            sizes = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "dtype": DTYPE}
            self.dispatcher = shardweave.TokenDispatcher(**sizes, **self.settings)
        d = self.dispatcher
        phases = self.kind == "phases"
        routed = d.dispatch_start(x, ids, weights).finish() if phases else d.dispatch(x, ids, weights)
        with routed.kept():
            rows = routed.x if routed.scale is None else routed.dequantized()
            output = self.experts(rows, routed.offsets)
        return d.combine_start(output, routed).finish() if phases else d.combine(output, routed)


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, H, 2 * H).to(DTYPE) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * H, H).to(DTYPE) / 4)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if hasattr(p, "to_local") else p for p in (self.up, self.down))
        parts, at = [], 0
        for e, end in enumerate(offsets.tolist()):
            parts.append(torch.mm(F.silu(torch.mm(x[at:end], up[e])), down[e]))
            at = end
        return torch.cat([*parts, x.new_zeros(len(x) - at, H)])


class Block(nn.Module):
    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(H, dtype=DTYPE) for _ in range(2))
        self.qkv, self.out = nn.Linear(H, 3 * H, dtype=DTYPE), nn.Linear(H, H, dtype=DTYPE)
        self.moe = MoE(kind, settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x):
            q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, 2, H // 2).permute(1, 2, 0, 3)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(0, 1).reshape(len(x), H))
        return x + self.moe(self.norms[1](x))


def as_torchtitan() -> Callable[..., CheckpointPolicy]:
    """torchtitan's default: save exchanges, attention, top-k and every second matmul."""
    count = Counter[str]()
    saved = {ALL_TO_ALL, aten.topk.default, aten._scaled_dot_product_flash_attention_for_cpu.default}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        matmul = operator in (aten.mm.default, aten.addmm.default)
        count["matmuls"] += matmul
        saves = operator in saved or (matmul and count["matmuls"] % 2)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def saving(*operators: Any) -> Callable[..., Any]:
    return lambda: list(operators)


POLICIES: dict[str, Callable[[], Any]] = {
    "as torchtitan": as_torchtitan,
    "nothing": saving(),
    "exchanges": saving(ALL_TO_ALL),
    "matmuls": saving(aten.mm.default),
}


def trained(kind: str, settings: dict[str, Any], policy: str | None) -> list[torch.Tensor]:
    """Gradients of each of some steps, whose lengths shrink; on rank 1 to none."""
    torch.manual_seed(5)
    rank = dist.get_rank()
    blocks = nn.ModuleList(Block(kind, settings) for _ in range(LAYERS))
    found = []
    for step, length in enumerate((T, T, T - 7, 0 if rank == 1 else 5)):
        x = torch.randn(length, H, generator=torch.Generator().manual_seed(9 * step + rank)).to(DTYPE).requires_grad_()
        y = x
        for block in blocks:
            if policy is None:
                y = block(y)
            else:
                contexts = partial(create_selective_checkpoint_contexts, POLICIES[policy]())
                y = checkpoint(block, y, use_reentrant=False, context_fn=contexts, early_stop=step % 2 == 0)
        y.float().square().sum().backward()
        gradients = [p.grad for p in blocks.parameters() if p.grad is not None]
        gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        found += [y.detach(), x.grad, *(g.clone() for g in gradients)]
        with torch.no_grad():
            for p, g in zip((p for p in blocks.parameters() if p.grad is not None), gradients, strict=True):
                (p.to_local() if hasattr(p, "to_local") else p).sub_(g, alpha=0.01)
                p.grad = None
    return found


KINDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("one phase", {}, ("as torchtitan", "nothing", "matmuls")),
    ("phases", {"save": "copy"}, ("as torchtitan",)),
    ("one phase", {"save": "redispatch"}, ("as torchtitan", "nothing")),
    ("one phase", {"quantize": "fp8_row"}, ("as torchtitan",)),
    ("parallel", {}, ("as torchtitan",)),
    ("torchtitan", {}, ("as torchtitan", "nothing")),
]


def checkpointed_model(rank: int, kinds: int) -> None:
    for kind, settings, policies in KINDS[:kinds]:
        want = trained(kind, settings, None)
        for policy in policies:
            got = trained(kind, settings, policy)
            assert len(got) == len(want)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(a, b), (kind, settings, policy, i)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("size", "transport", "kinds"),
    [
        (2, "shared_memory", len(KINDS)),
        (2, "process_group", 2),
        (4, "hierarchical", 2),
        *(
            pytest.param(size, transport, len(KINDS), marks=pytest.mark.long)
            for size, transport in ((2, "process_group"), (4, "hierarchical"), (2, "symmetric_memory"))
        ),
    ],
    ids=str,
)
def test_gradients_of_a_checkpointed_model_are_those_without(size: int, transport: str, kinds: int) -> None:
    environment = {"SHARDWEAVE_TRANSPORT": transport} | ({"SHARDWEAVE_NODE_SIZE": "2"} if size == 4 else {})
    run_ranks(checkpointed_model, size, kinds, environment=environment, timeout=300)


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def given_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(T, H, generator=g), torch.rand(T, K, generator=g)
    return x.to(DTYPE).requires_grad_(), torch.randint(0, E, (T, K), generator=g), weights.requires_grad_()


def one_rank_logs(rank: int) -> None:
    """A mode on one rank only sees the operators, and its peers do not notice."""
    d = shardweave.TokenDispatcher(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=DTYPE)
    for phases in (False, True):
        results = []
        for logs in (False, True, True):
            x, ids, weights = given_of(rank)
            log = Log()
            if logs and rank == 0:
                log.__enter__()
            routed = d.dispatch_start(x, ids, weights).finish() if phases else d.dispatch(x, ids, weights)
            y = d.combine_start(routed.x, routed).finish() if phases else d.combine(routed.x, routed)
            y.backward(torch.ones_like(y))
            if logs and rank == 0:
                log.__exit__(None, None, None)
                names = [name for name in log.seen if name not in ("aten.ones_like.default", "aten.detach.default")]
                assert names == [
                    "shardweave.dispatch.default", "shardweave.combine.default",
                    "shardweave.combine_backward.default", "shardweave.dispatch_backward.default",
                ]  # fmt: skip
            results.append((y, x.grad, weights.grad))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def saved_copies(rank: int) -> None:
    """Rows that a policy saves are not in the memory that peers write."""
    large = 4096
    d = shardweave.TokenDispatcher(num_experts=E, top_k=1, hidden=large, max_tokens=T, dtype=DTYPE)
    x, ids, weights = torch.randn(T, large).to(DTYPE), torch.randint(0, E, (T, 1)), torch.rand(T, 1)
    held = {}
    for policy in ("nothing", "exchanges"):
        before = shardweave.memory.pool_memory().allocated
        with create_selective_checkpoint_contexts(POLICIES[policy]())[0]:
            routed = d.dispatch(x, ids, weights)
        held[policy] = shardweave.memory.pool_memory().allocated - before
        assert int(routed.num_rows) == int(routed.counts.sum())
        del routed
    assert held["nothing"] >= T * large * 2 > held["exchanges"]


@pytest.mark.multi
def test_ranks_of_one_group_and_modes() -> None:
    for transport in ("shared_memory", "process_group"):
        run_ranks(one_rank_logs, 2, environment={"SHARDWEAVE_TRANSPORT": transport})
    run_ranks(saved_copies, 2, environment={"SHARDWEAVE_TRANSPORT": "shared_memory"})


def policies_that_differ(rank: int) -> None:
    """One rank saves its dispatch and combine, the other communicates again: none waits for ever."""
    d = shardweave.TokenDispatcher(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=DTYPE)
    x, ids, weights = given_of(rank)

    def layer(x: torch.Tensor) -> torch.Tensor:
        routed = d.dispatch(x, ids, weights)
        return d.combine(routed.x.tanh(), routed).sin()

    contexts = partial(create_selective_checkpoint_contexts, POLICIES["exchanges" if rank else "nothing"]())
    checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum().backward()


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_policies_that_differ_between_ranks_raise(transport: str) -> None:
    ends = end_ranks(
        policies_that_differ, 2, environment={"SHARDWEAVE_TRANSPORT": transport, "SHARDWEAVE_TIMEOUT": "30"}
    )
    assert [end.error for end in ends] == ["DisagreementError"] * 2, [end.message for end in ends]


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed (pip install torchtitan==0.3.0)"
)
def test_torchtitans_debug_model_with_its_defaults() -> None:
    """deepseek_v3 with expert parallelism, and selective checkpointing, which is torchtitan's default."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    assert isinstance(deepseek_v3_debugmodel().activation_checkpoint, SelectiveAC.Config)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
        "--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel",
        "--parallelism.expert_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "1",
        "--training.disable_cuda_graphs", "--training.steps", "3",
        "--override.imports", "shardweave.integrations.torchtitan.token_dispatcher",
    ]  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", ran.stdout, re.MULTILINE)
    assert len(steps) == 3 and all(a == b for _, a, b in steps), ran.stdout
