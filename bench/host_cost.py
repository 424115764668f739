"""`python -m shardweave.bench.host_cost OTHER_CHECKOUT`: what cached calls and cold plans cost the host, in this
checkout and in another one.

The checkouts run in turns, each time in new processes that import `shardweave` from a folder with a link to the
checkout. Ranks share memory and are forked, so that two of them on one core share what it has learnt of their code.
Only public names are used, so that the other checkout may be an earlier commit without this file. A ratio over 1 means
that this checkout takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardweave

RUNS, RANKS = 5, 2
CALLS, BATCHES, PLANS = 100, 20, 100
SIDE = 64  # of the redistributed matrices, float32
TOKENS, HIDDEN, EXPERTS, TOP_K = 16, 1024, 8, 2
KINDS: dict[str, tuple[Placement, Placement]] = {
    "all-gather, S0 → R": (Shard(0), Replicate()),
    "all-to-all, S0 → S1": (Shard(0), Shard(1)),
    "reduce-scatter, P → S0": (Partial(), Shard(0)),
    "all-reduce, P → R": (Partial(), Replicate()),
}


def microseconds(call: Callable[[], object]) -> float:
    """The median of batches of cached calls."""
    times = []
    for _ in range(BATCHES + 1):
        began = perf_counter()
        for _ in range(CALLS):
            call()
        times.append((perf_counter() - began) / CALLS * 1e6)
    return median(times[1:])


def plan_microseconds() -> float:
    """The median of plans of different sizes, of which none is cached."""
    mesh, times = shardweave.Mesh((2, 4)), []
    for i in range(PLANS):
        began = perf_counter()
        shardweave.plan(mesh, (1024 + 8 * i, 768), "float32", "S0 S1", "S1 S0")
        times.append((perf_counter() - began) * 1e6)
    return median(times)


def rank_main(rank: int, folder: str) -> None:
    """Measure cached calls as one of the ranks, and write the figures to a file of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh, found = init_device_mesh("cpu", (RANKS,)), dict[str, float]()
    for kind, (source, target) in KINDS.items():
        local = torch.ones(SIDE // RANKS if isinstance(source, Shard) else SIDE, SIDE)
        x = DTensor.from_local(local, mesh, [source], run_check=False)
        found[kind] = microseconds(partial(shardweave.redistribute, x, [target], transport="shared_memory"))
    dispatcher = shardweave.TokenDispatcher(
        mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, dtype=torch.float32,
        transport="shared_memory",
    )  # fmt: skip
    tokens, ids = torch.ones(TOKENS, HIDDEN), torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS
    weights = torch.full((TOKENS, TOP_K), 0.5)
    found[f"token dispatch, T {TOKENS}"] = microseconds(lambda: dispatcher.dispatch(tokens, ids, weights))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict[str, float]:
    """The figures of the checkout that this process has imported; of ranks, those of the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [get_context("fork").Process(target=rank_main, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        by_rank = [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    found = {name: max(of_rank[name] for of_rank in by_rank) for name in by_rank[0]}
    return found | {"plan(), cold": plan_microseconds()}


def measured_of(checkout: Path) -> dict[str, float]:
    """Run this file in new processes that import `shardweave` from a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shardweave").symlink_to(checkout, target_is_directory=True)
        command = [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[1])['print_measured']()", __file__]
        run = subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, cwd=folder, stdout=subprocess.PIPE)
    if run.returncode:
        raise SystemExit(f"the measurement of {checkout} failed")
    imported, found = json.loads(run.stdout.splitlines()[-1])
    if Path(imported) != checkout:
        raise SystemExit(f"{imported} was measured instead of {checkout}")
    return found


def print_measured() -> None:
    print(json.dumps([str(Path(shardweave.__file__).resolve().parent), measure()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="the root of another clone or worktree")
    other = parser.parse_args().other.resolve()
    if not (other / "planner").is_dir():
        parser.error(f"OTHER_CHECKOUT: {str(other)!r} is no checkout of shardweave; allowed: the root of one")
    this, runs = Path(__file__).resolve().parents[1], list[tuple[dict[str, float], dict[str, float]]]()
    for _ in range(RUNS):
        runs.append((measured_of(this), measured_of(other)))
    print(f"Microseconds, medians of {RUNS} runs; {RANKS} ranks, float32.\n")
    print(f"{'':28} {'this':>10} {'other':>10} {'ratio':>8}")
    for name in runs[0][0]:
        ours, theirs = (median(run[name] for run in of_checkout) for of_checkout in zip(*runs, strict=True))
        print(f"{name:28} {ours:10.1f} {theirs:10.1f} {ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
