"""`python -m shardweave.bench.suites.training`: a small transformer trained by stock DTensor and under
`shardweave.install()`.

Both models are built from one seed, read the same text and live in the same ranks; they take turns step by step, so
that a noisy machine favours neither. After the steps asked for come as many again, which are timed; the losses of all
are compared before a time is shown.

What has to be equal. The passes gather, which is exact, and add up: activations along tp, gradients along dp. With two
ranks along a mesh dim a sum has two terms, and a + b is b + a to the bit, so losses and parameters have to be bitwise
equal. With more, gloo's ring begins each part of a tensor at another rank and shardweave adds in ascending order of
ranks, so float32 sums differ in their last bits and training carries that on: the losses have to agree within
`TOLERANCE`. On both sides gloo adds up the gradients' norms, over both mesh dims: they are of a placement that
`install()` leaves to torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardweave

from ...errors import ArgumentError
from ..baselines.stock_dtensor import mesh_for
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines
from ..harness.ranks import RanksFailed, Send, messages_of
from ..harness.writable import check_writable
from ..workloads.transformer import Sizes, Transformer, build

SIDES = ("torch", "shardweave")
STEPS = 30
LEAST_STEPS = 2  # a median and quartiles want two
SEQUENCES = 4  # a step, for each rank along dp
LENGTH = 128
LEARNING_RATE = 3e-3
LARGEST_NORM = 1.0  # of all gradients together
# Of a loss, where sums have more than two terms. 60 steps of 8 ranks, tp4, came to 2.3e-7, about two float32
# roundings; the rest is room for other meshes and machines.
TOLERANCE = 1e-5
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
    """A side: its model, its optimizer, and whether shardweave is installed while it steps."""

    def __init__(self, model: Transformer, installed: bool) -> None:
        self.model, self.installed = model, installed
        if installed:
            shardweave.adapt_fsdp(model)  # FSDP2's gathers and reduce-scatters never call redistribute
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, tokens: torch.Tensor, following: torch.Tensor) -> dict[str, float]:
        """The loss of this rank's sequences, and the seconds of a whole step on this rank."""
        dist.barrier()
        start = time.perf_counter()
        with shardweave.installed() if self.installed else nullcontext():
            loss = self.model(tokens, following)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return {"loss": loss.item(), "seconds": time.perf_counter() - start}


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends a message a step, then one about parameters and redistributions."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    mesh = init_device_mesh("cpu", mesh_for(size), mesh_dim_names=("dp", "tp"))
    trainers = {side: Trainer(build(Sizes(), mesh, seed=0), side == "shardweave") for side in SIDES}
    data = text()
    for step in range(2 * config["steps"]):
        if step == config["steps"]:
            shardweave.stats().reset()
        given = batch(data, step, mesh["dp"].get_local_rank(), mesh["dp"].size())
        # Each side goes first in every other step.
        send({side: trainers[side].step(*given) for side in (SIDES, SIDES[::-1])[step % 2]})
    pairs = zip(*(trainers[side].model.parameters() for side in SIDES), strict=True)
    counted = shardweave.stats()
    send(
        {
            "parameters_equal": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),
            "parameters": sum(p.numel() for p in trainers["torch"].model.parameters()),
            "calls": dict(counted.calls),
            "delegations": dict(counted.delegations),
        }
    )


