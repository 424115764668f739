"""`python -m shardweave.bench.suites.moe`: a small mixture-of-experts transformer, its experts sharded over 4 ranks.

All ranks train one model, its mixtures under ExpertParallel and data-parallel otherwise, each on its own sequences of
the text; rank 0 also trains the same model alone on all of them, in plain torch, and the losses are compared. With
`--fsdp 2` there are two groups of ranks, each with all experts, and FSDP2 shards the experts once more over the groups
and everything else over all ranks; its collectives are shardweave's.

Both compute the same products in float32 and sum them in other orders: a token's experts, the tokens of a weight's
gradient, the ranks of an averaged one. So losses differ by float32 roundings, which training carries on, and
occasionally a near tie in a router moves one token. Losses have to agree within `TOLERANCE`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...errors import ArgumentError
from ...runtime.dtensor.fsdp import adapt_fsdp
from ...runtime.moe.parallel_style import ExpertParallel
from ..harness.ranks import Send, messages_of
from ..workloads.transformer import Sizes, Transformer
from .training import LENGTH, RANKS, SEQUENCES, Trainer, batch, counted, run_program, show_losses, show_setting, text

STEPS = 30
LEARNING_RATE = 1e-3
# Of a loss. 30 steps of 4 ranks come to 1e-7 (bench/results/moe.md), a float32 rounding; the rest is room for near
# ties, each of which moves one of thousands of tokens from one expert to another that its router scores alike.
TOLERANCE = 1e-4
_ROWS = 8  # faults shown


@dataclass(frozen=True)
class ExpertSizes:
    """Of each mixture."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 96


class Experts(nn.Module):
    """A SwiGLU for each expert."""

    def __init__(self, width: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, width))
        self.w2 = nn.Parameter(torch.empty(sizes.experts, width, sizes.hidden))
        self.w3 = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[R, width] of x [R, width], whose group e ends at row offsets[e]; rows past the last group are undefined."""
        # In float32, for the comparison with one process; on a GPU: three calls of torch._grouped_mm in bfloat16.
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        done = [
            F.linear(F.silu(F.linear(group, w1)) * F.linear(group, w3), w2)
            for group, w1, w2, w3 in zip(groups, *weights, strict=True)
        ]
        return torch.cat([*done, torch.empty_like(rest)])


class MixtureOfExperts(nn.Module):
    """Each token by the `top_k` experts that its router scores highest, weighted by softmax over those scores. On
    one process it is plain torch, the reference for a sharded one."""

    def __init__(self, width: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(width, sizes.experts, bias=False)
        self.experts = Experts(width, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)  # [T, width]
        scores, ids = self.router(tokens).topk(self.top_k, dim=-1)
        weights = scores.softmax(-1)  # [T, K]
        done = self.experts if isinstance(self.experts.w1, DTensor) else self._alone
        return done(tokens, ids, weights).view_as(x)

    def _alone(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        offsets = ids.flatten().bincount(minlength=len(self.experts.w1)).cumsum(0)
        rows = self.experts(tokens[order // self.top_k], offsets)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, rows * weights.flatten()[order, None])


def build_moe(sizes: Sizes, expert_sizes: ExpertSizes, seed: int) -> Transformer:
    """The model of a seed, all experts on this process."""
    torch.manual_seed(seed)
    model = Transformer(sizes)
    for block in model.blocks:
        block.feed_forward = MixtureOfExperts(sizes.width, expert_sizes)
    return model


def share_experts(model: Transformer, mesh: DeviceMesh, sizes: ExpertSizes, max_tokens: int) -> None:
    """Shard the experts of every block over a 1-D mesh; a collective."""
    style = ExpertParallel(top_k=sizes.top_k, hidden=model.sizes.width, max_tokens=max_tokens, dtype=torch.float32)
    parallelize_module(model, mesh, {"blocks.*.feed_forward.experts": style})


def shard_fully(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over a 1-D mesh for experts that are shared out beside it, over all ranks for the rest; a collective.

    Gradients are those of the mean of all ranks' losses. FSDP's own collectives become shardweave's.
    """
    size = dist.get_world_size()
    whole = init_device_mesh(mesh.device_type, (size,))
    for block in model.blocks:
        mixture: Any = block.feed_forward
        experts = fully_shard(mixture.experts, mesh=mesh)
        experts.set_gradient_divide_factor(size)
        fully_shard(block, mesh=whole)
    fully_shard(model, mesh=whole)
    adapt_fsdp(model)


