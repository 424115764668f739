"""weigh_rows on the CPU: a compiled loop over rows, or torch operations where there is none."""

from __future__ import annotations

from functools import cache

import torch

from ..cpu_code.compile import Loop, compiled
from ..cpu_code.elements import Elements
from ..cpu_code.llvm_ir import Function, Value
from .rows import CHUNK

_COLUMNS = 32  # elements of a vector


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
    loop, number, hidden = _weighs_loop(out.dtype), min(int(num_rows), len(out)), out.shape[1]
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


@cache
def _weighs_loop(dtype: torch.dtype) -> Loop | None:
    """The loop over rows of weigh_rows."""
    f = Function("weighs", (
        "first", "end", "gradient", "values", "out", "weights", "weight_gradient", "hidden",
    ))  # fmt: skip
    gradient, values, out, weights, weight_gradient = (
        f.pointer(name) for name in ("gradient", "values", "out", "weights", "weight_gradient")
    )
    hidden, whole = f.number("hidden"), f.number("hidden") & -_COLUMNS
    wide, narrow = Elements(f, dtype, _COLUMNS), Elements(f, dtype, 1)

    def columns(elements: Elements, offset: Value, weight: Value, dot: Value) -> list[Value]:
        dy, y = (elements.load(f.at(x, offset)) for x in (gradient, values))
        elements.store(dy * weight.splat(elements.n), f.at(out, offset))
        return [dot + dy * y]

    def row(r: Value) -> None:
        first, weight, size = r * hidden * dtype.itemsize, f.load("float", weights, r), dtype.itemsize
        zeros = f.zero(wide.float), f.zero(narrow.float)
        (of_wide,) = f.loop(0, whole, lambda c, dot: columns(wide, first + c * size, weight, dot), zeros[:1], _COLUMNS)
        (of_rest,) = f.loop(whole, hidden, lambda c, dot: columns(narrow, first + c * size, weight, dot), zeros[1:])
        f.store(of_wide.sum() + of_rest.sum(), weight_gradient, r)

    f.loop(f.number("first"), f.number("end"), row)
    return compiled(f)
