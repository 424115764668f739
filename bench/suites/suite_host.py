"""What a cached call of a redistribution costs the host, without peers and without anything to move
(`bench/suites/host_cost.py`).

Through `DTensor.redistribute`: stock on a fake process group, shardweave on a transport that moves nothing. And the
loop inside it, as ranks on GPUs run it: through windows without launches, by messages without launches and sending;
beside stock's. Rows have no bytes, since tensors are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardweave.bench.harness.measure import Sink

SUITE = "host"
ROUNDS = {"full": 15, "quick": 7, "dry": 1}
CALLS = {"full": 400, "quick": 200, "dry": 3}
THROUGH = {"ours": "ours", "stock": "stock"}
INSIDE = {
    "ours, windows": "windows",
    "ours, windows, launched": "launched",
    "ours, messages": "messages",
    "stock": "inner_stock",
}
"""Contenders, and what `host_cost.Sampled` calls them."""


def kinds(scale: str) -> list[str]:
    from shardweave.bench.suites.host_cost import KINDS

    names = [name for name, *_ in KINDS]
    return {"full": names, "quick": names[1:6], "dry": names[:2]}[scale]


def inside(kind: str) -> str:
    return f"the loop inside, {kind}"


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(kinds(scale), (*THROUGH,)) | dict.fromkeys(map(inside, kinds(scale)), (*INSIDE,))


def test_host(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    from shardweave.bench.suites import host_cost

    device = "cuda" if torch.cuda.is_available() else "cpu"
    host_cost.prepare(device)
    detail = {"ranks": host_cost.RANKS, "calls": CALLS[scale], "device": device}
    selected = [kind for kind in kinds("full") if {kind, inside(kind)} & set(names)]
    for kind, times, *_ in host_cost.sample(device, ROUNDS[scale], CALLS[scale], selected):
        sink.begin(kind)
        for case, contenders in ((kind, THROUGH), (inside(kind), INSIDE)):
            for contender, side in contenders.items() if case in names else ():
                if side in times:
                    sink.row(case, contender, "µs", times[side], detail=detail)
                else:
                    sink.absent(case, contender, "no GPU is here to launch on")
