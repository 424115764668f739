"""A dense mixture of experts in float64, random tokens for it, and experts for dispatched rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Tokens:
    """One rank's x [T, H], ids and weights [T, K], and the gradient of its result."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gradient: torch.Tensor
    add: torch.Tensor | None = None


def tokens_of(
    rank: int, count: int, k: int, experts: int, hidden: int, dtype: torch.dtype, routing: str, seed: int = 0
) -> Tokens:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if routing == "uniform":
        ids = torch.randint(0, experts, (count, k), generator=g)
    elif routing == "zipf":
        chances = 1.0 / torch.arange(1, experts + 1)
        ids = torch.multinomial(chances, max(count * k, 1), replacement=True, generator=g)[: count * k].view(count, k)
    elif routing == "hot":
        ids = torch.full((count, k), experts - 1)
    elif routing == "hot rank":  # the last quarter of the experts, likely on one rank
        ids = torch.randint(experts - max(experts // 4, 1), experts, (count, k), generator=g)
    elif routing == "none":
        ids = torch.full((count, k), -1)
    else:  # with holes
        ids = torch.randint(-1, experts, (count, k), generator=g)
    x = torch.randn(count, hidden, generator=g).to(dtype)
    gradient = torch.randn(count, hidden, generator=g).to(dtype)
    return Tokens(x, ids, torch.rand(count, k, generator=g), gradient)


def matrices_of(experts: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(99)
    return (torch.randn(experts, hidden, hidden, generator=g) / hidden**0.5).to(dtype)


def expert(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ matrix) + 0.5 * x


def dense(tokens: Tokens, matrices: torch.Tensor, kept: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return y and the gradients of x, weights and matrices, in float64. `kept`: bool [T, K], pairs not dropped."""
    x = tokens.x.double().requires_grad_()
    weights = tokens.weights.double().requires_grad_()
    m = matrices.double().requires_grad_()
    there = (tokens.ids >= 0) & (tokens.ids < len(m))
    if kept is not None:
        there = there & kept
    y = x * 0
    for e in range(len(m)):
        share = (weights * (there & (tokens.ids == e))).sum(1, keepdim=True)
        y = y + share * expert(x, m[e])
    if tokens.add is not None:
        y = y + tokens.add.double()
    y.backward(tokens.gradient.double())
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": m.grad}  # type: ignore[dict-item]


def run_experts(routed, matrices: list[torch.Tensor], weighted: bool) -> torch.Tensor:
    """Return the outputs of a rank's experts; NaN in rows without a token, to find code that reads them."""
    x = routed.x.flatten(0, -2)
    parts, at = [], 0
    for matrix, end, count, padded in zip(
        matrices, routed.offsets.tolist(), routed.counts.tolist(), routed.padded_counts.tolist(), strict=True
    ):
        assert end - padded == at
        group = expert(x[at : at + count], matrix)
        if not weighted:
            group = (group * routed.weights.flatten()[at : at + count, None]).to(x.dtype)
        assert (x[at + count : end] == 0).all() and (routed.weights.flatten()[at + count : end] == 0).all()
        parts += [group, x.new_full((padded - count, x.shape[1]), float("nan"))]
        at = end
    parts.append(x.new_full((len(x) - at, x.shape[1]), float("nan")))
    return torch.cat(parts).view(routed.x.shape)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Assert that errors are at most a few roundings of the largest value."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} in place of {tuple(want.shape)}"
    size = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]
    scale = want.abs().amax().item() if want.numel() else 0.0
    wrong = (got.double() - want).abs().amax().item() if want.numel() else 0.0
    assert wrong <= size * scale, f"{what}: off by {wrong:.3g} where the largest is {scale:.3g}"
