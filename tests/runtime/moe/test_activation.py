"""Gated experts with silu_and_mul between dispatch and combine, against float64; unused rows are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, tokens_of

from shardweave.errors import ArgumentError
from shardweave.runtime.moe.activation import silu_and_mul
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

RANKS, K, E, H, F = 3, 2, 5, 16, 8
COUNTS = (6, 0, 4)


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory: None) -> Iterator[None]:
    """Fill allocations of the transport and of torch with NaN."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def virtual(dtype: torch.dtype = torch.float32, **given) -> VirtualTokenDispatcher:
    settings = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 6, "dtype": dtype, "align": 8}
    return VirtualTokenDispatcher(RANKS, **with_options(**{**settings, **given}))


def parameters(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up of each expert together, [E, H, 2F], and down, [E, F, H]."""
    g = torch.Generator().manual_seed(5)
    given = (torch.randn(E, H, 2 * F, generator=g) / H**0.5, torch.randn(E, F, H, generator=g) / F**0.5)
    return tuple(w.to(dtype).requires_grad_() for w in given)


def dense(t: Tokens, both: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[T, H] in float64."""
    y = torch.zeros(t.x.shape, dtype=torch.float64)
    for e in range(E):
        gate, up = (t.x @ both[e]).chunk(2, -1)
        share = (t.weights * (t.ids == e)).sum(1, keepdim=True)
        y = y + share * ((torch.nn.functional.silu(gate) * up) @ down[e])
    return y


class Poison(torch.autograd.Function):
    """Set rows from `number` on to NaN, in the tensor and in its gradient."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return Poison.poisoned(x, number)

    @staticmethod
    def backward(ctx, gradient):
        return Poison.poisoned(gradient, ctx.number), None

    @staticmethod
    def poisoned(x, number):
        return x.detach().clone().index_fill_(0, torch.arange(number, len(x)), float("nan"))


def grouped(x: torch.Tensor, w: torch.Tensor, routed) -> torch.Tensor:
    """As torch._grouped_mm: rows past the last group are neither read nor written."""
    ends = [0, *routed.offsets.tolist()]
    parts = [x[a:b] @ w[i] for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))]
    return torch.cat([*parts, x.new_full((len(x) - ends[-1], w.shape[-1]), float("nan"))])


@pytest.mark.parametrize("layout", ["grouped", "batched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_silu_and_mul_in_gated_experts(dtype, layout):
    d = virtual(dtype, layout=layout)
    tokens = [tokens_of(r, n, K, E, H, dtype, "holes") for r, n in enumerate(COUNTS)]
    xs = [t.x.clone().requires_grad_() for t in tokens]
    both, down = parameters(dtype)
    routed = d.dispatch(xs, [t.ids for t in tokens], [t.weights for t in tokens])
    outputs = []
    for rank, r in enumerate(routed):
        low, high, number = *d.config.bounds[rank : rank + 2], int(r.num_rows)
        x = r.x.flatten(0, -2)
        assert layout == "batched" or len(x) > number
        # Neither experts nor dispatch read the NaN of unused rows, in forward and backward.
        hidden = grouped(x, both[low:high], r).view(*r.x.shape[:-1], 2 * F)
        gate, up = hidden.chunk(2, -1)
        y = silu_and_mul(gate, up, r)
        assert y.shape == gate.shape and y.is_contiguous()
        flat = y.flatten(0, -2)
        assert flat[:number].isfinite().all() and flat[number:].isnan().all()
        outputs.append(grouped(Poison.apply(flat, number), down[low:high], r).view(r.x.shape))
    ys = d.combine(outputs, routed)
    torch.autograd.backward(ys, [t.gradient for t in tokens])

    exact = [w.detach().double().requires_grad_() for w in (both, down)]
    x64s = [t.x.double().requires_grad_() for t in tokens]
    for t, x, y, x64 in zip(tokens, xs, ys, x64s, strict=True):
        want = dense(Tokens(x64, t.ids, t.weights, t.gradient), *exact)
        want.backward(t.gradient.double())
        assert_near(y.detach(), want.detach(), dtype, "y")
        assert_near(x.grad, x64.grad, dtype, "dx")
    for got, want in zip((both, down), exact, strict=True):
        assert_near(got.grad, want.grad, dtype, "dparameters")


@pytest.mark.parametrize("shape", [(), (4, 2)], ids=str)
def test_silu_and_mul_where_the_first_payload_is_not_a_vector(shape):
    d = virtual(payloads=[(torch.float32, shape), (torch.float32, H)])
    tokens = [tokens_of(r, n, K, E, H, torch.float32, "uniform") for r, n in enumerate(COUNTS)]
    xs = [[torch.zeros(len(t.x), *shape), t.x] for t in tokens]
    r = d.dispatch(xs, [t.ids for t in tokens], [t.weights for t in tokens])[0]
    gate, up = torch.randn(2, *r.weights.shape, F)
    n = int(r.num_rows)
    torch.testing.assert_close(silu_and_mul(gate, up, r)[:n], (torch.nn.functional.silu(gate) * up)[:n])


def test_gradients_of_unused_rows_are_zero():
    """Whatever the gradient of the result holds there; also for gradients with strided rows."""
    d = virtual()
    tokens = [tokens_of(r, n, K, E, H, torch.float32, "uniform") for r, n in enumerate(COUNTS)]
    r = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])[0]
    number = int(r.num_rows)
    assert 0 < number < len(r.x)
    given = torch.randn(2, len(r.x), F)
    given[:, number:] = float("nan")
    gate, up = (x.requires_grad_() for x in given)
    gradient = torch.randn(F, len(r.x)).t()
    gradient[number:] = float("nan")
    results = torch.autograd.grad(silu_and_mul(gate, up, r), (gate, up), gradient)
    g, u = (x.detach()[:number].double().requires_grad_() for x in (gate, up))
    want = torch.autograd.grad(torch.nn.functional.silu(g) * u, (g, u), gradient[:number].double())
    for a, b in zip(results, want, strict=True):
        assert_near(a[:number], b, torch.float32, "gradient")
        assert (a[number:] == 0).all()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        y = silu_and_mul(gate, up, r)
        (first,) = torch.autograd.grad(y, gate, gradient.clone().requires_grad_(), create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda g, u, r: (g, u, None), "routed: NoneType; allowed: the result of a dispatch"),
        (lambda g, u, r: (g[1:], u, r), r"gate: torch.float32 of shape \(\d+, 8\)"),
        (lambda g, u, r: (g, u[:, :4], r), r"up: torch.float32 of shape \(\d+, 4\); .* F equal"),
        (lambda g, u, r: (g.double(), u.double(), r), "gate: torch.float64"),
        (lambda g, u, r: (g, u.half(), r), "up: torch.float16; allowed: torch.float32"),
        (lambda g, u, r: (g, u.to("meta"), r), "up: on meta; allowed: cpu"),
        (lambda g, u, r: (g[0, 0], u, r), r"gate: torch.float32 of shape \(\)"),
        (lambda g, u, r: (None, u, r), "gate: None; allowed: a tensor"),
        (lambda g, u, r: (g, None, r), "up: None; allowed: a tensor"),
    ],
)
def test_silu_and_mul_refuses_arguments(change, text):
    d = virtual()
    tokens = [tokens_of(r, n, K, E, H, torch.float32, "uniform") for r, n in enumerate(COUNTS)]
    r = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])[0]
    given = torch.zeros(2, len(r.x), F)
    with pytest.raises(ArgumentError, match=text):
        silu_and_mul(*change(*given, r))
