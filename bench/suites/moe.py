"""`python -m shardweave.bench.suites.moe`: a small mixture-of-experts transformer, its experts shared out to the ranks.

All ranks train one model, its mixtures under ExpertParallel and data-parallel otherwise, each on its own sequences of
the text; rank 0 also trains the same model alone on all of them, in plain torch, and the losses are compared. With
`--fsdp 2` experts are shared out to so many groups of ranks alike, and FSDP2 shards them once more over the groups, and
all else over all ranks; its collectives are shardweave's.

What has to be equal. Both compute in float32 the same products and sum them in other orders: a token's experts, the
tokens of a weight's gradient, the ranks of an averaged one. Losses therefore differ by float32 roundings, which
training carries on, and now and then a router's near tie falls otherwise and moves one token. So losses have to agree
within `TOLERANCE`, of a loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardweave

from ...errors import ArgumentError
from ..harness.ranks import Send, messages_of
from ..workloads.moe_model import Experts, ExpertSizes, build_moe, shard_fully, share_experts
from ..workloads.transformer import Sizes
from .training import LENGTH, SEQUENCES, batch, run_program, show_losses, text

STEPS = 30
LEARNING_RATE = 1e-3
# Of a loss. 30 steps of 4 ranks come to 1e-7 (bench/results/moe.md), a float32 rounding; the rest is room for near
# ties, each of which moves one of thousands of tokens from one expert to another that its router scores alike.
TOLERANCE = 1e-4
SIZES, EXPERT_SIZES = Sizes(blocks=2), ExpertSizes()
_ROWS = 8  # steps shown


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends a message a step, rank 0's with the loss of one process; then one about the dispatcher."""
    fsdp = config["fsdp"]
    mesh = init_device_mesh("cpu", (fsdp, size // fsdp), mesh_dim_names=("fsdp", "ep"))
    model = build_moe(SIZES, EXPERT_SIZES, seed=0)
    share_experts(model, mesh["ep"], EXPERT_SIZES, SEQUENCES * LENGTH)
    if fsdp > 1:
        shard_fully(model, mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    alone = build_moe(SIZES, EXPERT_SIZES, seed=0) if rank == 0 else None
    alone_optimizer = None if alone is None else torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE)
    data = text()
    for step in range(config["steps"]):
        parts = [batch(data, step, replica, size) for replica in range(size)]
        loss = model(*parts[rank])
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            # The loss is the mean of the ranks' losses, which FSDP makes. An expert's gradient has all ranks' tokens in
            # it already.
            if fsdp > 1:
                continue
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        found = {"loss": loss.item()}
        if alone is not None and alone_optimizer is not None:
            whole = alone(*(torch.cat(halves) for halves in zip(*parts, strict=True)))
            whole.backward()
            alone_optimizer.step()
            alone_optimizer.zero_grad()
            found["alone"] = whole.item()
        send(found)
    dispatchers: list[Any] = [m.token_dispatcher for m in model.modules() if isinstance(m, Experts)]
    for dispatcher in dispatchers:
        dispatcher.check()
    weight: Any = next(m for m in model.modules() if isinstance(m, Experts)).w1
    send(
        {
            "explain": dispatchers[0].explain(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "placements": str(weight.placements),
            "calls": dict(shardweave.stats().calls),
            "delegations": dict(shardweave.stats().delegations),
        }
    )


def outcome_of(by_rank: list[list[dict[str, Any]]], fsdp: int) -> dict[str, Any]:
    """What the ranks' messages come to; `faults` has what is not as the head of this file says it has to be."""
    *steps, last = zip(*by_rank, strict=True)
    ours = [statistics.fmean(found["loss"] for found in step) for step in steps]
    alone = [step[0]["alone"] for step in steps]
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, alone, strict=True)]
    return {
        "ranks": len(by_rank),
        "mesh": f"fsdp{fsdp} ep{len(by_rank) // fsdp}",
        "steps": len(steps),
        "losses": {"ranks": ours, "one process": alone},
        "largest_difference": max(differences),
        "tolerance": TOLERANCE,
        # Written so that nan is a fault.
        "faults": [
            f"step {step + 1}: loss {ours[step]:.7f} of the ranks, {alone[step]:.7f} of one process"
            for step, difference in enumerate(differences)
            if not difference <= TOLERANCE
        ],
        **{name: last[0][name] for name in ("parameters", "placements", "calls", "delegations")},
        "explain": last[0]["explain"],
    }


def show(outcome: dict[str, Any]) -> None:
    ours, alone = outcome["losses"].values()
    print(
        f"{outcome['ranks']} ranks on {os.cpu_count()} cores, {outcome['mesh']}, torch {torch.__version__}, one thread "
        f"each.\n{SIZES.blocks} blocks of width {SIZES.width}, {EXPERT_SIZES.experts} experts of hidden "
        f"{EXPERT_SIZES.hidden} in each, top {EXPERT_SIZES.top_k}; {outcome['parameters'] / 1e6:.2f} million float32 "
        f"parameters; {outcome['ranks'] * SEQUENCES} sequences of {LENGTH} bytes a step.\n"
    )
    print(outcome["explain"])
    print(
        f"\nExperts are placed as {outcome['placements']}. Calls of rank 0 by transport: {outcome['calls']}; ", end=""
    )
    print(f"left to torch: {outcome['delegations'] or 'none'}.")
    print()
    show_losses({"loss, ranks": ours, "one process": alone})
    print(f"Losses differ by {outcome['largest_difference']:.1e} of a loss at most; allowed: {TOLERANCE:g}.")
    for fault in outcome["faults"][:_ROWS]:
        print(f"  fault: {fault}")


def run(ranks: int, steps: int, fsdp: int) -> dict[str, Any]:
    """
    Raises:
        ArgumentError: a number that does not fit.
        RanksFailed: a rank died.
    """
    if not 2 <= ranks <= 64:
        raise ArgumentError(f"--ranks: {ranks}; allowed: 2 to 64")
    if steps < 1:
        raise ArgumentError(f"--steps: {steps}; allowed: 1 or more")
    if fsdp < 1 or ranks % fsdp:
        raise ArgumentError(f"--fsdp: {fsdp}; allowed: divisors of {ranks} ranks")
    return outcome_of(messages_of(rank_main, ranks, {"steps": steps, "fsdp": fsdp}), fsdp)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="shardweave.bench.suites.moe", description="Train a mixture of experts by token dispatch, and alone."
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default: %(default)s)")
    parser.add_argument(
        "--fsdp", type=int, default=1, help="groups that experts are sharded over (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    given = parser.parse_args(argv)
    return run_program(lambda: run(given.ranks, given.steps, given.fsdp), show, given.json)


if __name__ == "__main__":
    sys.exit(main())