SIZES, EXPERT_SIZES = Sizes(blocks=2), ExpertSizes()


def average_gradients(model: Transformer) -> None:
    """The loss is the mean of the ranks' losses. An expert's gradient contains the tokens of all ranks already."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends a message a step, rank 0's with the loss of one process; then one about the dispatcher."""
    fsdp = config["fsdp"]
    mesh = init_device_mesh("cpu", (fsdp, size // fsdp), mesh_dim_names=("fsdp", "ep"))
    model = build_moe(SIZES, EXPERT_SIZES, seed=0)
    share_experts(model, mesh["ep"], EXPERT_SIZES, SEQUENCES * LENGTH)
    if fsdp > 1:
        shard_fully(model, mesh["fsdp"])  # which averages gradients itself
    ours = Trainer(model, average_gradients if fsdp == 1 else lambda model: None, lr=LEARNING_RATE)
    alone = Trainer(build_moe(SIZES, EXPERT_SIZES, 0), lambda model: None, lr=LEARNING_RATE) if rank == 0 else None
    data = text()
    for step in range(config["steps"]):
        parts = [batch(data, step, replica, size) for replica in range(size)]
        losses = {"loss": ours.step(*parts[rank])}
        if alone is not None:
            losses["alone"] = alone.step(*(torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True)))
        send(losses)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    dispatchers: list[Any] = [module.token_dispatcher for module in experts]
    for dispatcher in dispatchers:
        dispatcher.check()
    weight: Any = experts[0].w1
    send(
        {
            "explain": dispatchers[0].explain(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "placements": str(weight.placements),
            **counted(),
        }
    )


def outcome_of(by_rank: list[list[dict[str, Any]]], fsdp: int) -> dict[str, Any]:
    """The results of all ranks; `faults` lists losses that differ by more than `TOLERANCE`."""
    *steps, last = zip(*by_rank, strict=True)
    ours = [statistics.fmean(rank["loss"] for rank in step) for step in steps]
    alone = [step[0]["alone"] for step in steps]
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, alone, strict=True)]
    return {
        "mesh": f"fsdp{fsdp} ep{len(by_rank) // fsdp}",
        "steps": len(steps),
        "losses": {"ranks": ours, "one process": alone},
        "largest_difference": max(differences),
        "tolerance": TOLERANCE,
        "faults": [
            f"step {step + 1}: loss {ours[step]:.7f} of the ranks, {alone[step]:.7f} of one process"
            for step, difference in enumerate(differences)
            if not difference <= TOLERANCE  # so that a NaN is a fault
        ],
        **{name: last[0][name] for name in ("parameters", "placements", "calls", "delegations", "explain")},
    }


def show(outcome: dict[str, Any]) -> None:
    ours, alone = outcome["losses"].values()
    experts = f"{EXPERT_SIZES.experts} experts of hidden {EXPERT_SIZES.hidden} in each, top {EXPERT_SIZES.top_k};"
    blocks = f"{SIZES.blocks} blocks of width {SIZES.width}, {experts}"
    show_setting(outcome, outcome["mesh"], blocks, RANKS)
    print(outcome["explain"])
    print(f"\nExperts are placed as {outcome['placements']}. Calls of rank 0 by transport: {outcome['calls']}; left to "
          f"torch: {outcome['delegations'] or 'none'}.\n")  # fmt: skip
    show_losses({"loss, ranks": ours, "one process": alone})
    print(f"Losses differ by {outcome['largest_difference']:.1e} of a loss at most; allowed: {TOLERANCE:g}.")
    for fault in outcome["faults"][:_ROWS]:
        print(f"  fault: {fault}")


def run(steps: int, fsdp: int) -> dict[str, Any]:
    """
    Raises:
        ArgumentError: a number that does not fit.
        RanksFailed: a rank died.
    """
    if steps < 1:
        raise ArgumentError(f"--steps: {steps}; allowed: 1 or more")
    if fsdp < 1 or RANKS % fsdp:
        raise ArgumentError(f"--fsdp: {fsdp}; allowed: divisors of {RANKS} ranks")
    return outcome_of(messages_of(rank_main, RANKS, {"steps": steps, "fsdp": fsdp}), fsdp)


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(
        run, show, argv, "moe", "Train a mixture of experts by token dispatch, and alone.",
        steps=(STEPS, "steps"), fsdp=(1, "groups that experts are sharded over"),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
