"""Payloads of any dtype, forwarded byte for byte: equal to indexing the caller's tensors by an oracle from the ids."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import interpreted, run_ranks
from test_processes import poisoned as poison_shared_memory
from torch.utils import _pytree

from shardweave.errors import ArgumentError
from shardweave.kernels import QUANTIZATIONS
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference
from shardweave.runtime.moe.config import DispatchConfig
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.statistics import stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
H = 40
FP8 = [(torch.float8_e4m3fn, H), (torch.float32, 3)]
FP4 = [(torch.uint8, H // 2), (torch.float8_e8m0fnu, (3,)), (torch.float32, ())]
ALL = [
    (torch.float8_e5m2, (3, 5)), (torch.bool, ()), (torch.complex128, (2, 1)), (torch.int64, 3), (torch.bfloat16, 0),
    (torch.float16, 17), (torch.float4_e2m1fn_x2, 9),
]  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "pushed": {}, "exact chunks": {"one_sided": False}, "fixed chunks": {"one_sided": False, "chunk_capacity": 1 << 20},
    "two levels": {"one_sided": False, "two_level": True},
    "two levels fixed": {"one_sided": False, "two_level": True, "chunk_capacity": 1 << 20},
}  # fmt: skip


def raw(x: torch.Tensor) -> bytes:
    # Contiguous tensors of one row or none may have any strides.
    return x.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def random_bytes(tokens: int, payloads: Sequence[Any], seed: int) -> list[torch.Tensor]:
    """Payloads of random bytes, so NaN of all kinds among them, of which some have strides."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, (dtype, shape) in enumerate(payloads):
        dims = (shape,) if isinstance(shape, int) else shape
        most = 2 if dtype is torch.bool else 256
        if i % 2 and dims and dims[-1]:  # every second element, or every second row
            wide = torch.randint(0, most, (tokens, *dims[:-1], 2 * dims[-1] * dtype.itemsize), generator=g)
            made.append(wide.to(torch.uint8).view(dtype)[..., ::2] if seed % 2 else _odd_rows(wide, dtype, dims))
        else:
            flat = torch.randint(0, most, (tokens, *dims, dtype.itemsize), generator=g).to(torch.uint8)
            made.append(flat.view(dtype).view(tokens, *dims))
    return made


