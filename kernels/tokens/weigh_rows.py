"""weigh_rows: the gradients of weighted rows and of their weights, on the rank that has the rows."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import ELEMENTS, decode, encode
from ..launch import Constants, Launches, interpreted, runs_on
from .rows import RowLaunch, check_rows, programs_of, row_alignment, row_constants
from .weigh_rows_cpu import weigh_rows_cpu


@triton.jit(do_not_specialize=["gradient", "values", "out", "programs"])
def weigh_rows_kernel(
    weights,  # float32 [rows]
    weight_gradient,  # float32 [rows]
    num_rows,  # int32 [1]
    gradient: tl.int64,  # address
    values: tl.int64,  # address
    out: tl.int64,  # address
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    SOFT: tl.constexpr,
):
    """Program i processes rows i, i + programs, ... below num_rows."""
    g = tl.multiple_of(gradient.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    y = tl.multiple_of(values.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    d = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    end = tl.load(num_rows).to(tl.int64)
    for row in range(tl.program_id(0), end, programs):
        weight = tl.load(weights + row)
        dot = tl.zeros([COLS], tl.float32)
        for start in range(0, H, COLS):
            c = start + tl.arange(0, COLS)
            at = row * H + c
            dy = decode(tl.load(g + at, mask=c < H, other=0), DTYPE, SOFT)
            dot += dy * decode(tl.load(y + at, mask=c < H, other=0), DTYPE, SOFT)
            tl.store(d + at, encode(dy * weight, DTYPE, SOFT).to(WORD), mask=c < H)
        tl.store(weight_gradient + row, tl.sum(dot, 0))


def weigh_rows(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor,
    num_rows: torch.Tensor,
    out: torch.Tensor,
    weight_gradient: torch.Tensor,
    launch: RowLaunch | None = None,
) -> None:
    """Write weights * gradient to `out` and each row's dot product of gradient and values to `weight_gradient`.

    Rows from `num_rows` on are neither read nor written.

    Args:
        gradient, values, out: contiguous [R, H] of one dtype, float32, bfloat16 or float16. `out` may be `gradient`.
        weights, weight_gradient: float32 [R].
        num_rows: int32 [1].

    Raises:
        ArgumentError: unsupported shape or dtype.
    """
    size, hidden = out.shape
    for name, x in (("gradient", gradient), ("values", values), ("out", out)):
        check_rows(name, x, (size, hidden), out.dtype)
        if not x.is_contiguous():
            raise ArgumentError(f"{name}: strides {x.stride()}; allowed: contiguous")
    if not runs_on(out.device):
        weigh_rows_cpu(gradient, values, weights, num_rows, out, weight_gradient)
        return
    launch = launch or RowLaunch.for_rows(hidden, out.element_size())
    programs = programs_of(out.device, size)
    addresses = gradient.data_ptr(), values.data_ptr(), out.data_ptr()
    align = row_alignment(out.dtype, hidden, addresses[0] | addresses[1] | addresses[2])
    tensors, constants = (weights, weight_gradient, num_rows), _constants(out.dtype, hidden, align, launch)
    _launches((programs, 1, 1), out.device, tensors, (*addresses, programs), constants)


_launches = Launches(weigh_rows_kernel)


@cache
def _constants(dtype: torch.dtype, hidden: int, align: int, launch: RowLaunch) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"COLS": launch.columns, "DTYPE": ELEMENTS[dtype]}
    constants["SOFT"] = interpreted(weigh_rows_kernel)
    return Constants(weigh_rows_kernel, constants, num_warps=launch.num_warps, enable_fp_fusion=False)
