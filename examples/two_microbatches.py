"""Two microbatches of a mixture of experts with shared experts: one computes while the tokens of the other travel.

    torchrun --standalone --nproc-per-node 4 examples/two_microbatches.py

`dispatch_start` and `combine_start` return at once, and `finish` waits. The same steps of training run with and without
overlap, in turns; their losses are equal to the bit. Prints the median times of forward and of a step. Rows travel by
torch.distributed (`--transport process_group`), as between machines; overlap saves time where ranks wait for a link.
Ranks that share memory copy rows with the same cores that compute, so there is little to overlap.

With `--device cuda`, ranks use NCCL, or `--transport symmetric_memory`: rows travel on a stream of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.profiler import record_function

import shardweave

EXPERTS, TOP_K = 8, 2


class Block(nn.Module):
    """Shared experts, which all tokens pass, and routed experts, of which each rank has its part."""

    def __init__(self, hidden: int, width: int, tokens: int, device: torch.device, transport: Any) -> None:
        super().__init__()
        self.dispatcher = shardweave.TokenDispatcher(
            num_experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=tokens, dtype=torch.float32, device=device,
            transport=transport,
        )  # fmt: skip
        bounds, rank = self.dispatcher.config.bounds, dist.get_rank()
        mine = bounds[rank + 1] - bounds[rank]
        g = torch.Generator().manual_seed(0)  # on all ranks alike, then on each its own
        self.router = nn.Parameter(torch.randn(hidden, EXPERTS, generator=g) / hidden**0.5)
        self.shared_up = nn.Parameter(torch.randn(hidden, width, generator=g) / hidden**0.5)
        self.shared_down = nn.Parameter(torch.randn(width, hidden, generator=g) / width**0.5)
        g = torch.Generator().manual_seed(1 + rank)
        self.up = nn.Parameter(torch.randn(mine, hidden, width, generator=g) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(mine, width, hidden, generator=g) / width**0.5)
        self.to(device)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with record_function("router"):
            weights, ids = (x @ self.router).softmax(-1).topk(TOP_K)
            return x, ids, weights

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("shared experts"):
            return x + functional.silu(x @ self.shared_up) @ self.shared_down

    def experts(self, routed: shardweave.moe.RoutedTokens) -> torch.Tensor:
        """Apply each group's expert to its rows. Rows past the last group are not initialised, and not read."""
        with record_function("experts"):
            hidden = functional.silu(torch._grouped_mm(routed.x, self.up, offs=routed.offsets))
            return torch._grouped_mm(hidden, self.down, offs=routed.offsets)


def in_turn(blocks: list[Block], microbatches: list[torch.Tensor]) -> list[torch.Tensor]:
    """One microbatch after the other, each step after the one before; those of a microbatch in the order in which
    `overlapped` has them, so that autograd adds up gradients in the same order."""
    done = []
    for x in microbatches:
        for block in blocks:
            tokens, shared = block.route(x), block.shared(x)
            routed = block.dispatcher.dispatch(*tokens)
            x = block.dispatcher.combine(block.experts(routed), routed, add=shared)
        done.append(x)
    return done


def overlapped(blocks: list[Block], microbatches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two microbatches: while rows of one travel, the other's experts compute, and its own shared experts."""
    a, b = microbatches
    combining: Any = None  # of b, in the block before
    for block in blocks:
        d = block.dispatcher
        dispatching_a = d.dispatch_start(*block.route(a))
        shared_a = block.shared(a)
        if combining is not None:
            b = combining.finish()
        dispatching_b = d.dispatch_start(*block.route(b))
        routed = dispatching_a.finish()
        combining_a = d.combine_start(block.experts(routed), routed, add=shared_a)
        shared_b = block.shared(b)
        routed = dispatching_b.finish()
        output = block.experts(routed)
        a = combining_a.finish()
        combining = d.combine_start(output, routed, add=shared_b)
    return [a, combining.finish()]


def train(options: argparse.Namespace, profiled: Any = None) -> dict[str, Any]:
    """Take turns with and without overlap from equal weights; return losses and seconds of each, in order of steps.

    Args:
        profiled: a context for `options.profiles` more forwards of each, called with its name.
    """
    device = torch.device(options.device)
    forwards = {"in turn": in_turn, "overlapped": overlapped}
    models: dict[str, list[Block]] = {}
    optimizers = {}
    for name in forwards:
        sizes = options.hidden, options.width, options.tokens, device, options.transport
        models[name] = [Block(*sizes) for _ in range(options.layers)]
        optimizers[name] = torch.optim.SGD([p for block in models[name] for p in block.parameters()], lr=0.01)
    g = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(4, options.tokens, options.hidden, generator=g).to(device)
    microbatches, targets = list(data[:2]), list(data[2:])
    losses: dict[str, list[float]] = {name: [] for name in forwards}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forwards}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(options.steps + 1):  # the first one connects ranks
        for name in forwards if step % 2 else reversed(forwards):
            optimizers[name].zero_grad()
            dist.barrier()
            start = now()
            ys = forwards[name](models[name], microbatches)
            middle = now()
            each = [functional.mse_loss(y, target) for y, target in zip(ys, targets, strict=True)]
            for loss in each:
                loss.backward()
            optimizers[name].step()
            dist.barrier()
            losses[name].append(sum(loss.item() for loss in each))
            if step:
                seconds[name].append((middle - start, now() - start))
    for model in models.values():
        for block in model:
            block.dispatcher.check()
    for name in list(forwards) * options.profiles if profiled is not None else []:
        dist.barrier()
        with profiled(name), torch.no_grad():
            forwards[name](models[name], microbatches)
    return {"losses": losses, "seconds": seconds}


def medians(seconds: list[tuple[float, float]]) -> tuple[float, float]:
    """The median milliseconds of forward and of a step."""
    forward, step = (statistics.median(of) * 1e3 for of in zip(*seconds, strict=True))
    return forward, step


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, number in (("tokens", 64), ("hidden", 64), ("width", 128), ("layers", 2), ("steps", 4), ("profiles", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--transport", default="process_group")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    with nullcontext() if options.device == "cpu" else torch.device("cuda"):
        found = train(options)
    losses = found["losses"]
    assert losses["in turn"] == losses["overlapped"], losses  # to the bit
    if dist.get_rank() == 0:
        print(f"losses of {options.steps + 1} steps equal to the bit, the last {losses['in turn'][-1]:.6f}")
        for name, of_steps in found["seconds"].items():
            forward, step = medians(of_steps)
            print(f"{name}: forward {forward:.1f} ms, a step {step:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
