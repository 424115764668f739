from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from kernel_box_cases import Case, assert_same, random_bytes, random_case, random_values, raw, written

from shardweave.kernels import (
    LaunchConfig,
    StridedBoxes,
    reduce_boxes,
    reduce_boxes_cpu,
    reduce_table,
    reduce_views,
)

FLOATS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SMALL = LaunchConfig(tile_bytes=64, accesses_per_thread=1, num_warps=1)
SUPPORTED = (
    [(dtype, op, None) for dtype in FLOATS + INTEGERS + [torch.bool] for op in ("sum", "max", "min", "prod")]
    + [(dtype, "sum", None) for dtype in (torch.complex64, torch.complex128)]
    + [(dtype, "sum", 3) for dtype in FLOATS + [torch.complex64, torch.complex128]]
    + [(torch.float32, "prod", 0.7), (torch.bfloat16, "max", 7)]
)


def check_reduce(rng, case: Case, dtype, op, divisor, device, out_dtype=None, config=SMALL) -> None:
    """Compare with the CPU path on targets of random bytes; elements outside the boxes must not change."""
    out_dtype = out_dtype or dtype
    sources = [random_values(rng, size, dtype).to(device) for size in case.source_sizes]
    before = [random_bytes(rng, size, out_dtype) for size in case.target_sizes]
    got = [t.to(device, copy=True) for t in before]
    want = [t.clone() for t in before]
    reduce_boxes_cpu(case.boxes, [s.cpu() for s in sources], want, op, divisor)
    reduce_boxes(reduce_table(case.boxes, dtype, op, divisor, out_dtype, device, config), sources, got)
    for a, b, old, mask in zip(got, want, before, written(case.boxes, case.target_sizes), strict=True):
        np.testing.assert_array_equal(raw(a)[~mask], raw(old)[~mask])
        inside = torch.from_numpy(np.flatnonzero(mask))
        assert_same(a.cpu()[inside], b[inside], signed_zeros=op in ("sum", "prod"))


