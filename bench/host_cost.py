"""What a redistribution costs the host: stock DTensor on a process group that moves nothing, beside shardweave on a
world that moves nothing.

`python -m shardweave.bench.host_cost` times `DTensor.redistribute` of small tensors, cached, both sides in turns. The
fake process group returns at once and sums nothing; on the null world nobody is met, nothing is written to peers and
nothing that they would have sent is summed. What is left is the host's: specs, dispatch, plans looked up, buffers made,
and the copies that stay on the rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_inner

import shardweave
from shardweave.kernels.pointers import PreparedLaunch
from shardweave.runtime import calls, drop_in
from shardweave.runtime.copies import Copies, Reduction, is_plain_memory
from shardweave.runtime.meeting import Meet
from shardweave.runtime.one_sided import OneSidedStep
from shardweave.runtime.redistribution import run_redistribution

RANKS = 4
SCRATCH = 1 << 20  # bytes; more than any shard here
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


class ScratchWorld(NullWorld):
    """Peers whose buffers are all one that nobody reads: pushes to it cost the host of a GPU what real ones do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        self._bytes[self._scratch.data_ptr()] = self._scratch

    def answer(self, request: Meet) -> list[int]:  # type: ignore[override]
        super().answer(request)
        return [self._scratch.data_ptr()] * len(request.peers)


class NullWorlds:
    def choose(self, ranks: tuple[int, ...], device: torch.device, asked: str | None) -> tuple[NullWorld, str]:
        return NullWorld() if is_plain_memory(device) else ScratchWorld(device), "nothing is to be moved"


def push_to_nobody(step: OneSidedStep, x: torch.Tensor, copies: Copies, address: Any, nbytes: int) -> None:
    if address is not None:
        push(step, x, copies, address, nbytes)


push = OneSidedStep.push


def microseconds(call: Callable[[], Any], number: int = CALLS, device: str = "cpu") -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    took = (time.perf_counter() - began) / number * 1e6
    if device == "cuda":
        torch.cuda.synchronize()  # the queue of launches has an end, at which the host would wait
    return took


def launch_nothing(self: PreparedLaunch, *arguments: Any) -> None:
    pass


@contextmanager
def without_launches() -> Iterator[None]:
    """All the host's work but the driver's."""
    launch = PreparedLaunch.__call__
    PreparedLaunch.__call__ = launch_nothing  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PreparedLaunch.__call__ = launch  # type: ignore[method-assign]


class Cost(NamedTuple):
    """Microseconds of the host for a cached call, medians of rounds in turns.

    Attributes:
        stock, ours: of `DTensor.redistribute`.
        inner_stock, inner_ours: of the loop inside it, from a local tensor and two specs to a local tensor.
        inner_bare: the latter with all kernel launches left out; launches: how many those are.
    """

    kind: str
    stock: float
    ours: float
    inner_stock: float
    inner_ours: float
    inner_bare: float
    launches: int


def measure(rounds: int, number: int = CALLS, device: str = "cpu") -> list[Cost]:
    mesh = init_device_mesh(device, (RANKS,))
    found = []
    for name, shape, source, target in KINDS:
        whole = torch.ones(shape, device=device)
        local = whole.chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else whole
        x = DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
        specs = x._spec, DTensorSpec(mesh, (target,), x._spec.tensor_meta)
        call = partial(x.redistribute, placements=[target])
        inner, inner_stock = partial(run_redistribution, local, *specs), partial(stock_inner, local, *specs)
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            times.setdefault("stock", []).append(microseconds(call, number, device))
            times.setdefault("inner stock", []).append(microseconds(inner_stock, number, device))
            with shardweave.installed():
                times.setdefault("ours", []).append(microseconds(call, number, device))
                times.setdefault("inner", []).append(microseconds(inner, number, device))
                with without_launches():
                    times.setdefault("bare", []).append(microseconds(inner, number, device))
        stock, ours, inner_stock_us, inner_us, bare = (
            statistics.median(times[side]) for side in ("stock", "ours", "inner stock", "inner", "bare")
        )
        found.append(Cost(name, stock, ours, inner_stock_us, inner_us, bare, _launches_of(inner)))
    delegated = shardweave.stats().delegations
    assert not delegated, f"left to torch: {delegated}"
    return found


def _launches_of(call: Callable[[], Any]) -> int:
    counted = []
    launch = PreparedLaunch.__call__
    PreparedLaunch.__call__ = lambda self, *arguments: counted.append(1)  # type: ignore
    try:
        call()
    finally:
        PreparedLaunch.__call__ = launch  # type: ignore[method-assign]
    return len(counted)


def prepare(device: str) -> None:
    """The world and the group that moves nothing, in the places where programs look for theirs; for good."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    calls.current_worlds = NullWorlds  # type: ignore[assignment]
    for module in (calls, drop_in):
        module.why_not_backend = lambda device: None  # type: ignore[attr-defined]
    if is_plain_memory(torch.device(device)):  # else copies are launches, which may as well be made
        OneSidedStep.push = push_to_nobody  # type: ignore[method-assign, assignment]
        Reduction.__call__ = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each round (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object for each kind")
    arguments = parser.parse_args(argv)
    rounds, number = arguments.rounds, arguments.calls
    prepare(arguments.device)
    if arguments.json:
        print(json.dumps([cost._asdict() for cost in measure(rounds, number, arguments.device)]))
        return
    note = "Stock's S0 → S1 is an\nall-gather and a chunk here, as on any CPU; " if arguments.device == "cpu" else ""
    print(
        f"Microseconds of the host for a cached DTensor.redistribute, float32, mesh of {RANKS}; median of {rounds} "
        f"rounds\nof {number} calls. torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} "
        f"cores ({platform.machine()}). {note}shared machine.\n"
    )
    print("| kind | stock, fake group | shardweave, null world | ours ÷ stock |\n|---|---|---|---|")
    for cost in measure(rounds, number, arguments.device):
        print(f"| {cost.kind} | {cost.stock:.1f} | {cost.ours:.1f} | {cost.ours / cost.stock:.2f} |")


if __name__ == "__main__":
    main()
