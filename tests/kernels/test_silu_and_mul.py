"""silu_and_mul and its backward, by kernels and CPU paths, against float64."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from test_aot import TARGETS, assert_no_spill, each_target
from test_token_kernels_aot import compile_kernel, row_launch, wide
from token_cases import POISON
from triton.runtime import interpreter

from shardweave.errors import ArgumentError
from shardweave.kernels.dtypes import ELEMENTS
from shardweave.kernels.tokens.silu_and_mul import (
    silu_and_mul,
    silu_and_mul_backward,
    silu_and_mul_backward_kernel,
    silu_and_mul_kernel,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
FORMS = [*zip(DTYPES, (64, 48, 3), strict=True), (torch.bfloat16, 2500), (torch.float32, 1)]
BIG = 100.0  # beyond it exp(-x) overflows


def given(rows: int, length: int, dtype: torch.dtype, n: int, device: str) -> list[torch.Tensor]:
    """Return a gradient, and gate and up as halves of rows at an odd address; NaN from row n on."""
    g = torch.Generator().manual_seed(length + n)
    both = (3 * torch.randn(rows, 2 * length + 3, generator=g)).to(dtype)
    both[: n // 2, 1] = -BIG
    both[n // 2 : n, 1] = BIG
    gradient = torch.randn(rows, length, generator=g).to(dtype)
    both[n:], gradient[n:] = float("nan"), float("nan")
    both = both.to(device)[:, 1:]
    return [gradient.to(device), both[:, :length], both[:, length : 2 * length]]


def near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, terms: torch.Tensor | None = None) -> None:
    """Assert equality up to a few float32 roundings and one final rounding; float16 has no numbers below 6e-8."""
    bound = EPSILON[dtype] * want.abs() + 2e-6 * (want if terms is None else terms).abs() + 6e-8
    assert got.dtype is dtype and ((got.cpu().double() - want).abs() <= bound).all()


def check(dtype: torch.dtype, length: int, device: str) -> None:
    rows = 20
    for n in (0, 1, 13, rows):
        gradient, gate, up = given(rows, length, dtype, n, device)
        num_rows = torch.tensor([n], dtype=torch.int32, device=device)
        out, gate_out, up_out = (torch.full((rows, length), POISON, dtype=dtype, device=device) for _ in range(3))
        silu_and_mul(gate, up, num_rows, out)
        silu_and_mul_backward(gradient, gate, up, num_rows, gate_out, up_out)

        d, g, u = (x[:n].cpu().double() for x in (gradient, gate, up))
        g.requires_grad_()
        u.requires_grad_()
        want = torch.nn.functional.silu(g) * u
        want.backward(d)
        near(out[:n], want.detach(), dtype)
        with torch.no_grad():
            s = torch.sigmoid(g)
            near(gate_out[:n], g.grad, dtype, d * u * s * (1 + (g * (1 - s)).abs()))
            near(up_out[:n], u.grad, dtype)
        assert (out[n:] == torch.tensor(POISON, dtype=dtype)).all()
        assert (gate_out[n:] == 0).all() and (up_out[n:] == 0).all()


@pytest.mark.parametrize("dtype, length", FORMS, ids=str)
def test_silu_and_mul(device, dtype, length):
    check(dtype, length, device)


@pytest.mark.plan
@pytest.mark.parametrize("dtype, length", FORMS, ids=str)
def test_silu_and_mul_cpu(dtype, length, monkeypatch):
    """In one piece and in several."""
    check(dtype, length, "cpu")
    module = sys.modules["shardweave.kernels.tokens.silu_and_mul"]
    monkeypatch.setattr(module, "CHUNK", 6 * length)
    check(dtype, length, "cpu")


def test_silu_and_mul_of_no_rows(device):
    """Also refuses rows whose elements are not adjacent."""
    num_rows = torch.zeros(1, dtype=torch.int32, device=device)
    empty = torch.empty(0, 8, device=device)
    silu_and_mul(empty, empty, num_rows, empty)
    silu_and_mul_backward(empty, empty, empty, num_rows, empty, empty)
    with pytest.raises(ArgumentError, match="gate: .*the elements of a row adjacent"):
        silu_and_mul(torch.ones(8, 4, device=device).t(), torch.ones(4, 8, device=device), num_rows,
                     torch.empty(4, 8, device=device))  # fmt: skip


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str, counts: dict[str, int]) -> None:
    made = getattr(interpreter.InterpreterBuilder, f"create_masked_{name}")

    def counted(self, *args):
        counts[name] += 1
        return made(self, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, f"create_masked_{name}", counted)


@pytest.mark.interp
def test_silu_and_mul_work_is_bounded_by_num_rows(monkeypatch):
    """The number of loads does not depend on the buffer's length; backward zeros the other rows without reading."""
    counts = {"load": 0, "store": 0}
    for name in counts:
        count_calls(monkeypatch, name, counts)
    results = []
    for rows, both in product((16, 160), (False, True)):
        gradient, gate, up = given(rows, 8, torch.float32, 9, "cpu")
        num_rows = torch.tensor([9], dtype=torch.int32)
        outs = [torch.empty(rows, 8) for _ in range(2)]
        counts.update(load=0, store=0)
        if both:
            silu_and_mul_backward(gradient, gate, up, num_rows, *outs)
        else:
            silu_and_mul(gate, up, num_rows, outs[0])
        results.append((counts["load"], counts["store"]))
    # Each of four programs reads the number of rows.
    assert results == [(4 + 2 * 9, 9), (4 + 3 * 9, 2 * 16), (4 + 2 * 9, 9), (4 + 3 * 9, 2 * 160)]


@pytest.mark.aot
@each_target
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_silu_and_mul_is_vectorised_and_does_not_spill(target, dtype):
    # Rows of one piece: loops over pieces are unrolled.
    constants = {**row_launch(dtype, 4096 // dtype.itemsize), "DTYPE": ELEMENTS[dtype], "SOFT": False}
    addresses = dict.fromkeys(("gate", "up", "out", "gradient", "gate_out", "up_out"), "i64")
    pieces = constants["COLS"] * dtype.itemsize // (16 * TARGETS[target].warp_size * constants["num_warps"])
    for kernel, loads, stores in ((silu_and_mul_kernel, 2, 1), (silu_and_mul_backward_kernel, 3, 4)):
        compiled = compile_kernel(kernel, target, constants, **addresses)
        assert_no_spill(compiled, target)
        assert wide(compiled, target) == (loads * pieces, stores * pieces)
