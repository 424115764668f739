"""`python -m shardweave.bench.training`: a small transformer trained by stock DTensor and under `shardweave.install()`.

Both models are built from one seed, read the same text and live in the same ranks; they take turns step by step, so
that a noisy machine favours neither. After the steps asked for come as many again, which are timed; the losses of all
are compared before a time is shown. What has to be equal, and why, is said in `training_report.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

import shardweave

from ..errors import ArgumentError
from .against_stock import mesh_for
from .machine import provenance
from .markdown import provenance_lines
from .ranks import Ranks, RanksFailed, Send
from .training_report import SIDES, Outcome, show
from .transformer import Sizes, Transformer, build
from .writable import check_writable

STEPS = 30
LEAST_STEPS = 2  # a median and quartiles want two
SEQUENCES = 4  # a step, for each rank along dp
LENGTH = 128
LEARNING_RATE = 3e-3
LARGEST_NORM = 1.0  # of all gradients together
_PLAIN_WIDTH = 120


def text() -> torch.Tensor:
    """The bytes that are learnt, as int64."""
    data = (Path(__file__).parent / "text" / "founding.txt").read_bytes()
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

    def step(self, tokens: torch.Tensor, following: torch.Tensor) -> tuple[float, float]:
        """The loss of this rank's sequences, and the seconds of a whole step on this rank."""
        dist.barrier()
        start = time.perf_counter()
        with shardweave.installed() if self.installed else nullcontext():
            loss = self.model(tokens, following)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.item(), time.perf_counter() - start


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
        found = {side: trainers[side].step(*given) for side in (SIDES, SIDES[::-1])[step % 2]}
        send({side: {"loss": loss, "seconds": seconds} for side, (loss, seconds) in found.items()})
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


def run(ranks: int, steps: int, json_path: Path | None) -> int:
    """Train, show what was found, write the JSON; 1 if a rank died or the sides differ by more than they may.

    Raises:
        ArgumentError: a number that does not fit, a file that cannot be written.
    """
    heads = Sizes().heads
    if ranks < 2 or heads % mesh_for(ranks)[1]:
        allowed = ", ".join(str(n) for n in range(2, 17) if heads % mesh_for(n)[1] == 0)
        raise ArgumentError(f"--ranks: {ranks}; allowed: {allowed} and others whose mesh divides {heads} heads")
    if steps < LEAST_STEPS:
        raise ArgumentError(f"--steps: {steps}; allowed: {LEAST_STEPS} or more")
    check_writable("--json", json_path)
    by_rank: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]

    def output(rank: int, line: str) -> None:
        if line.strip() and not line.startswith("[Gloo]"):
            print(f"rank {rank}: {line}", file=sys.stderr)

    try:
        with Ranks(rank_main, ranks, {"steps": steps}) as children:
            children.supervise(lambda rank, found: by_rank[rank].append(found), output)
    except RanksFailed as failure:
        print(f"error: the training ends: {failure}", file=sys.stderr)
        return 1
    outcome = Outcome.of(by_rank)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    about = provenance()
    console.print("\n".join(provenance_lines(about)) + "\n", markup=False, soft_wrap=True)
    console.print(_heading(outcome))
    show(console, outcome)
    if json_path is not None:
        json_path.write_text(json.dumps({**about, **outcome.to_dict()}, indent=1) + "\n", encoding="utf-8")
    return int(bool(outcome.faults()))


def _heading(outcome: Outcome) -> str:
    sizes, (dp, tp) = Sizes(), outcome.mesh
    return (
        f"{dp * tp} ranks on {os.cpu_count()} cores, mesh dp{dp} tp{tp}, torch {torch.__version__}, one thread each.\n"
        f"{sizes.blocks} blocks of width {sizes.width} with {sizes.heads} heads, "
        f"{outcome.parameters / 1e6:.2f} million float32 parameters; "
        f"{dp * SEQUENCES} sequences of {LENGTH} bytes a step.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """2 for a bad argument, 1 for losses that differ or ranks that were lost."""
    parser = argparse.ArgumentParser(
        prog="shardweave.bench.training", description="Train by stock DTensor and under shardweave, side by side."
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="and as many again, timed (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments.ranks, arguments.steps, arguments.json)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
