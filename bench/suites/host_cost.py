"""What a redistribution costs the host: stock DTensor on a process group that moves nothing, beside shardweave on a
transport that moves nothing; and what it costs on the transports that GPUs use.

`python -m shardweave.bench.suites.host_cost` times `DTensor.redistribute` of small tensors, cached, both sides in
turns. The fake process group returns at once and sums nothing; on the null transport nobody is met, nothing is written
to peers and nothing that they would have sent is summed. What is left is the host's: specs, dispatch, plans looked up,
buffers made, and the copies that stay on the rank. Then the loop inside it, as ranks on GPUs run it: through windows,
where launches are left out, and by messages, where those are left out as well and only the store is told
(`host_transports`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_inner

import shardweave
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import provenance_lines
from shardweave.bench.suites.host_transports import (
    Alone,
    MirrorTransport,
    SilentTransport,
    as_on_a_gpu,
    counted_launches,
    nothing_is_sent,
    without_launches,
)
from shardweave.runtime.dtensor import drop_in
from shardweave.runtime.dtensor.local import run_redistribution
from shardweave.runtime.dtensor.redistribute_options import RedistributeOptions
from shardweave.runtime.executor import call as call_module
from shardweave.runtime.executor.copies import Copies, Reduction, is_plain_memory
from shardweave.runtime.executor.step_put import PutStep
from shardweave.runtime.transports.requests import Barrier
from shardweave.runtime.transports.select import AnyTransport

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


class NullTransport:
    """Hands out memory that recycles, as a pool does whose tensors die soon, and meets nobody."""

    one_sided = recycles = True
    windows = None
    name, backend, error, busy, pending, rank = "null", "", None, False, None, 0

    def __init__(self) -> None:
        self.rendezvous = Alone(0, RANKS)
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

    def receive_buffers(self, ranks: tuple[int, ...]) -> None:
        return None

    def answer(self, request: Barrier) -> list[None]:
        if request.meanwhile is not None:
            request.meanwhile()
        return [None] * len(request.peers)


class ScratchTransport(NullTransport):
    """Peers whose buffers are all one that nobody reads: pushes to it cost the host of a GPU what real ones do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        self._bytes[self._scratch.data_ptr()] = self._scratch

    def answer(self, request: Barrier) -> list[int]:  # type: ignore[override]
        super().answer(request)
        return [self._scratch.data_ptr()] * len(request.peers)


class NullTransports:
    """In place of the transports of a process group: the null transport, or by its name one that GPUs use."""

    named: dict[str, AnyTransport] = {}

    def choose(self, ranks: tuple[int, ...], device: torch.device, asked: str | None) -> tuple[Any, str]:
        if asked is not None:
            return self.named[asked], "requested"
        return NullTransport() if is_plain_memory(device) else ScratchTransport(device), "nothing is to be moved"


def push_to_nobody(step: PutStep, x: torch.Tensor, copies: Copies, address: Any, nbytes: int) -> None:
    if address is not None:
        push(step, x, copies, address, nbytes)


push = PutStep.push


def microseconds(call: Callable[[], Any], number: int = CALLS, device: str = "cpu") -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    took = (time.perf_counter() - began) / number * 1e6
    if device == "cuda":
        torch.cuda.synchronize()  # the queue of launches has an end, at which the host would wait
    return took


def measure(rounds: int, number: int = CALLS, device: str = "cpu") -> list[list[dict[str, Any]]]:
    """Of each kind medians of rounds in turns, microseconds of the host for a cached call. First through
    `DTensor.redistribute`: "stock", "ours", and "inner_stock", the loop inside it, from a local tensor and two specs to
    a local tensor. Then that loop of ours, as ranks on GPUs run it; without a GPU the same but for launches, which
    cannot be made: "windows" with launches left out, "windows_launched" (None without a GPU), "messages" with nothing
    sent; "boxes" and "signals" are launches through windows, "messages_boxes" those by messages."""
    mesh = init_device_mesh(device, (RANKS,))
    through, inside = [], []
    for name, shape, source, target in KINDS:
        with nothing_is_moved(device):
            times = sampled(mesh, shape, source, target, rounds, number)
        through.append({"kind": name, **{side: statistics.median(found) for side, found in times.items()}})
        with transports_of_gpus(device):
            times, counts, sent = sampled_on_device_transports(mesh, shape, source, target, rounds, number)
        median = {side: statistics.median(found) for side, found in times.items()}
        inside.append(
            {"kind": name, "windows": median["windows"], "windows_launched": median.get("launched"),
             "boxes": counts["PreparedLaunch"], "signals": counts["PreparedSignal"], "messages": median["messages"],
             "messages_boxes": sum(sent.values())}
        )  # fmt: skip
    delegated = shardweave.stats().delegations
    assert not delegated, f"left to torch: {delegated}"
    return [through, inside]


