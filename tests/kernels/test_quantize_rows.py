"""quantize_rows and copy_columns equal their definitions, bit for bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from shardweave.kernels import QUANTIZATIONS, Quantization, copy_columns, dequantize_rows, quantize_rows
from shardweave.kernels.tokens.quantize_rows import quantize_rows_reference

DTYPES = torch.float32, torch.bfloat16, torch.float16


def rows_of(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes: zeros of both signs, subnormals, the largest, infinities and NaN among them."""
    g = torch.Generator().manual_seed(tokens * 1000 + hidden)
    x = torch.randn(tokens, hidden, generator=g) * torch.exp2(torch.randint(-30, 30, (tokens, 1), generator=g).float())
    x[torch.rand(x.shape, generator=g) < 0.1] *= 1e-4
    info, cases = torch.finfo(dtype), []
    cases += [x[0] * 0, -x[0] * 0, x[0].sign() * info.max, x[0].sign() * info.smallest_normal / 4]
    cases += [torch.where(torch.arange(hidden) % 50 == 7, value, x[1]) for value in (math.inf, -math.inf, math.nan)]
    return torch.cat((x, torch.stack(cases)[:, :hidden])).to(dtype)


def packed(x: torch.Tensor, how: Quantization) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return elements, scales and the packed rows of `quantize_rows`."""
    hidden, scales = x.shape[1], how.scales(x.shape[1])
    scales_at = -(-hidden // 16) * 16
    nbytes = scales * how.scale_dtype.itemsize
    out = torch.full((len(x), -(-(scales_at + nbytes) // 16) * 4), -7, dtype=torch.int32)
    quantize_rows(x, out, scales_at, how)
    data = out.view(torch.uint8)
    elements = data[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    return elements, data[:, scales_at : scales_at + nbytes].contiguous().view(how.scale_dtype), out


def check(x: torch.Tensor, how: Quantization) -> None:
    elements, scales, out = packed(x, how)
    want, want_scales = quantize_rows_reference(x, how)
    # NaN's sign is that of the definition, which sets it.
    assert torch.equal(elements.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
    rest = out.view(torch.uint8).clone()
    rest[:, : x.shape[1]] = 249
    at = -(-x.shape[1] // 16) * 16
    rest[:, at : at + scales.view(torch.uint8).shape[1]] = 249
    poison = torch.full(out.shape, -7, dtype=torch.int32).view(torch.uint8)
    poison[:, : x.shape[1]] = 249
    poison[:, at : at + scales.view(torch.uint8).shape[1]] = 249
    assert torch.equal(rest, poison)  # other bytes are not written


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("hidden", [1, 31, 32, 33, 128, 160, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_rows_cpu(name: str, hidden: int, dtype: torch.dtype) -> None:
    check(rows_of(4, hidden, dtype), QUANTIZATIONS[name])
    check_counted(rows_of(4, hidden, dtype), QUANTIZATIONS[name])


@pytest.mark.interp
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("hidden, dtype", [*product([1, 33, 160], DTYPES), (2300, torch.bfloat16)], ids=str)
def test_quantize_rows(name: str, hidden: int, dtype: torch.dtype) -> None:
    x = rows_of(2, hidden, dtype)
    check(x, QUANTIZATIONS[name])
    wide = torch.full((len(x), hidden + 3), float("nan"), dtype=dtype)
    wide[:, 1 : hidden + 1] = x
    check(wide[:, 1 : hidden + 1], QUANTIZATIONS[name])
    check(x[:0], QUANTIZATIONS[name])
    check_counted(x, QUANTIZATIONS[name])


def check_counted(x: torch.Tensor, how: Quantization) -> None:
    """Rows from `num_rows` on are not written."""
    *_, whole = packed(x, how)
    for count in (0, 1, len(x) - 1):
        out = torch.full_like(whole, -7)
        quantize_rows(x, out, -(-x.shape[1] // 16) * 16, how, torch.tensor([count], dtype=torch.int32))
        assert torch.equal(out[:count], whole[:count]) and (out[count:] == -7).all()


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_dequantize_rows_error(name: str) -> None:
    """At most half a unit in the last place of four bits, or half the least subnormal, of the scale: in float64."""
    how = QUANTIZATIONS[name]
    x = rows_of(50, 300, torch.float32)[:50]
    elements, scales, _ = packed(x, how)
    scales = scales[:, 0] if how.group is None else scales
    got = dequantize_rows(elements, scales, how, torch.float32).double()
    factor = dequantize_rows(torch.ones_like(elements), scales, how, torch.float32).double()
    bound = torch.maximum(x.double().abs() * 2**-4, factor * 2.0**-10) * (1 + 2**-20)
    assert ((got - x.double()).abs() <= bound).all()
    assert ((got - x.double()).abs() > bound / 4).any()  # the bound is that of these formats


@pytest.mark.parametrize("shape", [(3,), (7, 5), (), (0,), (2, 8), (33,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.complex128, torch.bool], ids=str)
@pytest.mark.parametrize("count", [0, 1, 6])
def test_copy_columns_cpu(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    check_columns(shape, dtype, count)


@pytest.mark.interp
@pytest.mark.parametrize("shape", [(), (0,), (5, 3), (1500,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int16], ids=str)
def test_copy_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for count in (0, 1, 6):
        check_columns(shape, dtype, count)


def check_columns(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    begin, size = 48, math.prod(shape) * dtype.itemsize
    width = -(-(begin + size + 5) // 16) * 16
    rows = torch.randint(0, 2, (6, width), dtype=torch.uint8).view(torch.int32)
    typed = torch.empty((6, *shape), dtype=dtype)
    out = torch.from_numpy(typed.view(-1).view(torch.uint8).numpy()).view(6, size).fill_(9)
    copy_columns(rows, begin, typed, torch.tensor([count], dtype=torch.int32))
    assert torch.equal(out[:count], rows.view(torch.uint8)[:count, begin : begin + size])
    assert (out[count:] == 9).all()
