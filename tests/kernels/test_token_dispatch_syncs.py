"""Dispatch, activation, combine and their backward do not synchronise: virtual ranks under a guard that refuses it.

In the interpreter, which runs the same kernels as a GPU, and on a GPU with torch's sync debug mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from sync_guard import SyncGuard, on_the_host
from variants import crossed

from shardweave.runtime.moe import simulate
from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer import fixed, sendrecv, two_level, two_level_sendrecv
from shardweave.runtime.moe.transfer.sendrecv import SendRecvTransfer
from shardweave.runtime.moe.transfer.two_level_sendrecv import TwoLevelSendRecvTransfer
from shardweave.runtime.statistics import stats

K, E, H = 3, 5, 16


class Guard(SyncGuard):
    """On a GPU, torch's sync debug mode."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.on_gpu = device == "cuda"

    def __enter__(self) -> Guard:
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("error")
            return self
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *args: Any) -> None:
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        else:
            super().__exit__(*args)


def layer(d: VirtualTokenDispatcher, given: list, weighted: bool, redispatched: bool) -> tuple[list, list]:
    xs, ids, weights, gradients = given
    routed = d.dispatch(xs, ids, weights)
    outputs = []
    for r in routed:
        with r.kept() if redispatched else nullcontext():
            outputs.append(silu_and_mul(r.x, r.x, r) * (2.0 if weighted else r.weights.unsqueeze(-1)))
    ys = d.combine(outputs, routed, add=xs, weighted=weighted)
    torch.autograd.backward(ys, gradients)
    routed[0].load()
    return ys, [x.grad for x in (*xs, *weights)]


def leaves(device: str, seed: int) -> list:
    tokens = [tokens_of(r, n, K, E, H, torch.float32, "holes", seed) for r, n in enumerate((3, 0, 1))]
    moved = [
        [v.to(device) for v in vs] for vs in zip(*[(t.x, t.ids, t.weights, t.gradient) for t in tokens], strict=True)
    ]
    for x in (*moved[0], *moved[2]):
        x.requires_grad_()
    return moved


SETTINGS = [
    {"align": 4, "zero_rows": True},
    {"layout": "batched", "expert_capacity": 4, "overflow": "drop"},
    {"save": "redispatch", "overflow": "drop", "expert_capacity": 2},
    {"save": "copy", "expert_map": [[0, 1], [2, 1, 3], [4, 0]], "zero_rows": True},
]


PUSHED, EXACT, FIXED = {"one_sided": True}, {"one_sided": False}, {"one_sided": False, "chunk_capacity": 5}
TWO_LEVELS = {"one_sided": False, "nodes": [0, 1, 1], "two_level": True}
TWO_LEVELS_FIXED = {**TWO_LEVELS, "chunk_capacity": 5}
ALGORITHMS = [PUSHED, EXACT, FIXED, TWO_LEVELS, TWO_LEVELS_FIXED]


# Every setting with pushes; with each other algorithm two of them, one with weights and one without.
@crossed(
    "algorithm, number", ALGORITHMS, range(len(SETTINGS)), ids=str,
    gate=lambda algorithm, number: algorithm is PUSHED or number // 2 == ALGORITHMS.index(algorithm) // 2 % 2,
)  # fmt: skip
def test_dispatch_does_not_synchronise(device, algorithm, number, monkeypatch):
    """Except for the one read of counts with chunks of exact size."""
    reads = algorithm in (EXACT, TWO_LEVELS)
    if algorithm is TWO_LEVELS:
        monkeypatch.setattr(simulate, "two_sided_transfer", lambda config, pushed: TwoLevelSendRecvTransfer)
    if algorithm is not PUSHED and device == "cpu":
        of_chunks = sendrecv, fixed, two_level_sendrecv
        modules = {
            "chunk_sizes": of_chunks,
            "on_host": (sendrecv, two_level_sendrecv),
            "_sizes_by_rank": (two_level,),
            "_total": (two_level_sendrecv,),
        }
        for name, of_name in modules.items():
            for module in of_name:
                monkeypatch.setattr(module, name, on_the_host(getattr(module, name)))
    elif reads and device == "cuda":
        monkeypatch.setattr(SendRecvTransfer, "_read", read_unguarded(SendRecvTransfer._read))
    given = SETTINGS[number]
    given = {**given, "overflow": "drop"} if "chunk_capacity" in algorithm else given
    d = VirtualTokenDispatcher(
        3,
        **with_options(
            num_experts=E, top_k=K, hidden=H, max_tokens=4, dtype=torch.float32, device=device, **algorithm, **given
        ),
    )
    weighted, again = number % 2 == 0, given.get("save") == "redispatch"
    before = stats().host_reads.total()
    want = layer(d, leaves(device, number), weighted, again)  # warm
    fresh = leaves(device, number)
    with Guard(device) as guard:
        got = layer(d, fresh, weighted, again)
    assert device == "cuda" or guard.seen["copy_"] and guard.seen["empty"], guard.seen
    assert all(torch.equal(a, b) for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True))
    # Three ranks, warm and guarded.
    assert stats().host_reads.total() - before == (6 if reads else 0)
    d.check()


def read_unguarded(read: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return outside
