"""What a cached call of a redistribution costs the host, with nobody to meet and nothing to move:
`bench/suites/host_cost.py`.

Through `DTensor.redistribute`: stock on a fake process group, shardweave on a transport that moves nothing. And the
loop inside it, as ranks on GPUs run it: through windows with launches left out, by messages with launches and sending
left out; beside stock's. No bytes: small tensors, and none of it is for moving them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardweave.bench.harness.measure import Sink

SUITE = "host"
ROUNDS = {"full": 15, "quick": 7, "dry": 1}
CALLS = {"full": 400, "quick": 200, "dry": 3}
_INSIDE = "ours, windows", "ours, windows, launched", "ours, messages", "stock"
_NAMES = {
    "ours, windows": "windows",
    "ours, windows, launched": "launched",
    "ours, messages": "messages",
    "stock": "inner_stock",
}


def kinds(scale: str) -> list[str]:
    from shardweave.bench.suites.host_cost import KINDS

    names = [name for name, *_ in KINDS]
    return {"full": names, "quick": names[1:6], "dry": names[:2]}[scale]


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = dict.fromkeys(kinds(scale), ("ours", "stock"))
    return found | {inside(name): _INSIDE for name in kinds(scale)}


def inside(name: str) -> str:
    return f"the loop inside, {name}"


def test_host(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from shardweave.bench.suites import host_cost

    device = "cuda" if torch.cuda.is_available() else "cpu"
    host_cost.prepare(device)
    mesh = init_device_mesh(device, (host_cost.RANKS,))
    rounds, calls = ROUNDS[scale], CALLS[scale]
    detail = {"ranks": host_cost.RANKS, "calls": calls, "device": device}
    for name, shape, source, target in host_cost.KINDS:
        if not {name, inside(name)} & set(names):
            continue
        sink.begin(name)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            with host_cost.nothing_is_moved(device):
                times = host_cost.sampled(mesh, shape, source, target, 1, calls)
            with host_cost.transports_of_gpus(device):
                of_gpus, *_ = host_cost.sampled_on_device_transports(mesh, shape, source, target, 1, calls)
            for side, (one,) in {**times, **of_gpus}.items():
                found.setdefault(side, []).append(one)
        if name in names:
            for contender in ("ours", "stock"):
                sink.row(name, contender, "µs", found[contender], detail=detail)
        if inside(name) not in names:
            continue
        for contender, side in _NAMES.items():
            if side in found:
                sink.row(inside(name), contender, "µs", found[side], detail=detail)
            else:
                sink.absent(inside(name), contender, "no GPU is here to launch on")
