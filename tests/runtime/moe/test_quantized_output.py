"""Rows that combine quantizes on their way back: near float64, equal on all transports, gradients as without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import interpreted, run_ranks
from test_payloads import KINDS, SETTINGS, H, ids_of, raw
from test_processes import poisoned as poison_shared_memory

from shardweave.errors import ArgumentError
from shardweave.kernels import QUANTIZATIONS
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

SIZE = 3


def one_round(d: Any, ranks: Sequence[int]) -> tuple[Any, ...]:
    """Dispatch, experts, combine and backward, of these ranks; rows without a token are NaN."""
    g = [torch.Generator().manual_seed(r) for r in range(SIZE)]
    dtype = d.config.dtype
    xs = [torch.randn((5 * r + 4) % 13, H, generator=g[r]).to(dtype).requires_grad_() for r in ranks]
    ids = [ids_of(len(x), 3, 5, r) for x, r in zip(xs, ranks, strict=True)]
    ws = [torch.rand(i.shape, generator=g[r]).requires_grad_() for i, r in zip(ids, ranks, strict=True)]
    one = isinstance(d, TokenDispatcher)
    routed = [d.dispatch(xs[0], ids[0], ws[0])] if one else d.dispatch(xs, ids, ws)
    outputs = []
    for r in routed:
        there = torch.arange(r.weights.numel()).view(r.weights.shape) < r.num_rows
        outputs.append(torch.where(there[..., None], r.x * 3, float("nan")))
    ys = [d.combine(outputs[0], routed[0])] if one else d.combine(outputs, routed)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return xs, ids, ws, ys


def results_of(xs: Any, ids: Any, ws: Any, ys: Any) -> list[bytes]:
    return [raw(tensor) for tensor in (*ys, *(x.grad for x in xs), *(w.grad for w in ws))]


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantized_output_is_near_float64(quantize: str, dtype: torch.dtype) -> None:
    """The error of an element is at most half a unit in the last of its four bits, or half the least subnormal of its
    scale, times its weight, and the roundings of sums; gradients are those without quantization."""
    settings = {**SETTINGS, "dtype": dtype}
    xs, ids, ws, ys = one_round(
        VirtualTokenDispatcher(SIZE, **with_options(**settings, quantize_output=quantize)), range(SIZE)
    )
    plain = one_round(VirtualTokenDispatcher(SIZE, **with_options(**settings)), range(SIZE))
    largest = 0.0
    for x, i, w, y, y_plain in zip(xs, ids, ws, ys, plain[3], strict=True):
        rows = (x.detach() * 3).to(dtype)
        _, scales = quantize_rows_reference(rows, QUANTIZATIONS[quantize])
        group = QUANTIZATIONS[quantize].group or H
        scale = scales.double().repeat_interleave(group, 1)[:, :H]
        weight = (w.detach() * (i >= 0)).double().sum(1, keepdim=True)
        want = rows.double() * weight
        each = torch.maximum(rows.double().abs() * 2.0**-4, scale * 2.0**-10)
        roundings = 4 * torch.finfo(dtype).eps * want.abs()
        error = (y.detach().double() - want).abs()
        assert (error <= each * weight * (1 + 2.0**-10) + roundings).all()
        largest = max([largest, *(error / (each * weight).clamp(min=1e-30)).flatten().tolist()])
        assert len(y) == 0 or raw(y) != raw(y_plain)
    assert largest > 0.25  # the bound is that of these formats
    for one, other in zip((*xs, *ws), (*plain[0], *plain[2]), strict=True):
        assert raw(one.grad) == raw(other.grad)


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_transfers_combine_equal_rows(quantize: str) -> None:
    """Two levels too, where all ranks are on nodes of their own: sums that cross the network are not quantized."""
    found = []
    for kind, given in KINDS.items():
        for more in ({}, {"layout": "batched"}, {"align": 8, "save": "copy"}):
            nodes = {"nodes": [0] * SIZE, **given} if given.get("two_level") else given
            d = VirtualTokenDispatcher(SIZE, **with_options(**{**SETTINGS, **more}, quantize_output=quantize, **nodes))
            found.append((kind, results_of(*one_round(d, range(SIZE)))))
    assert all(results == found[0][1] for _, results in found), [kind for kind, r in found if r != found[0][1]]


def rounds_of(rank: int, transport: str, quantize: str, more: dict[str, Any]) -> list[bytes]:
    poison_shared_memory()
    d = TokenDispatcher(**with_options(**SETTINGS, quantize_output=quantize, transport=transport, **more))
    first = results_of(*one_round(d, [rank]))
    assert results_of(*one_round(d, [rank])) == first
    return first


def wanted(quantize: str, **more: Any) -> list[list[bytes]]:
    d = VirtualTokenDispatcher(SIZE, **with_options(**SETTINGS, quantize_output=quantize, **more))
    of_all = one_round(d, range(SIZE))
    return [results_of(*[part[rank : rank + 1] for part in of_all]) for rank in range(SIZE)]


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical", "symmetric_memory"])
def test_quantized_output_among_processes(transport: str) -> None:
    assert run_ranks(rounds_of, SIZE, transport, "fp8_128", {"pooled_buffers": 3}) == wanted("fp8_128")


@pytest.mark.multi
def test_quantized_output_by_interpreted_kernels() -> None:
    names = ("fp8_row", "mxfp8")
    code = f"[t.run_ranks(t.rounds_of, 3, 'symmetric_memory', q, {{}}) for q in {names}]"
    assert interpreted("test_quantized_output", code) == repr([wanted(q) for q in names])


@pytest.mark.multi
def test_quantized_output_on_two_levels() -> None:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"}
    want = wanted("fp8_128", one_sided=False, nodes=[0, 0, 1], two_level=True)
    for transport in ("hierarchical", "process_group"):
        got = run_ranks(rounds_of, SIZE, transport, "fp8_128", {"two_level": True}, environment=nodes)
        assert got == want, transport


def test_quantize_output_refuses_other_names() -> None:
    with pytest.raises(ArgumentError, match="quantize_output: 'fp4'; allowed: 'fp8_row', 'fp8_128', 'mxfp8', None"):
        VirtualTokenDispatcher(1, **with_options(**SETTINGS, quantize_output="fp4"))
