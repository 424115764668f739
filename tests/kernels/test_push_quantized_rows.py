"""Rows quantized by the launch that pushes them: bit for bit what their definition stores, and nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from test_quantize_rows import rows_of as values_of
from test_token_kernels import CASES, DTYPES, random_case, rows_of, same

from shardweave.kernels import QUANTIZATIONS, Buffers, PhysicalExperts, QuantizedRows, TokenRows, offer_rows, push_rows
from shardweave.kernels.tokens.group_rows import Groups
from shardweave.kernels.tokens.push_rows import push_rows_reference
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference
from shardweave.kernels.tokens.rows import RowLaunch
from shardweave.runtime.moe.packed_rows import packed_rows

POISON = -7
FORMS = list(product(QUANTIZATIONS, DTYPES, (1, 33, 160, 300)))


def packing(quantize: str, hidden: int) -> tuple[QuantizedRows, int]:
    """How rows are quantized, and the words of a row."""
    packed = packed_rows("quantize", quantize, hidden)
    assert packed is not None
    return QuantizedRows(QUANTIZATIONS[quantize], packed.begins[1]), packed.words


def by_definition(x: torch.Tensor, quantize: str) -> torch.Tensor:
    """Packed rows, int32; bytes of neither elements nor scales are POISON."""
    quantized, words = packing(quantize, x.shape[1])
    elements, scales = (part.view(torch.uint8) for part in quantize_rows_reference(x.cpu(), quantized.how))
    rows = torch.full((len(x), words), POISON, dtype=torch.int32)
    data = rows.view(torch.uint8)
    data[:, : x.shape[1]] = elements
    data[:, quantized.scales_at : quantized.scales_at + scales.shape[1]] = scales
    return rows


def tokens_like(rng: np.random.Generator, tokens: int, hidden: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of all magnitudes, with infinities and NaN, in any order; a slice of something wider, at an odd place."""
    values = values_of(5, hidden, dtype)
    x = torch.full((tokens, hidden + 3), float("nan"), dtype=dtype)
    x[:, 1 : hidden + 1] = values[torch.from_numpy(rng.integers(0, len(values), tokens))]
    return x.to(device)[:, 1 : hidden + 1]


def check_push(
    rng: np.random.Generator,
    case: Any,
    form: tuple[str, torch.dtype, int],
    device: str,
    launch: RowLaunch | None = None,
) -> None:
    quantize, dtype, hidden = form
    quantized, words = packing(quantize, hidden)
    physical_experts = PhysicalExperts.divided(case.bounds, torch.device(device))
    buffers = [torch.full((case.capacity, words), POISON, dtype=torch.int32, device=device) for _ in range(case.ranks)]
    numbers = [torch.full((case.capacity,), float("nan"), device=device) for _ in range(case.ranks)]
    want, want_numbers = [b.cpu().clone() for b in buffers], [n.cpu().clone() for n in numbers]
    for rank in range(case.ranks):
        rows, groups = rows_of(case, rank, device, physical_experts)
        tokens, k = case.ids[rank].shape
        x, weights = tokens_like(rng, tokens, hidden, dtype, device), torch.rand(tokens, k + 1, device=device)[:, :k]
        push_rows(
            x, rows, Buffers(buffers), groups, rank, weights, Buffers(numbers), int(rng.choice([1, 12])), launch,
            quantized=quantized,
        )  # fmt: skip
        given = TokenRows(rows.key.cpu(), rows.row.cpu()), want, Groups(*[g.cpu() for g in groups])
        push_rows_reference(by_definition(x, quantize), *given, rank, weights.cpu(), want_numbers)
    for got, expected in zip(buffers + numbers, want + want_numbers, strict=True):
        same(got, expected)


@pytest.mark.parametrize("kind, given", CASES, ids=lambda v: v if isinstance(v, str) else str(v)[:60])
def test_push_quantized_rows(device: str, kind: str, given: dict[str, Any]) -> None:
    """Holes, hot ranks, no tokens, capacities, padding; forms rotate from case to case."""
    rng, number = np.random.default_rng(7), CASES.index((kind, given))
    for form in FORMS[number :: len(CASES)][:1] if device == "cpu" else FORMS:
        check_push(rng, random_case(np.random.default_rng(number), kind, **given), form, device)


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("hidden, launch", [(2300, None), (300, RowLaunch(128, 1)), (20, RowLaunch(8, 1))])
def test_push_quantized_rows_in_several_blocks(
    device: str, quantize: str, hidden: int, launch: RowLaunch | None
) -> None:
    """Some of which have fewer columns than a scale."""
    rng = np.random.default_rng(1)
    case = random_case(rng, "odd", k=3, tokens=[4, 2, 0], align=4)
    check_push(rng, case, (quantize, torch.bfloat16, hidden), device, launch)


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_push_quantized_rows_on_the_cpu(quantize: str) -> None:
    """As rows that quantize_rows cast before; other bytes of a row are undefined."""
    x = values_of(2, 160, torch.bfloat16)
    quantized, words = packing(quantize, 160)
    key = torch.arange(len(x), dtype=torch.int32)[:, None] * 0
    rows = TokenRows(key, torch.arange(len(x), dtype=torch.int32)[:, None])
    groups = Groups(*[torch.zeros(1, dtype=torch.int64) for _ in Groups._fields])
    out = torch.full((len(x), words), POISON, dtype=torch.int32)
    push_rows(x, rows, Buffers([out]), groups, 0, most_padding=0, quantized=quantized)
    want, nbytes = by_definition(x, quantize), quantized.how.scales(160) * quantized.how.scale_dtype.itemsize
    for begin, end in ((0, 160), (quantized.scales_at, quantized.scales_at + nbytes)):
        same(out.view(torch.uint8)[:, begin:end], want.view(torch.uint8)[:, begin:end])


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("dtype, hidden", [(torch.bfloat16, 300), (torch.float32, 33)], ids=str)
def test_offer_rows_quantizes(device: str, quantize: str, dtype: torch.dtype, hidden: int) -> None:
    """Rows below the count, and no other bytes; a word for every rank."""
    quantized, words = packing(quantize, hidden)
    x = tokens_like(np.random.default_rng(3), 6, hidden, dtype, device)
    for number in (0, 4, 6):
        target = torch.full((6, words), POISON, dtype=torch.int32, device=device)
        tables = [torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2)]
        num_rows = torch.tensor([number], dtype=torch.int32, device=device)
        offer_rows(x, target, num_rows, Buffers(tables), 1, 9, quantized=quantized)
        want = torch.full((6, words), POISON, dtype=torch.int32)
        want[:number] = by_definition(x, quantize)[:number]
        same(target, want)
        assert all(table.tolist() == [0, 9, 0] for table in tables)
