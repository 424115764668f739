"""silu_and_mul and its backward, by kernels and CPU paths, against float64."""

from __future__ import annotations

import sys

import pytest
import torch
from token_cases import POISON

from shardweave.errors import ArgumentError
from shardweave.kernels.tokens.silu_and_mul import silu_and_mul, silu_and_mul_backward

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
