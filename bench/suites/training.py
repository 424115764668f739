"""`python -m shardweave.bench.suites.training`: a small transformer trained by stock DTensor and under
`shardweave.install()`, on 4 ranks.

Both models are built from one seed, read the same text and live in the same ranks; they take turns step by step, so
that a noisy machine favours neither. After the requested steps come as many again, which are timed; all losses are
compared before a time is shown.

Gathers are exact; activations are summed along tp, gradients along dp. With two ranks along each mesh dim a sum has two
terms, and a + b is b + a to the bit, so losses and parameters have to be bitwise equal. On both sides gloo sums the
norms of gradients over both mesh dims, in a placement that `install()` leaves to torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardweave

from ...errors import ArgumentError
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines
from ..harness.ranks import RanksFailed, Send, messages_of
from ..workloads.transformer import Sizes, Transformer, build

RANKS, DP, TP = 4, 2, 2
SIDES = ("torch", "shardweave")
STEPS = 30
LEAST_STEPS = 2  # for a median and quartiles
SEQUENCES = 4  # a step, for each rank along dp
LENGTH = 128
LEARNING_RATE = 3e-3
LARGEST_NORM = 1.0  # of all gradients together
_ROWS = 8  # steps or faults shown


def text() -> torch.Tensor:
    """The bytes that are learnt, as int64."""
    data = (Path(__file__).parents[1] / "workloads" / "text" / "founding.txt").read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch(data: torch.Tensor, step: int, replica: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, [SEQUENCES, LENGTH] each: others at every step and replica along dp."""
    generator = torch.Generator().manual_seed(step * replicas + replica)
    starts = torch.randint(len(data) - LENGTH, (SEQUENCES,), generator=generator)
    windows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


class Trainer:
    """A model with its optimizer.

    Args:
        finish: what happens to gradients before the optimizer uses them.
    """

    def __init__(self, model: Transformer, finish: Callable[[Transformer], object], **options: Any) -> None:
        self.model, self._finish = model, finish
        self._optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step(self, tokens: torch.Tensor, following: torch.Tensor) -> float:
        """One step; the loss of these sequences."""
        loss = self.model(tokens, following)
        loss.backward()
        self._finish(self.model)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends a message a step, then one about parameters and redistributions."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    models = {side: build(Sizes(), mesh, seed=0) for side in SIDES}
    shardweave.fsdp.adapt_fsdp(models["shardweave"])  # FSDP2's gathers and reduce-scatters never call redistribute

    def clip(model: Transformer) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)

    trainers, data = {side: Trainer(models[side], clip, lr=LEARNING_RATE, fused=True) for side in SIDES}, text()
    for step in range(2 * config["steps"]):
        if step == config["steps"]:
            shardweave.stats().reset()
        sequences, results = batch(data, step, mesh["dp"].get_local_rank(), DP), {}
        for side in (SIDES, SIDES[::-1])[step % 2]:
            dist.barrier()
            start = time.perf_counter()
            with shardweave.installed() if side == "shardweave" else nullcontext():
                loss = trainers[side].step(*sequences)
            results[side] = {"loss": loss, "seconds": time.perf_counter() - start}
        send(results)
    pairs = zip(*(models[side].parameters() for side in SIDES), strict=True)
    send(
        {
            "parameters_equal": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),
            "parameters": sum(p.numel() for p in models["torch"].parameters()),
            "calls": dict(shardweave.stats().calls),
            "delegations": dict(shardweave.stats().delegations),
        }
    )


