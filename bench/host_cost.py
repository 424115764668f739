"""What a redistribution costs the host: stock DTensor on a process group that moves nothing, beside shardweave on a
world that moves nothing.

`python -m shardweave.bench.host_cost` times `DTensor.redistribute` of small tensors, cached, both sides in turns. The
fake process group returns at once and sums nothing; on the null world nobody is met, nothing is written to peers and
nothing that they would have sent is summed. What is left is the host's: specs, dispatch, plans looked up, buffers made,
and the copies that stay on the rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardweave
from shardweave.runtime import calls, drop_in
from shardweave.runtime.copies import Copies, Reduction
from shardweave.runtime.meeting import Meet
from shardweave.runtime.one_sided import OneSidedStep

RANKS = 4
ROUNDS, CALLS = 15, 400
KINDS: tuple[tuple[str, tuple[int, ...], Placement, Placement], ...] = (
    ("R → S0", (64, 64), Replicate(), Shard(0)),
    ("S0 → R", (64, 64), Shard(0), Replicate()),
    ("S0 → S1", (64, 64), Shard(0), Shard(1)),
    ("P → S0", (64, 64), Partial(), Shard(0)),
    ("P → R", (64, 64), Partial(), Replicate()),
    ("S0 → R, uneven", (63, 61), Shard(0), Replicate()),
    ("P → S1, uneven", (63, 61), Partial(), Shard(1)),
    ("nothing to do", (64, 64), Shard(0), Shard(0)),
)


class NullWorld:
    """Hands out memory that recycles, as a pool does whose tensors die soon, and meets nobody."""

    one_sided = recycles = True
    windows = None
    name, backend, error, busy, pending, rank = "null", "", None, False, None, 0

    def __init__(self) -> None:
        self._kept: dict[Any, list[torch.Tensor]] = {}
        self._bytes: dict[int, torch.Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self._kept.setdefault((tuple(shape), dtype), [])
        if len(kept) < 2:
            kept.append(torch.empty(tuple(shape), dtype=dtype, device=device))
            self._bytes[kept[-1].data_ptr()] = kept[-1].view(-1).view(torch.uint8)
        kept.reverse()
        return kept[0].detach()

    def address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr()

    def open(self, address: int, nbytes: int) -> torch.Tensor:
        return self._bytes[address]

    def landings(self, ranks: tuple[int, ...]) -> None:
        return None

    def answer(self, request: Meet) -> list[None]:
        if request.meanwhile is not None:
            request.meanwhile()
        return [None] * len(request.peers)


class NullWorlds:
    def choose(self, ranks: tuple[int, ...], device: torch.device, asked: str | None) -> tuple[NullWorld, str]:
        return NullWorld(), "nothing is to be moved"


def push_to_nobody(step: OneSidedStep, x: torch.Tensor, copies: Copies, address: Any, nbytes: int) -> None:
    if address is not None:
        push(step, x, copies, address, nbytes)


push = OneSidedStep.push


def microseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def measure(rounds: int) -> list[tuple[str, float, float]]:
    """Kind, and microseconds a call of stock and of shardweave, the median of some rounds in turns."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for name, shape, source, target in KINDS:
        local = (
            torch.ones(shape).chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else torch.ones(shape)
        )
        x = DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
        placements = [target]

        def call(x: DTensor = x, placements: list[Placement] = placements) -> DTensor:
            return x.redistribute(placements=placements)

        stock, ours = [], []
        for _ in range(rounds):
            stock.append(microseconds(call))
            with shardweave.installed():
                ours.append(microseconds(call))
        found.append((name, statistics.median(stock), statistics.median(ours)))
    delegated = shardweave.stats().delegations
    assert not delegated, f"left to torch: {delegated}"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side (default: %(default)s)")
    rounds = parser.parse_args(argv).rounds
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    # The world and the group that moves nothing, in the places where programs look for theirs.
    calls.current_worlds = NullWorlds  # type: ignore[assignment]
    for module in (calls, drop_in):
        module.why_not_backend = lambda device: None  # type: ignore[attr-defined]
    OneSidedStep.push = push_to_nobody  # type: ignore[method-assign, assignment]
    Reduction.__call__ = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    print(
        f"Microseconds of the host for a cached DTensor.redistribute, float32, mesh of {RANKS}; median of {rounds} "
        f"rounds\nof {CALLS} calls. torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} "
        f"cores ({platform.machine()}). Stock's S0 → S1 is an\nall-gather and a chunk here, as on any CPU; shared "
        f"machine.\n"
    )
    print("| kind | stock, fake group | shardweave, null world | ours ÷ stock |\n|---|---|---|---|")
    for name, stock, ours in measure(rounds):
        print(f"| {name} | {stock:.1f} | {ours:.1f} | {ours / stock:.2f} |")


if __name__ == "__main__":
    main()