def outcome_of(by_rank: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What the ranks' messages come to; `faults` has what is not as the head of this file says it has to be. Seconds
    are those of the slowest rank, in the second half."""
    *steps, last = zip(*by_rank, strict=True)
    mesh, half = mesh_for(len(by_rank)), len(steps) // 2
    losses = {side: [[found[side]["loss"] for found in step] for step in steps] for side in SIDES}
    seconds = {side: [max(found[side]["seconds"] for found in step) for step in steps[half:]] for side in SIDES}
    pairs = list(zip(*(chain.from_iterable(losses[side]) for side in SIDES), strict=True))
    exact, equal = max(mesh) <= 2, all(found["parameters_equal"] for found in last)
    return {
        "mesh": mesh,
        "steps": half,
        "losses": {side: [statistics.fmean(step) for step in losses[side]] for side in SIDES},  # over all sequences
        "exact": exact,
        "largest_difference": max(abs(a - b) / abs(a) for a, b in pairs),  # of a loss on a rank, in parts of torch's
        "parameters_equal": equal,
        "faults": _faults(losses, mesh[1], 0.0 if exact else TOLERANCE)
        + ["the parameters after the last step differ"] * (exact and not equal),
        "step_seconds": seconds,
        "ratio": statistics.median(seconds["torch"]) / statistics.median(seconds["shardweave"]),
        **{name: last[0][name] for name in ("parameters", "calls", "delegations")},
    }


def _faults(losses: dict[str, list[list[float]]], tp: int, bound: float) -> list[str]:
    found = []
    for step, (theirs, ours) in enumerate(zip(losses["torch"], losses["shardweave"], strict=True), 1):
        for rank, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if not abs(a - b) <= bound * abs(a):  # so that a NaN is a fault
                found.append(f"step {step}, rank {rank}: loss {b!r}, torch's is {a!r}")
            first = rank - rank % tp  # ranks along tp compute the same loss
            if b != ours[first]:
                found.append(f"step {step}: ranks {first} and {rank} have losses {ours[first]!r} and {b!r}")
    return found


def show(outcome: dict[str, Any]) -> None:
    """Losses, and where they are as they have to be, times."""
    sizes, (dp, tp), steps = Sizes(), outcome["mesh"], outcome["steps"]
    print(
        f"{dp * tp} ranks on {os.cpu_count()} cores, mesh dp{dp} tp{tp}, torch {torch.__version__}, one thread each.\n"
        f"{sizes.blocks} blocks of width {sizes.width} with {sizes.heads} heads, "
        f"{outcome['parameters'] / 1e6:.2f} million float32 parameters; "
        f"{dp * SEQUENCES} sequences of {LENGTH} bytes a step.\n"
    )
    show_losses({f"loss, {side}": losses[:steps] for side, losses in outcome["losses"].items()})
    if outcome["faults"]:
        print(f"The sides differ by more than they may ({len(outcome['faults'])} faults), so no times are shown:")
        print("\n".join(f"  {fault}" for fault in outcome["faults"][:_ROWS]))
        return
    if outcome["exact"]:
        print(f"Losses of {2 * steps} steps on every rank, and all parameters after them, are equal to the bit: a sum "
              f"has {max(dp, tp)} terms at most, and a + b is b + a.")  # fmt: skip
    else:
        print(f"Losses of {2 * steps} steps differ by {outcome['largest_difference']:.1e} of a loss at most, where "
              f"{TOLERANCE:g} is allowed: sums have up to {max(dp, tp)} terms, added in other orders.")  # fmt: skip
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


def show_losses(losses: dict[str, Sequence[float]]) -> None:
    """Some steps of two sides, the first and the last among them."""
    (first, a), (second, b) = losses.items()
    print(f"{'step':>6}  {first:>16}  {second:>16}  difference")
    for step in sorted({round(row * (len(a) - 1) / (_ROWS - 1)) for row in range(_ROWS)}):
        print(f"{step + 1:>6}  {a[step]:>16.7f}  {b[step]:>16.7f}  {a[step] - b[step]:.1e}")
    print()


def run_program(
    run: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], None], json_path: Path | None
) -> int:
    """Run, show where it was run and what was found, write the JSON; 2 for a bad argument, 1 for faults or ranks that
    were lost."""
    try:
        check_writable("--json", json_path)
        outcome = run()
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RanksFailed as failure:
        print(f"error: the training ends: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    about = provenance()
    print("\n".join(provenance_lines(about)) + "\n")
    show(outcome)
    if json_path is not None:
        json_path.write_text(json.dumps({**about, **outcome}, indent=1) + "\n", encoding="utf-8")
    return int(bool(outcome["faults"]))


def run(ranks: int, steps: int) -> dict[str, Any]:
    """
    Raises:
        ArgumentError: a number that does not fit.
        RanksFailed: a rank died.
    """
    heads = Sizes().heads
    if ranks < 2 or heads % mesh_for(ranks)[1]:
        allowed = ", ".join(str(n) for n in range(2, 17) if heads % mesh_for(n)[1] == 0)
        raise ArgumentError(f"--ranks: {ranks}; allowed: {allowed} and others whose mesh divides {heads} heads")
    if steps < LEAST_STEPS:
        raise ArgumentError(f"--steps: {steps}; allowed: {LEAST_STEPS} or more")
    return outcome_of(messages_of(rank_main, ranks, {"steps": steps}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="shardweave.bench.suites.training",
        description="Train by stock DTensor and under shardweave, side by side.",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="and as many again, timed (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    given = parser.parse_args(argv)
    return run_program(lambda: run(given.ranks, given.steps), show, given.json)


if __name__ == "__main__":
    sys.exit(main())
