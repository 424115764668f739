"""The cost of zeroing rows that hold no token: a layer's dispatch and combine, with `zero_rows` and without, by the
size of its buffers, timed in turns on the same ranks.

    python -m shardweave.bench.suites.token_zeroing

Experts do nothing, and tokens go to experts drawn evenly: about max_tokens * top_k rows of each buffer hold a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardweave.bench.harness.interleaved import slowest, time_sides
from shardweave.bench.harness.ranks import Send, run_ranks
from shardweave.runtime.moe.dispatcher import TokenDispatcher

EXPERTS, TOP_K = 32, 4
CAPACITIES = (1.25, 1.5, 2.0, None)
ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    options = vars(parser.parse_args())
    print(f"{options}, top {TOP_K} of {EXPERTS} experts, float32; zeroed over not zeroed, medians of {ROUNDS} rounds")
    print("| transport | capacity | forward | forward and backward |\n|---|---|---|---|")
    run_ranks(rank_main, options["ranks"], options, show)


def show(case: str, by_rank: list[dict[str, Any]]) -> None:
    seconds = [rank["seconds"] for rank in by_rank]
    ratios = []
    for passes in ("forward", "both"):
        zeroed, plain = (median(slowest(seconds, f"{passes}, {zero}")) for zero in (True, False))
        ratios.append(f"{zeroed / plain:.2f} ({plain * 1e3:.1f} ms)")
    print(f"| {case} | {' | '.join(ratios)} |", flush=True)


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]
    tokens, hidden = config["tokens"], config["hidden"]
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=g).requires_grad_()
    ids = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    weights, gradient = torch.rand(tokens, TOP_K, generator=g).requires_grad_(), torch.randn(tokens, hidden)

    def layer(dispatcher: TokenDispatcher, backward: bool) -> Any:
        with torch.set_grad_enabled(backward):
            routed = dispatcher.dispatch(x, ids, weights)
            y = dispatcher.combine(routed.x, routed)
        return torch.autograd.grad(y, (x, weights), gradient) if backward else y

    for transport in ("shared_memory", "process_group"):
        for capacity in CAPACITIES:
            sides: dict[str, Callable[[], Any]] = {}
            for zero in (True, False):
                dispatcher = TokenDispatcher(
                    mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=tokens, dtype=torch.float32,
                    capacity=capacity, overflow="drop", zero_rows=zero, transport=transport,
                )  # fmt: skip
                for passes in ("forward", "both"):
                    sides[f"{passes}, {zero}"] = partial(layer, dispatcher, passes == "both")
            worst = f"worst case ({float(size)})" if capacity is None else str(capacity)
            send({"case": f"{transport} | {worst}", "seconds": time_sides(sides, ROUNDS)})


if __name__ == "__main__":
    main()
