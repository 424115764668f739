"""weigh_rows on the CPU: a compiled loop over rows, or torch operations where there is none."""

from __future__ import annotations

import torch

from .compiled_loops import compiled_loop
from .rows import CHUNK


def weigh_rows_cpu(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
) -> None:
    """weigh_rows on the CPU. A dot product sums the columns i, i + 32, ... of whole vectors first, then these sums in
    pairs 16, 8, 4, 2 and 1 apart, then the other columns."""
    loop, number, hidden = compiled_loop("weighs", out.dtype), min(int(num_rows), len(out)), out.shape[1]
    if loop is None:
        weigh_rows_torch(gradient, values, weights, number, out, weight_gradient)
        return
    nbytes = 3 * number * hidden * out.itemsize
    loop(number, nbytes, gradient, values, out, weights.contiguous(), weight_gradient, hidden)


def weigh_rows_torch(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor,
    number: int,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
) -> None:
    """weigh_rows of the first `number` rows in torch operations; dot products are summed in torch's order."""
    most = max(1, CHUNK // max(out.shape[1], 1))  # intermediates stay in the cache
    for first in range(0, number, most):
        these = slice(first, min(number, first + most))
        given = gradient[these].float()
        torch.sum(given * values[these], 1, out=weight_gradient[these])
        out[these] = given * weights[these, None]
