"""`scale_layout="blocked"`: `routed.scale` equals the rows of scales of the same dispatch, rearranged by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import end_ranks, interpreted, run_ranks
from test_payloads import KINDS, ids_of, random_bytes, raw
from test_processes import poisoned as poison_shared_memory

from shardweave.errors import ArgumentError
from shardweave.kernels import BLOCK_ROWS, QUANTIZATIONS
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.parallel_style import ExpertParallel
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

SIZE, K, E = 3, 3, 5
NVFP4 = [(torch.uint8, 20), (torch.float8_e4m3fn, 5), (torch.float32, ())]
BYTES = [(torch.bfloat16, 3), (torch.uint8, 1)]
WIDE = [(torch.uint8, 16), (torch.float8_e8m0fnu, 130)]


def to_blocked(scales: torch.Tensor) -> torch.Tensor:
    """As torch's tests for block-scaled GEMMs rearrange a matrix of scales, padded to 128 rows and 4 columns."""
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    blocks = padded.view(len(padded) // 128, 128, padded.shape[1] // 4, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


def from_blocked(blocks: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Element by element: byte r % 32 * 16 + r // 32 * 4 + c of a block of 512."""
    wide = -(-columns // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    block = r // 128 * wide + c // 4
    return blocks.flatten()[block * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def wanted_scale(plain: Any) -> torch.Tensor:
    """The bytes of blocks of the groups of `plain`, of a dispatch without `scale_layout`."""
    scale = plain.scale.view(torch.uint8)
    if scale.dim() == 3:
        return torch.cat([to_blocked(group) for group in scale]) if len(scale) else scale.new_empty(0)
    ends = [0, *plain.offsets.tolist()]
    parts = [to_blocked(scale[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    return torch.cat(parts) if parts else scale.new_empty(0)


def check_scale(blocked: Any, plain: Any) -> None:
    n = int(plain.num_rows)
    got, want, config = blocked.scale, wanted_scale(plain), blocked._config
    assert got.dtype is plain.scale.dtype and got.is_contiguous()
    if config.batched:
        assert got.shape == (len(plain.scale), want.numel() // max(len(plain.scale), 1))
        assert raw(got) == raw(want)
    else:
        columns = plain.scale.shape[1]
        assert got.shape[1] == -(-columns // 4) * 4 and len(got) % 128 == 0
        # At least what torch's checks ask for, and no more than a block of rows for each group beside it.
        assert max(want.numel() // got.shape[1], len(plain.x)) <= len(got)
        assert len(got) <= len(plain.x) + 128 * (len(plain.offsets) + 1)
        flat = got.flatten().view(torch.uint8)
        assert raw(flat[: want.numel()]) == raw(want)
        if config.zero_rows:
            assert not flat[want.numel() :].any() and not any(raw(blocked.x[n:]))
    assert blocked.offsets.tolist() == plain.offsets.tolist() and int(blocked.num_rows) == n
    for one, other in zip(blocked.payloads[::2], plain.payloads[::2], strict=True):
        flat, same = (p.flatten(0, plain.weights.dim() - 1) for p in (one, other))
        assert raw(flat[:n]) == raw(same[:n])
    for one, other in zip(blocked.payloads[3::2], plain.payloads[3::2], strict=True):
        assert raw(one[:n]) == raw(other[:n])


def tokens_of(counts: Sequence[int], hidden: int, payloads: Any, seed: int = 0) -> tuple[list[Any], ...]:
    xs, ids, weights = [], [], []
    for r, n in enumerate(counts):
        g = torch.Generator().manual_seed(100 * seed + r)
        x = torch.randn(n, hidden, generator=g) * 2.0 ** torch.randint(-8, 8, (n, hidden), generator=g)
        xs.append(x.bfloat16() if payloads is None else random_bytes(n, payloads, seed + r))
        ids.append(ids_of(n, K, E, 10 * seed + r))
        weights.append(torch.rand(n, K, generator=g))
    return xs, ids, weights


def rows_setting(rows: Any) -> dict[str, Any]:
    return {"quantize": "mxfp8"} if rows == "mxfp8" else {"payloads": rows}


CASES: list[tuple[Any, int, list[int], dict[str, Any]]] = [
    ("mxfp8", 40, [7, 0, 5], {}),
    ("mxfp8", 40, [300, 0, 41], {"align": 32}),
    ("mxfp8", 128, [150, 200, 1], {"align": 128, "save": "copy"}),
    ("mxfp8", 4128, [9, 4, 0], {"zero_rows": True}),
    ("mxfp8", 40, [130, 90, 120], {"capacity": 0.5, "overflow": "drop", "align": 4, "zero_rows": True}),
    ("mxfp8", 160, [90, 0, 110], {"expert_capacity": 33, "overflow": "drop", "save": "copy", "zero_rows": True}),
    ("mxfp8", 40, [7, 0, 5], {"layout": "batched", "expert_capacity": 6, "overflow": "drop"}),
    ("mxfp8", 160, [70, 50, 90], {"layout": "batched", "align": 8}),
    ("mxfp8", 40, [0, 0, 0], {"align": 32, "zero_rows": True}),
    ("mxfp8", 33, [50, 60, 70], {"expert_map": [[0, 1], [4, 3, 1], [2, 0]], "align": 48}),
    ("mxfp8", 64, [50, 0, 70], {"expert_map": [[0, 1, 2, 3], [], [4]]}),
    ("mxfp8", 64, [5, 0, 7], {"expert_map": [[0, 1, 2, 3], [], [4]], "layout": "batched"}),
    (NVFP4, 40, [60, 0, 90], {"align": 8}),
    (BYTES, 40, [60, 0, 90], {"zero_rows": True}),
    (WIDE, 40, [60, 0, 90], {"layout": "batched", "expert_capacity": 130, "overflow": "drop"}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_blocks_equal_rearranged_scales(kind: str, case: int) -> None:
    rows, hidden, counts, more = CASES[case]
    nodes = {"nodes": [0, 0, 1]} if KINDS[kind].get("two_level") else {}
    settings = {"num_experts": E, "top_k": K, "hidden": hidden, "max_tokens": max(counts), **rows_setting(rows)}
    settings |= {**more, **KINDS[kind], **nodes}
    plain = VirtualTokenDispatcher(SIZE, **with_options(**settings))
    blocked = VirtualTokenDispatcher(SIZE, **with_options(**settings, scale_layout="blocked"))
    for seed in range(2):
        xs, ids, weights = tokens_of(counts, hidden, settings.get("payloads"), seed)
        for one, other in zip(blocked.dispatch(xs, ids, weights), plain.dispatch(xs, ids, weights), strict=True):
            check_scale(one, other)


def test_reference_is_undone_element_by_element() -> None:
    scales = torch.randint(0, 256, (300, 7)).to(torch.uint8)
    assert torch.equal(from_blocked(to_blocked(scales), 300, 7), scales)


@pytest.mark.parametrize("layout", ["grouped", "batched"])
def test_dequantized_rows_and_gradients_are_those_without_blocks(layout: str) -> None:
    settings: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": 40, "max_tokens": 90, "quantize": "mxfp8",
                                "layout": layout, "align": 4}  # fmt: skip
    results = []
    for more in ({}, {"scale_layout": "blocked"}):
        d = VirtualTokenDispatcher(SIZE, **with_options(**settings, **more))
        xs, ids, weights = tokens_of([90, 0, 71], 40, None)
        xs = [x.requires_grad_() for x in xs]
        routed = d.dispatch(xs, ids, [w.requires_grad_() for w in weights])
        there = [(torch.arange(r.weights.numel()).view(r.weights.shape) < r.num_rows)[..., None] for r in routed]
        rows = [torch.where(t, r.dequantized() * 3, 0) for r, t in zip(routed, there, strict=True)]
        ys = d.combine(rows, routed)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        results.append([raw(t) for t in (*rows, *ys, *(x.grad for x in xs), *(w.grad for w in weights))])
    assert results[0] == results[1]


@pytest.mark.parametrize("poison, fill", [("1", 255), ("0", None)])
def test_what_is_behind_the_last_group(monkeypatch: pytest.MonkeyPatch, poison: str, fill: int | None) -> None:
    """Bytes of ones where unused rows are poisoned; padding inside groups is zero nevertheless."""
    monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", poison)
    settings: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": 40, "max_tokens": 200, "quantize": "mxfp8"}
    plain = VirtualTokenDispatcher(SIZE, **with_options(**settings, zero_rows=False))
    blocked = VirtualTokenDispatcher(SIZE, **with_options(**settings, zero_rows=False, scale_layout="blocked"))
    given = tokens_of([200, 0, 5], 40, None)
    for one, other in zip(blocked.dispatch(*given), plain.dispatch(*given), strict=True):
        check_scale(one, other)
        rest = one.scale.flatten().view(torch.uint8)[wanted_scale(other).numel() :]
        assert len(rest) and (fill is None or (rest == fill).all())


def rounds_of(rank: int, transport: str, more: dict[str, Any], rounds: int = 3) -> int:
    """Several dispatches of one shape, and of others; earlier results stay as they are. Returns the checks made."""
    poison_shared_memory()
    rows, hidden = more.pop("rows", "mxfp8"), more.pop("hidden", 40)
    settings = {"num_experts": E, "top_k": K, "hidden": hidden, "max_tokens": 90, **rows_setting(rows), **more}
    plain = TokenDispatcher(**with_options(**settings, transport=transport))
    blocked = TokenDispatcher(**with_options(**settings, transport=transport, scale_layout="blocked"))
    held = []
    for i in range(rounds):
        counts = ([90, 0, 71], [90, 0, 71], [0, 0, 0], [5, 3, 88])[i % 4]
        xs, ids, weights = (of[rank] for of in tokens_of(counts, hidden, settings.get("payloads"), i))
        with torch.no_grad():
            pair = blocked.dispatch(xs, ids, weights), plain.dispatch(xs, ids, weights)
            held.append(pair)
            for of_round in held:
                check_scale(*of_round)
            ones = torch.ones(*pair[0].weights.shape, hidden, dtype=torch.bfloat16)
            ys = [d.combine(ones, r) for d, r in zip((blocked, plain), pair, strict=True)]
        assert raw(ys[0]) == raw(ys[1])
        del held[:-2]
    if rows == "mxfp8":  # in two phases, and with gradients
        x = xs.clone().requires_grad_()
        routed = blocked.dispatch_start(x, ids, weights).finish()
        check_scale(routed, plain.dispatch(xs, ids, weights))
        blocked.combine(routed.dequantized(), routed).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
    return rounds


OF_RANKS: list[dict[str, Any]] = [{"align": 32, "pooled_buffers": 3}, {"layout": "batched", "hidden": 160},
                                  {"rows": NVFP4, "save": "copy", "zero_rows": True}]  # fmt: skip


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical", "symmetric_memory"])
def test_blocks_among_processes(transport: str) -> None:
    for more in OF_RANKS:
        assert run_ranks(rounds_of, SIZE, transport, more, 4) == [4] * SIZE


@pytest.mark.multi
def test_blocks_between_nodes_and_once_for_each_rank() -> None:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"}
    for transport in ("hierarchical", "process_group"):
        run_ranks(rounds_of, SIZE, transport, {"two_level": True}, environment=nodes)
    run_ranks(rounds_of, SIZE, "symmetric_memory", {"dedupe": True, "align": 8})


def in_the_interpreter(rank: int) -> list[int]:
    """By the kernels of launches, and again by repeated ones, with and without copies out of a window."""
    of = [{"align": 32, "pooled_buffers": 3}, {"align": 8, "dedupe": True}, {"layout": "batched", "expert_capacity": 9,
          "overflow": "drop"}, {"rows": NVFP4, "save": "copy", "zero_rows": True}]  # fmt: skip
    return [rounds_of(rank, "symmetric_memory", more, 2) for more in of]


@pytest.mark.multi
@pytest.mark.long
def test_blocks_by_interpreted_kernels() -> None:
    code = f"t.run_ranks(t.in_the_interpreter, {SIZE}, timeout=280)"
    assert interpreted("test_scale_layout", code) == repr([[2] * 4] * SIZE)


COMPILED: list[dict[str, Any]] = [{"align": 8}, {"layout": "batched"}, {"zero_rows": True}]


def compiled_rounds(rank: int, backend: str, settings: list[dict[str, Any]]) -> None:
    """Under torch.compile, equal to eager results."""
    for more in settings:
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
        again, of_graph, ends = torch.compile(layer, backend=backend, fullgraph=True)(*xs)
        assert raw(y) == raw(again) and offsets.tolist() == ends.tolist() and scale.shape == of_graph.shape
        assert of_graph.is_contiguous()
        sizes = offsets.diff(prepend=offsets.new_zeros(1))
        kept = scale.numel()
        if not d.config.batched and not d.config.zero_rows:
            kept = int((-(-sizes // 128) * 128).sum()) * scale.shape[1]
        assert raw(scale.flatten()[:kept]) == raw(of_graph.flatten()[:kept])


@pytest.mark.multi
@pytest.mark.parametrize(
    "backend, settings",
    [
        ("aot_eager", COMPILED[:2]),
        pytest.param("aot_eager", COMPILED[2:], marks=pytest.mark.long),
        pytest.param("inductor", COMPILED, marks=pytest.mark.long),
    ],
)
def test_blocks_in_compiled_graphs(backend: str, settings: list[dict[str, Any]]) -> None:
    run_ranks(compiled_rounds, 2, backend, settings, timeout=300)


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


@pytest.mark.parametrize(
    "given", [{"scale_layout": "blocked"}, {"payloads": NVFP4}, {"quantize": "mxfp8"}, {"layout": "batched"}]
)
def test_callers_that_pass_rows_to_experts_refuse_options_of_rows(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(given))}: .*; allowed here: .*, since the module gets"):
        ExpertParallel(top_k=K, hidden=8, max_tokens=9, options=DispatchOptions(**given))


def refusing(rank: int, settings: list[dict[str, Any]]) -> str:
    d = TokenDispatcher(**with_options(**SETTINGS, transport="shared_memory", **settings[rank]))
    d.dispatch(torch.zeros(4, 40, dtype=torch.bfloat16), torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K))
    return "dispatched"


@pytest.mark.multi
def test_ranks_that_refuse_or_disagree() -> None:
    """Before anything is dispatched; a peer that does not refuse is told."""
    wrong: dict[str, Any] = {"scale_layout": "blocked", "quantize": "fp8_row"}
    right: dict[str, Any] = {"scale_layout": "blocked", "quantize": "mxfp8"}
    ends = end_ranks(refusing, 2, [wrong, wrong])
    assert [end.error for end in ends] == ["ArgumentError"] * 2
    ends = end_ranks(refusing, 2, [wrong, right])
    assert ends[0].error == "ArgumentError" and "scale_layout: 'blocked'" in ends[0].message
    assert ends[1].error and "scale_layout" in ends[1].message
    ends = end_ranks(refusing, 2, [right, {"quantize": "mxfp8"}])
    assert all(end.error for end in ends)


def test_fingerprints_differ() -> None:
    configs = [DispatchConfig(2, **SETTINGS, quantize="mxfp8", scale_layout=s) for s in (None, "blocked")]
    assert configs[0] != configs[1] and configs[0].fingerprint(0) != configs[1].fingerprint(0)


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


def test_emulated_grouped_matmul() -> None:
    """What a grouped GEMM reads by the ends of groups alone: scales in blocks of 128 by 4, groups from multiples of 128
    rows on."""
    hidden, out = 96, 24
    blocked, plain = dispatched(hidden, 32)
    weight, scale = mxfp8_weights(4, out, hidden)
    flat, ends, begin, parts = blocked.scale.flatten().view(torch.uint8), [0, *blocked.offsets.tolist()], 0, []
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        size = -(-(b - a) // BLOCK_ROWS) * BLOCK_ROWS * blocked.scale.shape[1]
        of_rows = from_blocked(flat[begin : begin + size], b - a, hidden // 32).view(torch.float8_e8m0fnu)
        parts.append(expanded(blocked.x[a:b], of_rows) @ expanded(weight[g], scale[g]).t())
        begin += size
    want = dequantized_matmul(plain, weight, scale)
    got = torch.cat(parts)
    assert ends[2] == ends[1] and max(b - a for a, b in zip(ends, ends[1:], strict=False)) > BLOCK_ROWS
    assert got.shape == want.shape and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
    assert want.abs().max() > 1


def test_shapes_pass_the_checks_of_scaled_grouped_mm() -> None:
    """Of torch's own meta function."""
    hidden, out = 96, 32
    blocked, _ = dispatched(hidden, 32)

    def meta(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    weight = torch.empty(4, out, hidden, dtype=torch.float8_e4m3fn, device="meta").transpose(1, 2)
    of_weight = torch.empty(4, 128 * 4, dtype=torch.float8_e8m0fnu, device="meta")
    y = torch._scaled_grouped_mm(meta(blocked.x), weight, meta(blocked.scale), of_weight, meta(blocked.offsets))
    assert y.shape == (len(blocked.x), out)


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
