"""Decoding: few tokens, padded to a fixed number with ids of -1, in the batched layout and in memory that every step
reuses. Equal to the same tokens without padding, also by launches that are made again as a CUDA graph makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import interpreted, run_ranks
from test_output_buffer import capturing

from shardweave.kernels import QUANTIZATIONS, recorded_launches
from shardweave.runtime.moe import autograd
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer import window

E, K, H, T = 6, 3, 40, 6
SIZE = 2
SETTINGS: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "layout": "batched"}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "capacity": {"expert_capacity": 5, "overflow": "drop"}, **{q: {"quantize": q} for q in QUANTIZATIONS},
}  # fmt: skip
STEPS = [(6, 6), (1, 0), (0, 0), (3, 6), (0, 5)]
"""The tokens of each rank in each step."""


def tokens_in(step: int) -> list[Any]:
    return [tokens_of(r, n, K, E, H, torch.bfloat16, "zipf", step) for r, n in enumerate(STEPS[step])]


def experts(rows: torch.Tensor, first: int) -> torch.Tensor:
    """[S_local, C, H]: each expert multiplies by a number of its own."""
    return rows * (torch.arange(len(rows), dtype=rows.dtype) + first + 1)[:, None, None]


def rows_for(routed: Any) -> torch.Tensor:
    return routed.x if routed.scale is None else routed.dequantized()


def without_padding(kind: str) -> list[list[torch.Tensor]]:
    """The results of each step on each rank."""
    d = VirtualTokenDispatcher(SIZE, **with_options(**SETTINGS, **KINDS[kind]))
    results = []
    with torch.no_grad():
        for step in range(len(STEPS)):
            tokens = tokens_in(step)
            routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
            firsts = [a for a, _ in pairwise(d.config.bounds)]
            results.append(d.combine([experts(rows_for(r), a) for r, a in zip(routed, firsts, strict=True)], routed))
    return results


class Step:
    """One layer of a decoding step: the memory that it reads and writes is the same each time."""

    def __init__(self, rank: int, kind: str, transport: str) -> None:
        self.rank = rank
        self.dispatcher = TokenDispatcher(
            **with_options(**SETTINGS, **KINDS[kind], pooled_buffers=4, transport=transport)
        )
        self.first = self.dispatcher.config.bounds[rank]
        self.x = torch.full((T, H), float("nan"), dtype=torch.bfloat16)
        self.ids, self.weights = torch.full((T, K), -1), torch.full((T, K), float("nan"))
        self.y = torch.full((T, H), float("nan"), dtype=torch.bfloat16)

    def fill(self, tokens: Sequence[Any]) -> int:
        """Copy this rank's tokens to the static memory; what was there before remains behind them."""
        t = tokens[self.rank]
        n = len(t.x)
        self.x[:n], self.ids[:n], self.weights[:n] = t.x, t.ids, t.weights
        self.ids[n:] = -1
        self.y.fill_(float("nan"))
        return n

    def __call__(self) -> tuple[Any, torch.Tensor]:
        routed = self.dispatcher.dispatch(self.x, self.ids, self.weights)
        out = routed.output_buffer()
        out.copy_(experts(rows_for(routed), self.first))
        self.dispatcher.combine(out, routed, out=self.y)
        return routed, out


@torch.no_grad()
def steps(rank: int, kind: str, transport: str) -> list[bytes]:
    step, collected = Step(rank, kind, transport), []
    for i in range(len(STEPS)):
        n = step.fill(tokens_in(i))
        step()
        assert not step.y[n:].any()
        collected.append(step.y[:n].view(torch.int16).numpy().tobytes())
    if transport == "symmetric_memory":
        from shardweave.kernels.launch import runs_on

        # The first call's launches were made again by all others.
        assert len(step.dispatcher.transfers[0]._repeated) == runs_on(torch.device("cpu"))
    return collected


@torch.no_grad()
def replays(rank: int, kind: str) -> list[bytes]:
    """The launches of one step, made again with other tokens in the same memory; between them experts run."""
    step, collected = Step(rank, kind, "symmetric_memory"), []
    step.fill(tokens_in(0))
    step()
    step.dispatcher.transfers[0]._repeated.clear()
    unrepeated = mock.patch.multiple(window, recorded_launches=lambda: nullcontext([]), _MOST_REPEATED=0)
    # So that all launches are recorded here, and read the memory that is filled again, not the copy of a dispatch.
    with capturing(), unrepeated, mock.patch.object(autograd, "copied_weights", lambda weights: weights):
        with recorded_launches() as dispatched:
            routed = step.dispatcher.dispatch(step.x, step.ids, step.weights)
        out = routed.output_buffer()
        out.copy_(experts(rows_for(routed), step.first))
        with recorded_launches() as combined:
            step.dispatcher.combine(out, routed, out=step.y)
    names = [made.kernel.fn.__name__ for made in (*dispatched, *combined)]
    # Rows are quantized by the launch that pushes them, and scales arrive where they are read.
    assert len(names) == 6 and names[:2] == ["count_few_pairs_kernel", "route_rows_kernel"], names
    for i in range(len(STEPS)):
        n = step.fill(tokens_in(i))
        for made in dispatched:
            made.start(*made.arguments)
        out.copy_(experts(rows_for(routed), step.first))
        for made in combined:
            made.start(*made.arguments)
        assert not step.y[n:].any()
        collected.append(step.y[:n].view(torch.int16).numpy().tobytes())
    return collected


def expected(kind: str) -> list[list[bytes]]:
    """The steps of each rank."""
    of_steps = without_padding(kind)
    return [[ys[rank].view(torch.int16).numpy().tobytes() for ys in of_steps] for rank in range(SIZE)]


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "symmetric_memory"])
def test_padded_steps_equal_tokens_without_padding(transport: str) -> None:
    for kind in KINDS if transport == "symmetric_memory" else ("bf16", "fp8_128"):
        assert run_ranks(steps, SIZE, kind, transport) == expected(kind), kind


@pytest.mark.long
@pytest.mark.multi
def test_replayed_launches_equal_tokens_without_padding() -> None:
    """By interpreted kernels."""
    kind = "fp8_128"
    both = "t.run_ranks(t.replays, 2, k), t.run_ranks(t.steps, 2, k, 'symmetric_memory')"
    assert interpreted("test_decode", f"[[{both}] for k in ['{kind}']]") == repr([[expected(kind)] * 2])