def sampled(
    mesh: DeviceMesh, shape: tuple[int, ...], source: Placement, target: Placement, rounds: int, number: int
) -> dict[str, list[float]]:
    """Microseconds of a call by round: "stock", "ours" and "inner_stock"."""
    device = mesh.device_type
    local, specs = given(mesh, shape, source, target)
    x = DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    call = partial(x.redistribute, placements=[target])
    inner_stock = partial(stock_inner, local, *specs)
    times: dict[str, list[float]] = {"stock": [], "ours": [], "inner_stock": []}
    for _ in range(rounds):
        times["stock"].append(microseconds(call, number, device))
        times["inner_stock"].append(microseconds(inner_stock, number, device))
        with shardweave.installed():
            times["ours"].append(microseconds(call, number, device))
    return times


@contextmanager
def transports_of_gpus(device: str) -> Iterator[None]:
    """In this block programs find the transports that ranks on GPUs use, with nobody else in them."""
    here = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
    with as_on_a_gpu(here), nothing_is_sent():
        NullTransports.named = {
            "symmetric_memory": MirrorTransport(RANKS, here),
            "process_group": SilentTransport(RANKS),
        }
        yield


def sampled_on_device_transports(
    mesh: DeviceMesh, shape: tuple[int, ...], source: Placement, target: Placement, rounds: int, number: int
) -> tuple[dict[str, list[float]], Counter[str], Counter[str]]:
    """Microseconds of a call by round: "windows", "messages" and, on a GPU, "launched"; and what is launched through
    windows and by messages."""
    device = mesh.device_type
    local, specs = given(mesh, shape, source, target)
    windows, messages = (
        partial(run_redistribution, local, *specs, RedistributeOptions(transport=transport))
        for transport in NullTransports.named
    )
    counts, sent = counted_launches(windows), counted_launches(messages)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        with without_launches():
            times.setdefault("windows", []).append(microseconds(windows, number, device))
            times.setdefault("messages", []).append(microseconds(messages, number, device))
        if device == "cuda":
            times.setdefault("launched", []).append(microseconds(windows, number, device))
    return times, counts, sent


def given(
    mesh: DeviceMesh, shape: tuple[int, ...], source: Placement, target: Placement
) -> tuple[torch.Tensor, tuple[DTensorSpec, DTensorSpec]]:
    """Rank 0's local tensor, and the specs it goes between."""
    whole = torch.ones(shape, device=mesh.device_type)
    local = whole.chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else whole
    x = DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    return local, (x._spec, DTensorSpec(mesh, (target,), x._spec.tensor_meta))


def prepare(device: str) -> None:
    """The transport and the group that moves nothing, in the places where programs look for theirs; for good."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    call_module.current_transports = NullTransports  # type: ignore[assignment]
    for module in (call_module, drop_in):
        module.why_not_backend = lambda *arguments: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)


@contextmanager
def nothing_is_moved(device: str) -> Iterator[None]:
    """In this block nothing is written to peers, nor reduced that they would have sent; but by launches, which may as
    well be made."""
    with ExitStack() as stack:
        if is_plain_memory(torch.device(device)):
            stack.enter_context(mock.patch.object(PutStep, "push", push_to_nobody))
            stack.enter_context(mock.patch.object(Reduction, "__call__", lambda *_: None))
        yield


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.suites.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each round (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="two lists of one JSON object for each kind")
    arguments = parser.parse_args(argv)
    rounds, number = arguments.rounds, arguments.calls
    prepare(arguments.device)
    through, inside = measure(rounds, number, arguments.device)
    if arguments.json:
        print(json.dumps([through, inside]))
        return
    print("\n".join(provenance_lines(provenance())) + "\n")
    note = " Stock's S0 → S1 is an all-gather and a chunk here, as on any CPU." if arguments.device == "cpu" else ""
    print(
        f"Microseconds of the host for a cached DTensor.redistribute, float32, mesh of {RANKS}; median of {rounds} "
        f"rounds\nof {number} calls.{note}\n"
    )
    print("| kind | stock, fake group | shardweave, null transport | ours ÷ stock |\n|---|---|---|---|")
    for c in through:
        print(f"| {c['kind']} | {c['stock']:.1f} | {c['ours']:.1f} | {c['ours'] / c['stock']:.2f} |")
    print(
        "\nThe loop inside it, as ranks on GPUs run it. Through windows: launches (of boxes + of signals) left out. By "
        "messages:\nthose left out too, nothing sent.\n"
    )
    print("| kind | windows | launches | launched | messages | launches |\n|---|---|---|---|---|---|")
    for c in inside:
        launched = "no GPU" if c["windows_launched"] is None else f"{c['windows_launched']:.1f}"
        cells = c["kind"], f"{c['windows']:.1f}", f"{c['boxes']} + {c['signals']}", launched, f"{c['messages']:.1f}"
        print(f"| {' | '.join(cells)} | {c['messages_boxes']} |")


if __name__ == "__main__":
    main()