def outcome_of(by_rank: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The results of all ranks; `faults` lists differences. Seconds are those of the slowest rank, in the second
    half."""
    *steps, last = zip(*by_rank, strict=True)
    losses = {side: [[rank[side]["loss"] for rank in step] for step in steps] for side in SIDES}
    seconds = {side: [max(rank[side]["seconds"] for rank in step) for step in steps[len(steps) // 2 :]]
               for side in SIDES}  # fmt: skip
    faults = [
        f"step {step}, rank {rank}: loss {b!r}, torch's is {a!r}"
        for step, (theirs, ours) in enumerate(zip(*losses.values(), strict=True), 1)
        for rank, (a, b) in enumerate(zip(theirs, ours, strict=True))
        if a != b  # so that a NaN is a fault
    ]
    if not all(rank["parameters_equal"] for rank in last):
        faults.append("the parameters after the last step differ")
    return {
        "steps": len(steps) // 2,
        "losses": {side: [statistics.fmean(step) for step in losses[side]] for side in SIDES},  # over all sequences
        "faults": faults,
        "step_seconds": seconds,
        "ratio": statistics.median(seconds["torch"]) / statistics.median(seconds["shardweave"]),
        **{name: last[0][name] for name in ("parameters", "calls", "delegations")},
    }


def show(outcome: dict[str, Any]) -> None:
    """Losses and, if they are equal, times."""
    sizes, steps = Sizes(), outcome["steps"]
    print(
        f"{RANKS} ranks on {os.cpu_count()} cores, mesh dp{DP} tp{TP}, torch {torch.__version__}, one thread each.\n"
        f"{sizes.blocks} blocks of width {sizes.width} with {sizes.heads} heads, {outcome['parameters'] / 1e6:.2f} "
        f"million float32 parameters; {DP * SEQUENCES} sequences of {LENGTH} bytes a step.\n"
    )
    theirs, ours = (outcome["losses"][side] for side in SIDES)
    print(f"{'step':>6}  {'loss, torch':>16}  {'loss, shardweave':>16}  difference")
    for step in sorted({round(row * (steps - 1) / (_ROWS - 1)) for row in range(_ROWS)}):
        a, b = theirs[step], ours[step]
        print(f"{step + 1:>6}  {a:>16.7f}  {b:>16.7f}  {a - b:.1e}")
    print()
    if outcome["faults"]:
        print(f"The sides differ ({len(outcome['faults'])} faults), so no times are shown:")
        print("\n".join(f"  {fault}" for fault in outcome["faults"][:_ROWS]))
        return
    print(f"Losses of {2 * steps} steps on every rank, and all parameters after them, are equal to the bit: a sum "
          "has 2 terms at most, and a + b is b + a.")  # fmt: skip
    print(f"\nA step, median of {steps} further ones of the slowest rank (quartiles), both sides in turns:")
    middle = {}
    for side in SIDES:
        quartiles = statistics.quantiles(outcome["step_seconds"][side], n=4, method="inclusive")
        low, middle[side], high = (value * 1e3 for value in quartiles)
        print(f"  {side:<10} {middle[side]:.0f} ms ({low:.0f} to {high:.0f})")
    print(f"  ratio {outcome['ratio']:.2f}, {middle['torch'] - middle['shardweave']:.0f} ms saved")
    print("\nRedistributions a step, and FSDP2's gathers and reduce-scatters, on rank 0:")
    for transport, count in outcome["calls"].items():
        print(f"  {count / steps:g} by shardweave, on {transport}")
    for reason, count in outcome["delegations"].items():
        print(f"  {count / steps:g} left to torch: {reason.partition(';')[0]}")


def run(steps: int) -> dict[str, Any]:
    """
    Raises:
        ArgumentError: too few steps.
        RanksFailed: a rank died.
    """
    if steps < LEAST_STEPS:
        raise ArgumentError(f"--steps: {steps}; allowed: {LEAST_STEPS} or more")
    return outcome_of(messages_of(rank_main, RANKS, {"steps": steps}))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and print; returns the exit status: 2 for a bad argument, 1 for faults or lost ranks."""
    parser = argparse.ArgumentParser(
        prog="shardweave.bench.suites.training",
        description="Train by stock DTensor and under shardweave, side by side.",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="and as many again, timed (default: %(default)s)")
    try:
        outcome = run(parser.parse_args(argv).steps)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RanksFailed as failure:
        print(f"error: the training ends: {failure}", file=sys.stderr)
        return 1
    print("\n".join(provenance_lines(provenance())) + "\n")
    show(outcome)
    return int(bool(outcome["faults"]))


if __name__ == "__main__":
    sys.exit(main())