def exact(parts: list[torch.Tensor], op: str, divisor: float | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The definition in NumPy: fixed order, accumulation dtype, division, one rounding by torch's cast."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        arrays = [p.numpy() for p in parts]
        function = np.logical_or if op in ("sum", "max") else np.logical_and
    else:
        small = dtype.is_floating_point and dtype.itemsize < 4
        arrays = [(p.float() if small else p).numpy() for p in parts]
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    total = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total = function(total, array)
        if divisor is not None:
            total = (total.view(total.real.dtype) / total.real.dtype.type(divisor)).view(total.dtype)
    if out_dtype is torch.float8_e4m3fn:  # what older versions of torch make NaN
        total = np.clip(total, -448.0, 448.0)
    return torch.from_numpy(total).to(out_dtype)


@pytest.mark.parametrize(("dtype", "op", "divisor"), SUPPORTED, ids=str)
def test_reduce_views_equals_definition(dtype, op, divisor, monkeypatch):
    monkeypatch.setattr(sys.modules["shardweave.kernels.reduce_cpu"], "CHUNK", 8)
    rng = np.random.default_rng(1)
    for contributors in (1, 2, 3, 4):
        parts = [random_values(rng, 60, dtype) for _ in range(contributors)]
        target = random_bytes(rng, 120, dtype)[::2]
        old = raw(target.clone())
        want = exact(parts, op, divisor, dtype)
        reduce_views(target.view(3, 20), [p.view(3, 20) for p in parts], op, divisor)
        assert old.shape == raw(target).shape
        assert_same(target.contiguous(), want, signed_zeros=op in ("sum", "prod"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_reduce_views_of_two_small_floats_equals_float32_accumulation(dtype, op):
    # Every bit pattern there is, against 64 others: subnormal numbers, infinities and NaN among them.
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    function = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[op]
    for shift in np.random.default_rng(3).integers(1 << 16, size=64).tolist():
        other, got = every.roll(shift), torch.empty_like(every)
        reduce_views(got, [every, other], op)
        assert_same(got, function(every.float(), other.float()).to(dtype), signed_zeros=True)


@pytest.mark.parametrize("value", [448.0, 463.0, 465.0, 1e6, float("inf")])
def test_float8_without_infinity_saturates(value):
    out = torch.empty(2, dtype=torch.float8_e4m3fn)
    reduce_views(out, [torch.tensor([value, -value])], "sum")
    assert out.float().tolist() == [448.0, -448.0]


def test_reduce_scalars_and_empty_boxes():
    out = torch.tensor(0.0)
    reduce_views(out, [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], "sum", 2)
    assert out.item() == 3.0
    reduce_views(torch.empty(0, 3), [torch.empty(0, 3)] * 3, "max")


@pytest.mark.parametrize(("dtype", "op", "divisor"), SUPPORTED, ids=str)
def test_reduce_boxes_equals_cpu_path(device, dtype, op, divisor):
    rng = np.random.default_rng([dtype.itemsize, len(op)])
    fill = 0 if dtype.is_complex else 1
    for axes, contributors, kind in ((0, 2, "any"), (1, 3, "straight"), (2, 2, "any"), (3, 3, "any")):
        case = random_case(rng, axes, contributors, count=3, kind=kind, fill=fill, most=5)
        check_reduce(rng, case, dtype, op, divisor, device)


@pytest.mark.parametrize("kind", ["straight", "transposed", "strided"])
def test_kernel_reduces_every_kind_of_box(device, kind):
    rng = np.random.default_rng(2)
    for axes, contributors, unit in ((2, 2, 1), (2, 5, 8), (4, 1, 1), (1, 17, 1)):
        case = random_case(rng, axes, contributors, count=3, kind=kind, unit=unit, most=6)
        check_reduce(rng, case, torch.bfloat16, "sum", 5, device, config=None)


@pytest.mark.parametrize("buffers", [1, 4, 6])
def test_reduce_boxes_reads_addresses_from_table(device, buffers):
    rng = np.random.default_rng(buffers)
    case = random_case(rng, 2, 7, count=6, buffers=buffers, fill=1, most=4)
    check_reduce(rng, case, torch.float32, "sum", None, device)


CASTS = (
    [(a, b) for a in FLOATS for b in FLOATS if a is not b]
    + [(torch.int64, b) for b in [*FLOATS, torch.int8]]
    + [(torch.bool, b) for b in (torch.float32, torch.bfloat16, torch.int32)]
    + [(torch.uint8, torch.int64), (torch.int8, torch.float16)]
    + [(torch.complex64, torch.complex128), (torch.complex128, torch.complex64)]
)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("dtype", "out_dtype"), CASTS, ids=str)
def test_reduce_boxes_casts_as_torch(device, dtype, out_dtype):
    rng = np.random.default_rng(3)
    case = random_case(rng, 2, 1, count=2, most=6)
    check_reduce(rng, case, dtype, "sum", None, device, out_dtype)
    source = random_values(rng, 97, dtype)
    target = torch.empty(97, dtype=out_dtype, device=device)
    flat = StridedBoxes([[0]], [0], [[0]], [0], [[97]], [[[1]]], [[1]])
    reduce_boxes(reduce_table(flat, dtype, "sum", None, out_dtype, device), [source.to(device)], [target])
    through = source.float() if out_dtype.itemsize < 4 and out_dtype.is_floating_point else source
    if out_dtype is torch.float8_e4m3fn:
        through = through.clamp(-448, 448)
    assert_same(target.cpu(), through.to(out_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_reduce_boxes_rounds_as_torch(device, dtype):
    """All values of the small dtype, the midpoints between them, and their float32 neighbours."""
    bits = torch.arange(256 ** min(dtype.itemsize, 2), dtype=torch.int32)
    if dtype.itemsize == 2:
        bits = bits[::37]
    words = bits.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else bits.to(torch.int16).view(dtype)
    values = words.float()
    finite = values[values.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    points = torch.cat([values, middles])
    inf = torch.tensor(float("inf"))
    points = torch.cat([points, points.nextafter(inf), points.nextafter(-inf)])
    target = torch.empty(len(points), dtype=dtype, device=device)
    flat = StridedBoxes([[0]], [0], [[0]], [0], [[len(points)]], [[[1]]], [[1]])
    reduce_boxes(reduce_table(flat, torch.float32, "sum", None, dtype, device), [points.to(device)], [target])
    want = (points.clamp(-448, 448) if dtype is torch.float8_e4m3fn else points).to(dtype)
    assert_same(target.cpu(), want)
    back = torch.empty(len(words), device=device)
    flat = StridedBoxes([[0]], [0], [[0]], [0], [[len(words)]], [[[1]]], [[1]])
    reduce_boxes(reduce_table(flat, dtype, "sum", None, torch.float32, device), [words.to(device)], [back])
    assert_same(back.cpu(), values)
