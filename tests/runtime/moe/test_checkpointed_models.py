"""Token dispatch in regions of selective activation checkpointing, on ranks in processes, and in torchtitan's model."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from rank_processes import end_ranks, run_ranks
from test_token_modes import REGIONS, Log, policies, region
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import shardweave

E, K, H, T = 4, 2, 16, 24
DTYPE = torch.bfloat16
EXAMPLE = Path(__file__).parents[3] / "examples" / "torchtitan_training.py"


SETTINGS: list[dict[str, Any]] = [{}, {"save": "copy"}, {"save": "redispatch"}, {"quantize": "fp8_row"}]


def trained(settings: dict[str, Any], phases: bool, policy: str | None) -> list[torch.Tensor]:
    """Results and gradients of two layers in some steps, whose lengths shrink; on rank 1 to none."""
    rank, found = dist.get_rank(), []
    d = shardweave.TokenDispatcher(
        **with_options(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=DTYPE, **settings)
    )
    matrix = (torch.arange(H * H).view(H, H) % 7 - 3).to(DTYPE) / 8

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = d.dispatch_start(x, ids, weights).finish() if phases else d.dispatch(x, ids, weights)
        with routed.kept():
            output = torch.mm(routed.x if routed.scale is None else routed.dequantized(), matrix).tanh()
        return d.combine_start(output, routed, add=x).finish() if phases else d.combine(output, routed, add=x)

    for step, length in enumerate((T, T, T - 7, 0 if rank == 1 else 5)):
        x, ids, weights = given_of(2 * step + rank, length)
        y = x
        for _ in range(2):
            if policy is None:
                y = layer(y, ids, weights)
            else:
                y = region(policy, early_stop=step % 2 == 0)(layer, y, ids, weights)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, weights.grad]
    return found


def checkpointed_layers(rank: int) -> None:
    for settings in SETTINGS:
        phases = settings.get("save") == "copy"
        want = trained(settings, phases, None)
        for policy in REGIONS:
            for i, (a, b) in enumerate(zip(trained(settings, phases, policy), want, strict=True)):
                assert torch.equal(a, b), (settings, policy, i)


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical", "symmetric_memory"])
def test_gradients_of_checkpointed_layers_are_those_without(transport: str) -> None:
    environment = {"SHARDWEAVE_TRANSPORT": transport, "SHARDWEAVE_NODE_SIZE": "2" * (transport == "hierarchical")}
    run_ranks(checkpointed_layers, 4 if transport == "hierarchical" else 2, environment=environment)


def given_of(seed: int, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(tokens, H, generator=g), torch.rand(tokens, K, generator=g)
    return x.to(DTYPE).requires_grad_(), torch.randint(0, E, (tokens, K), generator=g), weights.requires_grad_()


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
        with create_selective_checkpoint_contexts(policies()[policy])[0]:
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

    region("exchanges" if rank else "nothing")(layer, x).sum().backward()


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
        "--override.imports", "shardweave.runtime.integrations.torchtitan.token_dispatcher",
    ]  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", ran.stdout, re.MULTILINE)
    assert len(steps) == 3 and all(a == b for _, a, b in steps), ran.stdout
