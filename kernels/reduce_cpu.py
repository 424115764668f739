"""reduce_views: reduce tensors of one shape in torch operations; the CPU path of reduce_boxes, box by box."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from .dtypes import real_dtype

OPS = ("sum", "max", "min", "prod")
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
# Elements reduced at a time per thread: the accumulator (1 MiB of float32) stays in the cache.
CHUNK = 1 << 18

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "or": torch.bitwise_or,
    "and": torch.bitwise_and,
}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for 8- and 16-bit floats, else the dtype itself."""
    return torch.float32 if _is_small_float(dtype) else dtype


@functools.lru_cache(typed=True)
def check_reduction(dtype: torch.dtype, out_dtype: torch.dtype, op: str, divisor: Any) -> None:
    """Check that a reduction is defined.

    Raises:
        ArgumentError: unsupported op, dtype, output dtype or divisor.
    """
    if op not in OPS:
        raise ArgumentError(f"op is {op!r}; allowed are {', '.join(OPS)} (avg is sum with a divisor)")
    if dtype not in FLOATS + INTEGERS + COMPLEX + (torch.bool,):
        raise ArgumentError(f"dtype is {dtype}; allowed are {_names(FLOATS + INTEGERS + COMPLEX)} and bool")
    if dtype.is_complex and op != "sum":
        raise ArgumentError(f"op is {op!r}; for {dtype} only sum is allowed")
    # Converting a number outside an integer dtype's range is undefined, and bool cannot hold a sum.
    if dtype.is_complex:
        allowed: tuple[torch.dtype, ...] = COMPLEX
    elif dtype.is_floating_point:
        allowed = FLOATS
    elif dtype is torch.bool:
        allowed = (torch.bool, *INTEGERS, *FLOATS)
    else:
        allowed = INTEGERS + FLOATS
    if out_dtype not in allowed:
        raise ArgumentError(f"out_dtype is {out_dtype}; from {dtype} allowed are {_names(allowed)}")
    if divisor is not None:
        number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
        if not number or not math.isfinite(divisor) or divisor <= 0:
            raise ArgumentError(f"divisor is {divisor!r}; a positive finite number or None is allowed")
        if not (dtype.is_floating_point or dtype.is_complex):
            raise ArgumentError(f"divisor is {divisor!r}; for {dtype} only None is allowed")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def reduce_views(
    target: torch.Tensor, contributors: Sequence[torch.Tensor], op: str, divisor: float | None = None
) -> None:
    """Reduce the contributors, in order, into `target`; all of one shape, any strides.

    The target may be one of the first two contributors; it overlaps no other. Needs no temporary if the accumulator has
    the target's dtype, else at most two of a chunk's size.
    """
    dtype = contributors[0].dtype
    check_reduction(dtype, target.dtype, op, divisor)
    if dtype is torch.bool:
        op = "or" if op in ("sum", "max") else "and"
    if dtype.is_complex:
        target, contributors = torch.view_as_real(target), [torch.view_as_real(c) for c in contributors]
        dtype = real_dtype(dtype)
    accumulator = accumulator_dtype(dtype)
    by = None
    if divisor is not None:
        # A tensor: on CUDA torch multiplies by the reciprocal of a Python number.
        by = torch.full((), divisor, dtype=accumulator, device=target.device)
    if target.dtype is dtype and by is None and _rounds_once(dtype, op, len(contributors)):
        accumulator = dtype
    if target.dtype is accumulator is dtype:
        # A single pass needs no chunks.
        chunks = [(target, *contributors)] if len(contributors) < 3 and by is None else _chunks([target, *contributors])
        for out, *parts in chunks:
            _accumulate(out, parts, op, by)
        return
    # float64 and integers are converted to small floats through float32, as in the kernel.
    indirect = _is_small_float(target.dtype) and (dtype is torch.float64 or not dtype.is_floating_point)
    if len(contributors) == 1 and by is None and not indirect and target.dtype is not torch.float8_e4m3fn:
        target.copy_(contributors[0])
        return
    for out, *parts in _chunks([target, *contributors]):
        total = torch.empty(out.shape, dtype=accumulator, device=out.device)
        if dtype is not accumulator:
            total.copy_(parts[0])
            scratch = torch.empty_like(total)
            for part in parts[1:]:
                scratch.copy_(part)
                _COMBINE[op](total, scratch, out=total)
            if by is not None:
                total.div_(by)
        else:
            _accumulate(total, parts, op, by)
        if indirect:
            total = total.to(torch.float32)
        if out.dtype is torch.float8_e4m3fn:
            total.clamp_(-448.0, 448.0)  # older versions of torch return NaN
        out.copy_(total)


def reduce_terms(terms: Sequence[torch.Tensor], op: str, divisor: float | None = None) -> torch.Tensor:
    """The reduction of `reduce_views` as a new tensor, bitwise equal, by operations that graphs can have.

    Args:
        terms: of one shape and dtype; the reduction is in their order.
    """
    dtype = terms[0].dtype
    check_reduction(dtype, dtype, op, divisor)
    if dtype is torch.bool:
        op = "or" if op in ("sum", "max") else "and"
    if dtype.is_complex:
        return torch.view_as_complex(reduce_terms([torch.view_as_real(term) for term in terms], op, divisor))
    accumulator = accumulator_dtype(dtype)
    total = terms[0].to(accumulator)
    for term in terms[1:]:
        total = _COMBINE[op](total, term.to(accumulator))
    if divisor is not None:
        # A tensor: on CUDA torch multiplies by the reciprocal of a Python number.
        total = total / torch.full((), divisor, dtype=accumulator, device=total.device)
    if dtype is torch.float8_e4m3fn:
        total = total.clamp(-448.0, 448.0)  # older versions of torch return NaN
    return total.to(dtype)


def _rounds_once(dtype: torch.dtype, op: str, contributors: int) -> bool:
    """Whether torch's operation in the dtype equals accumulation in float32 followed by one rounding."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    # torch computes one operation in float32 and rounds; a maximum is one of its operands.
    return op in ("max", "min") or contributors == 2


def _is_small_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _accumulate(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, by: torch.Tensor | None) -> None:
    """Reduce parts of the accumulator's dtype into `out`, which is first written from the first two parts."""
    combine = _COMBINE[op]
    if len(parts) == 1:
        if by is None:
            out.copy_(parts[0])
        else:
            torch.div(parts[0], by, out=out)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if by is not None:
        out.div_(by)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Split tensors of one shape along their outermost axes into parts of about CHUNK elements per thread."""
    first = tensors[0]
    most = CHUNK * torch.get_num_threads()
    if first.numel() <= most:
        yield tensors
        return
    axis = next(i for i, size in enumerate(first.shape) if size > 1)
    pieces = min(-(-first.numel() // most), first.shape[axis])
    for parts in zip(*(t.chunk(pieces, dim=axis) for t in tensors), strict=True):
        yield from _chunks(parts)
