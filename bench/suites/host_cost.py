"""What a redistribution costs the host: stock DTensor on a process group that moves nothing, beside shardweave on a
transport that moves nothing; and what it costs on the transports that GPUs use.

`python -m shardweave.bench.suites.host_cost` times `DTensor.redistribute` of small tensors, cached, both sides in
turns. The fake process group returns at once and sums nothing; the null transport has no peers, and nothing is written
to them or summed for them. What is left is the host's work: specs, dispatch, lookup of plans, buffers, and the copies
that stay on the rank. Then the loop inside it, as ranks on GPUs run it: through windows, without launches, and by
messages, without launches and sending (`host_transports`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_inner

import shardweave
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import provenance_lines
from shardweave.bench.suites.host_transports import (
    NullTransports,
    counted_launches,
    device_transports,
    nothing_is_moved,
    on_device_transports,
    without_launches,
)
from shardweave.runtime.dtensor import drop_in
from shardweave.runtime.dtensor.local import run_redistribution
from shardweave.runtime.dtensor.redistribute_options import RedistributeOptions
from shardweave.runtime.executor import call as call_module

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


class Sampled(NamedTuple):
    """One kind of redistribution.

    Attributes:
        times: microseconds of the host for a cached call, one for each round. Through `DTensor.redistribute`: "stock"
            and "ours". The loop inside it, from a local tensor and two specs to a local tensor: "inner_stock"; ours
            through "windows" and by "messages", without launches, and on a GPU "launched", through windows.
        windows, messages: launches of a call, by class.
    """

    kind: str
    times: dict[str, list[float]]
    windows: Mapping[str, int]
    messages: Mapping[str, int]

    def to_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Medians: through `DTensor.redistribute`, and in the loop inside it."""
        of = {side: median(times) for side, times in self.times.items()}
        through = {"kind": self.kind, **{side: of[side] for side in ("stock", "ours", "inner_stock")}}
        return through, {
            "kind": self.kind, "windows": of["windows"], "windows_launched": of.get("launched"),
            "boxes": self.windows["PreparedLaunch"], "signals": self.windows["PreparedSignal"],
            "messages": of["messages"], "messages_boxes": sum(self.messages.values()),
        }  # fmt: skip


def sample(device: str, rounds: int, calls: int, kinds: Iterable[str] | None = None) -> Iterator[Sampled]:
    """Time the kinds with these names, by default all, after `prepare(device)`."""
    mesh = init_device_mesh(device, (RANKS,))
    for name, shape, source, target in KINDS:
        if kinds is not None and name not in kinds:
            continue
        whole = torch.ones(shape, device=device)
        local = whole.chunk(RANKS, source.dim)[0].clone() if isinstance(source, Shard) else whole
        x = DTensor.from_local(local, mesh, [source], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
        specs = x._spec, DTensorSpec(mesh, (target,), x._spec.tensor_meta)
        redistribute = partial(x.redistribute, placements=[target])
        windows, messages = (
            partial(run_redistribution, local, *specs, RedistributeOptions(transport=transport))
            for transport in ("symmetric_memory", "process_group")
        )
        transports, times = device_transports(device, RANKS), defaultdict[str, list[float]](list)
        with on_device_transports(device, transports):
            launches = counted_launches(windows), counted_launches(messages)

        def timed(side: str, call: Callable[[], Any], times: dict[str, list[float]] = times) -> None:
            times[side].append(microseconds(call, calls, device))

        for _ in range(rounds):
            with nothing_is_moved(device):
                timed("stock", redistribute)
                timed("inner_stock", partial(stock_inner, local, *specs))
                with shardweave.installed():
                    timed("ours", redistribute)
            with on_device_transports(device, transports):
                with without_launches():
                    timed("windows", windows)
                    timed("messages", messages)
                if device == "cuda":
                    timed("launched", windows)
        yield Sampled(name, times, *launches)
    delegated = shardweave.stats().delegations
    assert not delegated, f"left to torch: {delegated}"


def microseconds(call: Callable[[], Any], number: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    took = (time.perf_counter() - began) / number * 1e6
    if device == "cuda":
        torch.cuda.synchronize()  # the queue of launches has an end, at which the host would wait
    return took


def prepare(device: str) -> None:
    """Put the null transport and the group that moves nothing where programs look for theirs; for good."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    call_module.current_transports = NullTransports  # type: ignore[assignment]
    for module in (call_module, drop_in):
        module.why_not_backend = lambda *arguments: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def tables(kinds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of both tables, from `Sampled.to_dict()`."""
    yield "| kind | stock, fake group | shardweave, null transport | ours ÷ stock |"
    yield "|---|---|---|---|"
    for k in kinds:
        yield f"| {k['kind']} | {k['stock']:.1f} | {k['ours']:.1f} | {k['ours'] / k['stock']:.2f} |"
    yield "\nThe loop inside it, as ranks on GPUs run it. Through windows: launches (of boxes + of signals) left out."
    yield "By messages: those left out too, nothing sent.\n"
    yield "| kind | windows | launches | launched | messages | launches | stock |"
    yield "|---|---|---|---|---|---|---|"
    for k in kinds:
        launched = "no GPU" if k["windows_launched"] is None else f"{k['windows_launched']:.1f}"
        cells = k["kind"], f"{k['windows']:.1f}", f"{k['boxes']} + {k['signals']}", launched, f"{k['messages']:.1f}"
        yield f"| {' | '.join(cells)} | {k['messages_boxes']} | {k['inner_stock']:.1f} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.suites.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each round (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="two lists of one JSON object for each kind")
    arguments = parser.parse_args(argv)
    rounds, calls, device = arguments.rounds, arguments.calls, arguments.device
    prepare(device)
    through, inside = zip(*(kind.to_dict() for kind in sample(device, rounds, calls)), strict=True)
    if arguments.json:
        print(json.dumps([through, inside]))
        return
    print("\n".join(provenance_lines(provenance())) + "\n")
    note = " Stock's S0 → S1 is an all-gather and a chunk here, as on any CPU." if device == "cpu" else ""
    print(
        f"Microseconds of the host for a cached DTensor.redistribute, float32, mesh of {RANKS}; median of {rounds} "
        f"rounds\nof {calls} calls.{note}\n"
    )
    print("\n".join(tables([a | b for a, b in zip(through, inside, strict=True)])))


if __name__ == "__main__":
    main()