def _odd_rows(wide: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> torch.Tensor:
    """Rows that begin with the second element of wider ones."""
    return wide.to(torch.uint8).view(dtype)[..., 1 : dims[-1] + 1]


def ids_of(tokens: int, k: int, experts: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, experts, (tokens, k), generator=torch.Generator().manual_seed(77 + seed))


def to_blocked(scales: torch.Tensor) -> torch.Tensor:
    """As torch's tests for block-scaled GEMMs rearrange a matrix of scales, padded to 128 rows and 4 columns."""
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    blocks = padded.view(len(padded) // 128, 128, padded.shape[1] // 4, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


Row = tuple[int, int, int] | None


def rows_of_ranks(ids: Sequence[torch.Tensor], experts_of: Sequence[Sequence[int]], config: Any) -> list[list[Row]]:
    """Return (source rank, token, k) of each row of each rank's buffer, up to the end of the last group; None: padding.

    Args:
        experts_of: the experts of each rank's physical experts.
    """
    places = [(rank, expert) for rank, experts in enumerate(experts_of) for expert in experts]
    bounds = [0, *accumulate(map(len, experts_of))]
    groups: list[list[Row]] = [[] for _ in places]
    for source, of_rank in enumerate(ids):
        for t, of_token in enumerate(of_rank.tolist()):
            for k, expert in enumerate(of_token):
                if expert >= 0:
                    replicas = [p for p, (_, e) in enumerate(places) if e == expert]
                    own = [p for p in replicas if places[p][0] == source]
                    groups[own[0] if own else replicas[source % len(replicas)]].append((source, t, k))
    ranks: list[list[Row]] = []
    for rank in range(len(experts_of)):
        rows: list[Row] = []
        for group in groups[bounds[rank] : bounds[rank + 1]]:
            kept = group if config.expert_capacity is None else group[: config.expert_capacity]
            length = config.expert_capacity if config.batched else -(-len(kept) // config.align) * config.align
            rows += [*kept, *[None] * (length - len(kept))]
        ranks.append(rows[: config.rows])
    return ranks


def expected(rows: Sequence[Row], of_ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Index the tensors of all ranks; padding is zero."""
    like = of_ranks[0]
    size = like.dtype.itemsize * like.shape[1:].numel()
    parts = [
        torch.zeros(size, dtype=torch.uint8)
        if row is None
        else torch.frombuffer(bytearray(raw(of_ranks[row[0]][row[1]])), dtype=torch.uint8)
        if size
        else torch.zeros(0, dtype=torch.uint8)
        for row in rows
    ]
    return torch.stack(parts) if parts else torch.zeros(0, size, dtype=torch.uint8)


def check_blocks(routed: Any, scales: torch.Tensor, config: Any) -> None:
    """`scales`: the bytes of all rows, [n, columns]."""
    got, lead = routed.scale, routed.weights.shape
    ends = [0, *routed.offsets.tolist()] if len(lead) == 1 else range(0, len(scales) + 1, max(lead[1], 1))
    groups = [to_blocked(scales[a:b]) for a, b in pairwise(ends)]
    want = torch.cat(groups) if groups else scales.new_empty(0)
    flat = got.flatten().view(torch.uint8)
    assert got.is_contiguous() and raw(flat[: len(want)]) == raw(want)
    if len(lead) == 2:
        assert got.shape == (lead[0], len(want) // max(lead[0], 1))
        return
    assert got.shape[1] == -(-scales.shape[1] // 4) * 4 and len(got) % 128 == 0
    # At least what torch's checks ask for, and no more than a block of rows for each group beside it.
    assert len(routed.x) <= len(got) <= len(routed.x) + 128 * (len(routed.offsets) + 1)
    assert not config.zero_rows or not flat[len(want) :].any()


def check_routed(
    routed: Any,
    rows: Sequence[Row],
    payloads: Sequence[Sequence[torch.Tensor]],
    weights: Sequence[torch.Tensor],
    config: DispatchConfig,
) -> None:
    """`payloads`: of each rank."""
    lead = routed.weights.shape
    n = int(routed.num_rows)
    assert n == len(rows)
    for i, payload in enumerate(routed.payloads):
        if i == 1 and config.scale_layout == "blocked":
            assert payload.dtype is payloads[0][i].dtype
            check_blocks(routed, expected(rows, [of_rank[i] for of_rank in payloads]), config)
            continue
        assert payload.shape == (*lead, *payloads[0][i].shape[1:]) and payload.dtype is payloads[0][i].dtype
        got = payload.flatten(0, len(lead) - 1) if len(lead) > 1 else payload
        want = expected(rows, [of_rank[i] for of_rank in payloads])
        assert raw(got[:n]) == want.numpy().tobytes(), f"payload {i}"
        assert i == 0 or payload.is_contiguous()
        if config.zero_rows:
            assert not any(raw(got[n:]))
    of_rows = [0.0 if row is None else float(weights[row[0]][row[1], row[2]]) for row in rows]
    assert routed.weights.flatten()[:n].tolist() == of_rows
    assert routed.x is routed.payloads[0] and len({p.data_ptr() % 16 for p in routed.payloads[:1]} - {0}) == 0


def cases() -> Iterator[Any]:
    more: list[dict[str, Any]] = [
        {}, {"align": 8}, {"save": "copy", "zero_rows": True}, {"capacity": 0.5, "overflow": "drop", "align": 4},
        {"expert_capacity": 3, "overflow": "drop"}, {"layout": "batched", "expert_capacity": 6, "overflow": "drop"},
        {"layout": "batched", "align": 8}, {"expert_map": [[0, 1], [4, 3, 1], [2, 0]]},
    ]  # fmt: skip
    for kind in KINDS:
        for i, settings in enumerate(more):
            yield pytest.param(kind, (FP8, FP4, ALL)[i % 3], settings, [7, 0, 5], id=f"{kind}-{i}")
        for payloads, settings, counts in BLOCKED:
            yield pytest.param(kind, payloads, {**settings, "scale_layout": "blocked"}, counts, id=f"{kind}-{settings}")


WIDE = [(torch.uint8, 16), (torch.float8_e8m0fnu, 130)]
BLOCKED: list[tuple[Any, dict[str, Any], list[int]]] = [
    (WIDE, {"align": 32}, [150, 0, 41]), (WIDE, {"zero_rows": True}, [9, 4, 0]), (FP4, {}, [0, 0, 0]),
    (FP4, {"expert_capacity": 33, "overflow": "drop", "save": "copy", "zero_rows": True}, [90, 0, 110]),
    (FP4, {"layout": "batched", "expert_capacity": 130, "overflow": "drop"}, [60, 0, 90]),
    (FP4, {"expert_map": [[0, 1], [4, 3, 1], [2, 0]], "align": 48}, [50, 60, 70]),
    (FP4, {"expert_map": [[0, 1, 2, 3], [], [4]], "layout": "batched"}, [5, 0, 7]),
]  # fmt: skip


@pytest.mark.parametrize("kind, payloads, settings, counts", list(cases()))
def test_payloads_equal_indexing(kind: str, payloads: Any, settings: dict[str, Any], counts: list[int]) -> None:
    check_virtual(kind, payloads, settings, counts, 5, 3)


def check_virtual(
    kind: str, payloads: Any, settings: dict[str, Any], counts: list[int], experts: int, k: int, seed: int = 0
) -> None:
    size = len(counts)
    nodes = {"nodes": [r // 2 for r in range(size)]} if KINDS[kind].get("two_level") else {}
    d = VirtualTokenDispatcher(
        size,
        **with_options(
            num_experts=experts,
            top_k=k,
            hidden=H,
            max_tokens=max(counts),
            payloads=payloads,
            **settings,
            **KINDS[kind],
            **nodes,
        ),
    )
    given = [random_bytes(n, payloads, seed + r) for r, n in enumerate(counts)]
    ids = [ids_of(n, k, experts, seed + r) for r, n in enumerate(counts)]
    weights = [torch.rand(n, k, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(counts)]
    experts_of = settings.get("expert_map") or [
        list(range(*d.config.bounds[r : r + 2])) for r in range(size)
    ]  # fmt: skip
    rows = rows_of_ranks(ids, experts_of, d.config)
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            routed = d.dispatch(given, ids, [w.clone().requires_grad_(recorded) for w in weights])
        for r, of_rank in zip(routed, rows, strict=True):
            check_routed(r, of_rank, given, weights, d.config)
    with torch.no_grad():
        outputs = [torch.ones(*r.weights.shape, H, dtype=torch.bfloat16) for r in routed]
        ys = d.combine(outputs, routed, weighted=False)
    for rank, y in enumerate(ys):
        kept = [sum((rank, t, i) in of_rank for of_rank in rows for i in range(k)) for t in range(counts[rank])]
        assert torch.equal(y, torch.tensor(kept, dtype=torch.bfloat16)[:, None].expand(-1, H))


def test_payloads_of_odd_memory() -> None:
    """Expanded, transposed, conjugated and negated tensors, of a single token as well."""
    z, many = torch.randn(5, 3, dtype=torch.complex64), [(torch.complex64, 3)] * 2 + [(torch.float32, (2, 3))] * 3
    many.append((torch.complex128, ()))
    wide = torch.arange(6.0).view(1, 6)
    given = [z.conj(), z.t().contiguous().t(), torch.arange(6.0).view(2, 3).expand(5, 2, 3),
             torch.randn(3, 2, 5).permute(2, 1, 0), z.conj().imag[:, None].expand(5, 2, 3),
             torch.randn(5, 7, dtype=torch.complex128)[:, 3]]  # fmt: skip
    assert given[0].is_conj() and given[4].is_neg()
    for n in (5, 1):
        d = VirtualTokenDispatcher(
            1,
            num_experts=1,
            top_k=1,
            hidden=2,
            max_tokens=5,
            options=DispatchOptions(payloads=[*many, (wide.dtype, 6)]),
        )
        payloads = [p[:n] for p in given] + [wide.expand(n, 6)]
        (r,) = d.dispatch([payloads], [torch.zeros(n, 1, dtype=torch.int64)], [torch.ones(n, 1)])
        for got, want in zip(r.payloads, payloads, strict=True):
            assert torch.equal(got[:n], want)


@pytest.mark.long
def test_random_payloads_and_settings() -> None:
    draw = random.Random(3)
    for seed in range(6 * LONG_PARTS):
        size = draw.randint(1, 5)
        counts = [draw.randint(0, 9) for _ in range(size)]
        experts, k = draw.choice([1, 3, 8, 20]), draw.randint(1, 5)
        settings: dict[str, Any] = {"align": draw.choice([1, 4]), "save": draw.choice(["buffer", "copy"])}
        settings["zero_rows"] = draw.choice([True, False])
        if draw.random() < 0.4:
            settings |= {"overflow": "drop", "expert_capacity": draw.randint(0, 6)}
            if draw.random() < 0.5:
                settings["layout"] = "batched"
        elif draw.random() < 0.4:
            settings |= {"overflow": "drop", "capacity": draw.choice([0, 4, 0.5])}
        if draw.random() < 0.4:
            settings["expert_map"] = [
                [e for e in range(experts) if draw.random() < 0.5 or e % size == r] for r in range(size)
            ]
        payloads = draw.sample([*FP8, *FP4, *ALL], draw.randint(1, 6))
        if payloads[1:2] == FP4[1:2]:
            settings["scale_layout"] = draw.choice([None, "blocked"])
        check_virtual(draw.choice(list(KINDS)), payloads, settings, counts, experts, k, seed)


SETTINGS: dict[str, Any] = {"num_experts": 5, "top_k": 3, "hidden": H, "max_tokens": 12, "align": 4}


def forwarded(rank: int, transport: str, settings: dict[str, Any], rounds: int = 4) -> int:
    """Dispatch and compare on one of three ranks, which computes what all have; returns the number of host copies."""
    poison_shared_memory()
    size, experts_of = 3, [[0, 1], [2, 3], [4]]
    payloads = settings.pop("payloads")
    d = TokenDispatcher(**with_options(**SETTINGS, payloads=payloads, transport=transport, **settings))
    held = []
    for i in range(rounds):
        counts = [(5 * r + 3 * i) % 13 for r in range(size)]
        given = [random_bytes(n, payloads, 10 * i + r) for r, n in enumerate(counts)]
        ids = [ids_of(n, 3, 5, 10 * i + r) for r, n in enumerate(counts)]
        weights = [torch.rand(n, 3, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(counts)]
        w = weights[rank].clone().requires_grad_(i % 2 == 0)
        if i % 3 or len(payloads) != 2:
            routed = d.dispatch(given[rank], ids[rank], w)
        else:
            routed = d.dispatch(given[rank][0], ids[rank], w, scale=given[rank][1])
        rows = rows_of_ranks(ids, experts_of, d.config)
        check_routed(routed, rows[rank], given, weights, d.config)
        held.append((routed, rows[rank], given, weights))
        output = routed.output_buffer()
        assert output.shape == (*routed.weights.shape, H) and output.dtype is torch.bfloat16
        with torch.no_grad():
            output.fill_(1)
        if w.requires_grad:  # the backward of dispatch and of combine are collective
            y = d.combine(output * routed.weights.detach()[..., None].gt(0), routed)
            y.float().sum().backward()
            assert w.grad is not None and w.grad[ids[rank] < 0].abs().sum() == 0
        else:
            d.combine(output, routed)
        if len(held) > 2:
            held.pop(0)
        for earlier in held:  # nobody has written to their memory
            check_routed(*earlier, d.config)
    d.check()
    return stats().copies.total()


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical", "symmetric_memory"])
def test_payloads_among_processes(transport: str) -> None:
    run_ranks(forwarded, 3, transport, {"payloads": FP8})
    run_ranks(forwarded, 3, transport, {"payloads": ALL, "layout": "batched", "zero_rows": None})
    run_ranks(forwarded, 3, transport, {"payloads": FP4, "scale_layout": "blocked", "pooled_buffers": 3})


@pytest.mark.multi
@pytest.mark.parametrize(
    "transport, two_level", [("hierarchical", True), ("hierarchical", False), ("process_group", True)]
)
def test_payloads_between_nodes(transport: str, two_level: bool) -> None:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"}
    settings = {"payloads": FP4, "scale_layout": "blocked", "two_level": two_level}
    run_ranks(forwarded, 3, transport, settings, environment=nodes)


@pytest.mark.multi
def test_payloads_in_pooled_buffers() -> None:
    """Packed rows and lent outputs take turns with the pooled buffers: few of them cost copies, which are right too."""
    assert run_ranks(forwarded, 3, "symmetric_memory", {"payloads": FP8, "pooled_buffers": 8}) == [0, 0, 0]
    assert all(n > 0 for n in run_ranks(forwarded, 3, "symmetric_memory", {"payloads": FP8, "pooled_buffers": 2}))
    run_ranks(forwarded, 3, "symmetric_memory", {"payloads": FP8, "save": "copy", "zero_rows": True})
    run_ranks(forwarded, 3, "symmetric_memory", {"payloads": FP4, "scale_layout": "blocked", "dedupe": True})


def in_the_interpreter(rank: int) -> int:
    settings = {"payloads": FP4, "scale_layout": "blocked", "pooled_buffers": 8}
    return forwarded(rank, "symmetric_memory", settings, rounds=2)


@pytest.mark.multi
def test_payloads_by_interpreted_kernels() -> None:
    assert interpreted("test_payloads", "t.run_ranks(t.in_the_interpreter, 3)") == "[0, 0, 0]"


BLOCKS = {"quantize": "mxfp8", "scale_layout": "blocked"}
HOW: dict[str, dict[str, Any]] = {
    **{name: {"quantize": name} for name in QUANTIZATIONS},
    "mxfp8, blocked": BLOCKS, "mxfp8, blocked, batched": {**BLOCKS, "layout": "batched"},
}  # fmt: skip


def quantized_rounds(rank: int, transport: str | None, how: str) -> list[bytes]:
    d = TokenDispatcher(**with_options(**SETTINGS, **HOW[how], transport=transport))
    return results_of(*one_round(d, [rank]))


def one_round(d: Any, ranks: Sequence[int]) -> tuple[Any, ...]:
    """Dispatch, experts on dequantized rows, combine, backward; of these ranks, with a dispatcher of one rank or of
    all."""
    g = [torch.Generator().manual_seed(r) for r in range(3)]
    xs = [torch.randn((5 * r + 4) % 13, H, generator=g[r]).bfloat16().requires_grad_() for r in ranks]
    ids = [ids_of(len(x), 3, 5, r) for x, r in zip(xs, ranks, strict=True)]
    ws = [torch.rand(ids_.shape, generator=g[r]).requires_grad_() for ids_, r in zip(ids, ranks, strict=True)]
    if isinstance(d, TokenDispatcher):
        routed = [d.dispatch(xs[0], ids[0], ws[0])]
    else:
        routed = d.dispatch(xs, ids, ws)
    experts = [(torch.arange(r.weights.numel()) % 7 + 1.0).bfloat16().view(*r.weights.shape, 1) for r in routed]
    rows = [r.dequantized() for r in routed]
    outputs = [x * e for x, e in zip(rows, experts, strict=True)]
    ys = [d.combine(outputs[0], routed[0])] if isinstance(d, TokenDispatcher) else d.combine(outputs, routed)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return xs, ids, ws, routed, rows, ys


def results_of(xs: Any, ids: Any, ws: Any, routed: Any, rows: Any, ys: Any) -> list[bytes]:
    n = [int(r.num_rows) for r in routed]
    payloads = [p for r, k in zip(routed, n, strict=True) for p in (r.x[:k], r.scale[:k])]
    gradients = [x.grad for of in (xs, ws) for x in of]
    return [raw(tensor) for tensor in (*payloads, *gradients, *ys)]


@pytest.mark.parametrize("quantize", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_rows_equal_reference(quantize: str, kind: str) -> None:
    """Elements and scales are those of the definition; gradients are those of rows that were not quantized."""
    nodes = {"nodes": [0, 1, 1]} if KINDS[kind].get("two_level") else {}
    d = VirtualTokenDispatcher(3, **with_options(**SETTINGS, **HOW[quantize], **KINDS[kind], **nodes))
    xs, ids, ws, routed, rows, ys = one_round(d, range(3))
    how = QUANTIZATIONS[quantize.split(",")[0]]
    pairs = [quantize_rows_reference(x.detach(), how) for x in xs]
    given = [[q, s[:, 0] if how.group is None else s] for q, s in pairs]
    places = rows_of_ranks(ids, [[0, 1], [2, 3], [4]], d.config)
    for r, of_rank, values in zip(routed, places, rows, strict=True):
        check_routed(r, of_rank, given, [w.detach() for w in ws], d.config)
        assert not r.x.requires_grad and values.dtype is torch.bfloat16 and r.grad_rows.requires_grad
        values = values.flatten(0, -2)
        for place, row in enumerate(of_rank):
            if row is not None:
                q, s = (t[row[1]].float() for t in given[row[0]])
                s = s if how.group is None else s.repeat_interleave(how.group)[:H]
                assert torch.equal(values[place], (q * s).bfloat16())
    plain = VirtualTokenDispatcher(3, **with_options(**SETTINGS, **KINDS[kind], **nodes, layout=d.config.layout))
    again = [x.detach().clone().requires_grad_() for x in xs]
    of_plain = plain.dispatch(again, ids, [w.detach() for w in ws])
    experts = [(torch.arange(r.weights.numel()) % 7 + 1.0).bfloat16().view(*r.weights.shape, 1) for r in of_plain]
    outputs = [r.x * e for r, e in zip(of_plain, experts, strict=True)]
    torch.autograd.backward(plain.combine(outputs, of_plain), [torch.ones_like(y) for y in ys])
    for x, other in zip(xs, again, strict=True):
        assert raw(x.grad) == raw(other.grad)


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical", "symmetric_memory"])
def test_quantized_among_processes(transport: str) -> None:
    for quantize in ("fp8_row" if transport == "shared_memory" else "fp8_128", "mxfp8, blocked"):
        d = VirtualTokenDispatcher(3, **with_options(**SETTINGS, **HOW[quantize]))
        want = one_round(d, range(3))
        got = run_ranks(quantized_rounds, 3, transport, quantize)
        for rank in range(3):
            assert got[rank] == results_of(*[part[rank : rank + 1] for part in want])


@pytest.mark.long
@pytest.mark.multi
def test_quantized_by_interpreted_kernels() -> None:
    names = ("fp8_row", "fp8_128", "mxfp8, blocked")
    d = [VirtualTokenDispatcher(3, **with_options(**SETTINGS, **HOW[how])) for how in names]
    want = [results_of(*[part[1:2] for part in one_round(of, range(3))]) for of in d]
    code = f"[t.run_ranks(t.quantized_rounds, 3, 'symmetric_memory', q)[1] for q in {names}]"
    assert interpreted("test_payloads", code) == repr(want)


def virtual(**settings: Any) -> VirtualTokenDispatcher:
    return VirtualTokenDispatcher(2, **with_options(**{**SETTINGS, **settings}))


def given(payloads: Any = FP8) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """Payloads, ids and weights of two ranks."""
    ids = [ids_of(n, 3, 5, r) for r, n in enumerate((7, 4))]
    return [random_bytes(len(i), payloads, r) for r, i in enumerate(ids)], ids, [torch.ones(i.shape) for i in ids]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"payloads": []}, "payloads: .*allowed: 1 to 16 pairs"),
        ({"payloads": "fp8"}, "payloads: 'fp8'; allowed: 1 to 16 pairs"),
        ({"payloads": [torch.uint8]}, r"payloads\[0\]: .*allowed: \(dtype, shape"),
        ({"payloads": [(torch.uint8, 3), (torch.quint8, 3)]}, r"payloads\[1\]: .*whole bytes"),
        ({"payloads": [(torch.uint8, -1)]}, r"payloads\[0\]"),
        ({"payloads": [(torch.uint8, 2.0)]}, r"payloads\[0\]"),
        ({"payloads": [(torch.uint8, (1 << 20, 1 << 20))]}, "bytes a token; allowed: 67108864"),
        ({"quantize": "fp4"}, "quantize: 'fp4'; allowed: 'fp8_row', 'fp8_128', 'mxfp8', None"),
        ({"quantize": ["mxfp8"]}, "quantize: .*; allowed: 'fp8_row'"),
        ({"quantize": "mxfp8", "payloads": FP8}, "allowed: one of them"),
        ({"quantize": "mxfp8", "save": "redispatch"}, "save: 'redispatch' with payloads"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        virtual(**settings)


def test_arguments_that_are_refused() -> None:
    d, plain, quantizing = virtual(payloads=FP8), virtual(), virtual(quantize="fp8_128")
    xs, ids, weights = given()
    wrong: list[tuple[Any, Any, str]] = [
        ([x[0] for x in xs], None, r"x\[0\]: 1 payloads; allowed: 2"),
        (xs, [x[1] for x in xs], r"x\[0\]: 3 payloads; allowed: 2"),
        ([[a.float(), b] for a, b in xs], None, r"payloads\[0\]\[0\]: torch.float32 .*allowed: torch.float8_e4m3fn"),
        ([[a, b[:, :2]] for a, b in xs], None, r"payloads\[1\]\[0\]: .*shape \(7, 2\); allowed: .*\[7, 3\]"),
        ([[a, b[1:]] for a, b in xs], None, r"payloads\[1\]\[0\]: .*shape \(6, 3\); allowed: .*\[7, 3\]"),
        ([[a, None] for a, _ in xs], None, r"payloads\[1\]\[0\]: None; allowed: a tensor"),
        ([[a.repeat(3, 1), b.repeat(3, 1)] for a, b in xs], None, r"x\[0\]: 21 tokens; allowed: up to max_tokens, 12"),
    ]
    for x, scale, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            d.dispatch(x, ids, weights, scale=scale)
    rows = [torch.ones(len(i), H, dtype=torch.bfloat16) for i in ids]
    with pytest.raises(ArgumentError, match="and scale; allowed: one tensor"):
        plain.dispatch(rows, ids, weights, scale=rows)
    with pytest.raises(ArgumentError, match="2 payloads; allowed: one tensor"):
        quantizing.dispatch(xs, ids, weights)
    with pytest.raises(ArgumentError, match="allowed: torch.bfloat16"):
        quantizing.dispatch([x.float() for x in rows], ids, weights)
    routed = d.dispatch(xs, ids, weights)
    with pytest.raises(ArgumentError, match="dequantized: of a dispatcher without quantize"):
        routed[0].dequantized()
    with pytest.raises(ArgumentError, match=r"expert_output\[0\]: torch.float8_e4m3fn .*allowed: torch.bfloat16"):
        d.combine([r.x for r in routed], routed)


def test_routed_payloads_are_a_pytree() -> None:
    for d, x in ((virtual(payloads=FP8), given()[0]), (virtual(quantize="mxfp8"), None)):
        _, ids, weights = given()
        x = x or [torch.ones(len(i), H, dtype=torch.bfloat16, requires_grad=True) for i in ids]
        routed = d.dispatch(x, ids, weights)
        leaves, spec = _pytree.tree_flatten(routed)
        for r, again in zip(routed, _pytree.tree_unflatten(leaves, spec), strict=True):
            assert again.x is r.x and again.scale is r.scale and again.grad_rows is r.grad_rows
            assert again.offsets is r.offsets and again.weights is r.weights and len(again.payloads) == 2


def test_unused_rows_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes of ones: NaN of most floats."""
    monkeypatch.setenv("SHARDWEAVE_POISON_ROWS", "1")
    for kind in ({}, {"save": "copy"}):
        d = virtual(payloads=FP8, zero_rows=False, **kind)
        for r in d.dispatch(*given()):
            n = int(r.num_rows)
            assert 0 < n < len(r.x) and r.x[n:].float().isnan().all() and r.scale[n:].isnan().all()
            assert r.weights[n:].isnan().all()


def test_explain_states_the_bytes_of_rows() -> None:
    text = virtual(quantize="fp8_128", quantize_output="fp8_row").explain()
    assert "dispatch sends 64 bytes a row: float8_e4m3fn [40], float32 [1]\n" in text
    assert "combine sends 64 bytes a row: float8_e4m3fn [40], float32 []\n" in text
    for d, row in ((virtual(payloads=[(torch.uint8, 8000)]), 8004), (virtual(), 2 * H + 4)):
        assert f"{d.config.rows * row:,}  rows received, held until backward" in d.explain()


@pytest.mark.parametrize("quantize", ["fp8_row", "mxfp8, blocked"])
def test_layouts_that_scaled_grouped_mm_takes(quantize: str) -> None:
    """By the checks of torch's own meta function."""
    k, n, experts = 64, 48, 3
    d = VirtualTokenDispatcher(
        1,
        **with_options(
            num_experts=experts,
            top_k=2,
            hidden=k,
            max_tokens=8,
            align=32 if "blocked" in quantize else 16,
            **HOW[quantize],
        ),
    )
    (r,) = d.dispatch([torch.randn(8, k).bfloat16()], [ids_of(8, 2, experts, 0)], [torch.ones(8, 2)])

    def meta(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    weight = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device="meta").transpose(1, 2)
    assert r.scale is not None
    if quantize == "fp8_row":
        of_weight = torch.empty(experts, n, device="meta")
    else:
        assert r.scale.dtype is torch.float8_e8m0fnu and r.scale.dim() == 2
        of_weight = torch.empty(experts, 128 * 4, dtype=torch.float8_e8m0fnu, device="meta")
    out = torch._scaled_grouped_mm(meta(r.x), weight, meta(r.scale), of_weight, meta(r.offsets))
    assert out.shape == (len(r.x), n) and r.x.stride(0) % 16 == 0
    with pytest.raises(RuntimeError):
        torch._scaled_grouped_mm(meta(r.x), weight, meta(r.scale)[::2], of_weight, meta(r.offsets))
