"""`scale_layout="blocked"`: what takes the blocks, and what is refused. Their bytes are compared in test_payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import run_ranks
from test_payloads import ids_of, random_bytes, raw, to_blocked

from shardweave.errors import ArgumentError
from shardweave.kernels import BLOCK_ROWS, QUANTIZATIONS
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

SIZE, K, E = 3, 3, 5
NVFP4 = [(torch.uint8, 20), (torch.float8_e4m3fn, 5), (torch.float32, ())]


def tokens_of(counts: Sequence[int], hidden: int, payloads: Any, seed: int = 0) -> tuple[list[Any], ...]:
    xs, ids, weights = [], [], []
    for r, n in enumerate(counts):
        g = torch.Generator().manual_seed(100 * seed + r)
        x = torch.randn(n, hidden, generator=g) * 2.0 ** torch.randint(-8, 8, (n, hidden), generator=g)
        xs.append(x.bfloat16() if payloads is None else random_bytes(n, payloads, seed + r))
        ids.append(ids_of(n, K, E, 10 * seed + r))
        weights.append(torch.rand(n, K, generator=g))
    return xs, ids, weights


def test_blocks_behind_the_last_group_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes of ones, as unused rows."""
    monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", "1")
    settings: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": 40, "max_tokens": 200, "quantize": "mxfp8"}
    blocked = VirtualTokenDispatcher(SIZE, **with_options(**settings, zero_rows=False, scale_layout="blocked"))
    for r in blocked.dispatch(*tokens_of([200, 0, 5], 40, None)):
        sizes = r.offsets.diff(prepend=r.offsets.new_zeros(1))
        rest = r.scale.view(torch.uint8)[int((-(-sizes // BLOCK_ROWS) * BLOCK_ROWS).sum()) :]
        assert len(rest) and (rest == 255).all()


def compiled_rounds(rank: int) -> None:
    """Under torch.compile, equal to eager results."""
    for more in ({"align": 8}, {"layout": "batched"}):
        d = TokenDispatcher(
            **with_options(
                num_experts=E,
                top_k=K,
                hidden=16,
                max_tokens=60,
                transport="shared_memory",
                payloads=NVFP4,
                scale_layout="blocked",
                **more,
            )
        )
        xs, ids, weights = (of[rank] for of in tokens_of([60, 41], 16, NVFP4))

        def layer(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            routed = d.dispatch(list(x), ids, weights)  # noqa: B023
            ones = torch.ones(*routed.weights.shape, 16, dtype=torch.bfloat16)
            return d.combine(ones, routed), routed.scale.view(torch.uint8), routed.offsets  # type: ignore[union-attr] # noqa: B023

        y, scale, offsets = layer(*xs)
        again, of_graph, ends = torch.compile(layer, backend="aot_eager", fullgraph=True)(*xs)
        assert raw(y) == raw(again) and offsets.tolist() == ends.tolist() and scale.shape == of_graph.shape
        assert of_graph.is_contiguous()
        sizes = offsets.diff(prepend=offsets.new_zeros(1))
        kept = scale.numel()
        if not d.config.batched:
            kept = int((-(-sizes // 128) * 128).sum()) * scale.shape[1]
        assert raw(scale.flatten()[:kept]) == raw(of_graph.flatten()[:kept])


@pytest.mark.multi
def test_blocks_in_compiled_graphs() -> None:
    run_ranks(compiled_rounds, 2)


SETTINGS: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": 40, "max_tokens": 9}
ALLOWED = r"allowed: None, with quantize='mxfp8', or with payloads of which the second is a vector of elements of one"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scale_layout": "rows", "quantize": "mxfp8"}, "scale_layout: 'rows'; allowed: None, 'blocked'"),
    ({"scale_layout": ["blocked"], "quantize": "mxfp8"}, "scale_layout: .*; allowed: None, 'blocked'"),
    ({"scale_layout": "blocked"}, f"scale_layout: 'blocked' with rows of one tensor; {ALLOWED}"),
    ({"scale_layout": "blocked", "quantize": "fp8_row"}, ALLOWED),
    ({"scale_layout": "blocked", "quantize": "fp8_128"}, ALLOWED),
    *[
        ({"scale_layout": "blocked", "payloads": payloads}, ALLOWED)
        for payloads in (
            NVFP4[:1], [NVFP4[0], (torch.float32, 3)], [NVFP4[0], (torch.uint8, ())], [NVFP4[0], (torch.uint8, (3, 5))],
            [NVFP4[0], (torch.uint8, 0)],
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("settings, message", REFUSED)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        VirtualTokenDispatcher(2, **with_options(**SETTINGS, **settings))


def mxfp8_weights(experts: int, out: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of experts: float8 [S, out, H] and scales [S, out, H / 32]."""
    w = torch.randn(experts * out, hidden, generator=torch.Generator().manual_seed(5)).bfloat16()
    q, s = quantize_rows_reference(w, QUANTIZATIONS["mxfp8"])
    return q.view(experts, out, hidden), s.view(experts, out, -1)


def expanded(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale.float().repeat_interleave(32, -1)[..., : q.shape[-1]]


def dispatched(hidden: int, align: int, device: str = "cpu") -> tuple[Any, Any]:
    """A dispatch among virtual ranks of one, with an empty expert and one of more than 128 rows."""
    settings: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": hidden, "max_tokens": 200, "align": align,
                                "quantize": "mxfp8", "zero_rows": True, "device": device}  # fmt: skip
    ids = torch.randint(0, 3, (200, 2), generator=torch.Generator().manual_seed(1))
    ids[ids == 1] = 3
    x = torch.randn(200, hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = [[t.to(device)] for t in (x, ids, torch.ones(200, 2))]
    blocked, plain = (
        VirtualTokenDispatcher(1, **with_options(**settings, scale_layout=s)).dispatch(*given)[0]
        for s in ("blocked", None)
    )
    return blocked, plain


def dequantized_matmul(plain: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of groups times their experts' weights, in float64, of row-major scales."""
    x, w = expanded(plain.x.cpu(), plain.scale.cpu()).double(), expanded(weight, scale).double()
    ends = [0, *plain.offsets.tolist()]
    return torch.cat([x[a:b] @ w[g].t() for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False))])


@pytest.mark.gpu
def test_scaled_grouped_mm() -> None:
    """torch's kernel on the blocks: a GPU that has it, of compute capability 10 or more."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("no NVIDIA GPU")
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip(f"compute capability {torch.cuda.get_device_capability()}; MXFP8 grouped GEMMs need 10.0")
    hidden, out = 256, 128
    blocked, plain = dispatched(hidden, 32, "cuda")
    weight, scale = mxfp8_weights(4, out, hidden)
    of_weight = torch.stack([to_blocked(s.view(torch.uint8)) for s in scale]).view(torch.float8_e8m0fnu).cuda()
    got = torch._scaled_grouped_mm(
        blocked.x, weight.cuda().transpose(1, 2), blocked.scale, of_weight, blocked.offsets, out_dtype=torch.bfloat16
    )
    want = dequantized_matmul(plain, weight, scale)
    # Sums in float32, of which the result is rounded to bfloat16.
    error = (got[: len(want)].cpu().double() - want).abs()
    assert (error <= 2.0**-8 * want.abs() + 1e-3).all()
