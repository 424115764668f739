"""combine_rows: each token's rows fetched from their owners and summed, in an order that no algorithm changes.

y[t] = sum over owners ascending of round(sum over the token's entries there, k ascending, of weight * row), then
`add`. Sums and products are float32 and begin at zero, nothing is fused; round is to the rows' dtype, which is what an
owner that sends its sum would send; the result is rounded once. Entries without a row contribute nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .codecs import decode, encode
from .pointers import interpreted, on_device, runs_on
from .push_rows import entries_of
from .reduce_boxes import ELEMENTS
from .rows import PAYLOADS, Buffers, RowLaunch, TokenRows, cdiv, check_rows, row_constants

# Elements of an accumulator of the reference: 1 MiB of float32 stays in the cache.
CHUNK = 1 << 18


@triton.jit
def rounded(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    return decode(encode(value, DTYPE, SOFT), DTYPE, SOFT)


@triton.jit(do_not_specialize=["out", "out_stride", "add", "add_stride", "weight_stride"])
def combine_rows_kernel(
    out,  # address
    out_stride,  # elements
    add,  # address
    add_stride,
    key_in,  # int32 [tokens, K]
    row_in,  # int32 [tokens, K]
    buffers,  # int64 [W], addresses
    weights,  # float32 [tokens, K]
    weight_stride,
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    HAS_WEIGHTS: tl.constexpr,
    HAS_ADD: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Program (t, j) makes piece j of token t's row."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = c < H
    total = tl.zeros([COLS], tl.float32)
    partial = tl.zeros([COLS], tl.float32)
    last = -1
    for i in tl.static_range(K):
        key = tl.load(key_in + t * K + i)
        row = tl.load(row_in + t * K + i)
        kept = row >= 0
        owner = key // K
        base = tl.load(buffers + owner, mask=kept, other=0)
        # An address that was an integer has lost its alignment.
        source = tl.multiple_of(base.to(tl.pointer_type(WORD)), ALIGN) + row.to(tl.int64) * H
        value = decode(tl.load(source + c, mask=inside & kept, other=0), DTYPE, SOFT)
        if HAS_WEIGHTS:
            value = value * tl.load(weights + t * weight_stride + key % K, mask=kept, other=0.0)
        moved = kept & (owner != last)
        total = tl.where(moved, total + rounded(partial, DTYPE, SOFT), total)
        partial = tl.where(moved, 0.0, partial)
        partial = tl.where(kept, partial + value, partial)
        last = tl.where(kept, owner, last)
    total += rounded(partial, DTYPE, SOFT)
    if HAS_ADD:
        source = tl.multiple_of(add.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        words = tl.load(source + tl.multiple_of(t * add_stride, VEC) + c, mask=inside, other=0)
        total += decode(words, DTYPE, SOFT)
    target = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    words = encode(total, DTYPE, SOFT).to(WORD)
    tl.store(target + tl.multiple_of(t * out_stride, VEC) + c, words, mask=inside)


def combine_rows(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    launch: RowLaunch | None = None,
) -> None:
    """Write to `out` each token's sum over its rows.

    Args:
        rows: of locate_rows.
        buffers: [R, H], float32, bfloat16 or float16, each owner's.
        out: [T, H] of the same dtype, the elements of a row adjacent.
        weights: float32 [T, K]; default: all are one, and nothing is multiplied.
        add: as `out`; added last. It may be `out` itself.

    Raises:
        ArgumentError: a shape or dtype that is not allowed.
    """
    tokens, k = rows.key.shape
    hidden = buffers.shape[1]
    if buffers.dtype not in PAYLOADS:
        raise ArgumentError(f"buffers: {buffers.dtype}; allowed: float32, bfloat16, float16")
    check_rows("out", out, (tokens, hidden), buffers.dtype)
    if add is not None:
        check_rows("add", add, (tokens, hidden), buffers.dtype)
    if weights is not None and (weights.shape != (tokens, k) or weights.dtype is not torch.float32):
        raise ArgumentError(
            f"weights: {weights.dtype} of shape {tuple(weights.shape)}; allowed: float32 of shape {(tokens, k)}"
        )
    if not runs_on(out.device):
        combine_rows_reference(rows, buffers, out, weights, add)
        return
    launch = launch or RowLaunch.for_rows(hidden, out.element_size())
    table, bits = buffers.table()
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    added = out if add is None else add
    strides = (out.stride(0) | added.stride(0)) * out.element_size()
    constants = row_constants(out.dtype, hidden, bits, out.data_ptr(), added.data_ptr(), strides)
    if tokens:
        with on_device(out.device):
            combine_rows_kernel[(tokens, cdiv(hidden, launch.columns))](
                out.data_ptr(), out.stride(0), added.data_ptr(), added.stride(0), *rows, table,
                rows.key if weights is None else weights, 0 if weights is None else weights.stride(0),
                K=k, COLS=launch.columns, HAS_WEIGHTS=weights is not None, HAS_ADD=add is not None,
                DTYPE=ELEMENTS[out.dtype], SOFT=interpreted(combine_rows_kernel), num_warps=launch.num_warps,
                # One rounding more or less than the definition has would show.
                enable_fp_fusion=False,
                **constants,
            )  # fmt: skip


def combine_rows_reference(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
) -> None:
    """The same in torch operations: the rows gathered owner by owner, then summed some tokens at a time."""
    (tokens, k), hidden, dtype = rows.key.shape, buffers.shape[1], buffers.dtype
    token, number, _, row = entries_of(rows, len(buffers))
    gathered = torch.empty((len(row), hidden), dtype=dtype, device=out.device)
    for buffer, into, at in zip(buffers.tensors, gathered.split(number), row.split(number), strict=True):
        torch.index_select(buffer, 0, at, out=into)
    # Where the i-th entry of each token is among the gathered. A token's entries are in order of (owner, k) there too.
    order = torch.argsort(token, stable=True)
    many = torch.bincount(token, minlength=tokens)
    begin = many.cumsum(0) - many
    owner = rows.key // max(k, 1)
    for t in range(0, tokens, max(1, CHUNK // max(hidden, 1))):
        these = slice(t, t + max(1, CHUNK // max(hidden, 1)))
        total = torch.zeros((len(many[these]), hidden), dtype=torch.float32, device=out.device)
        partial = torch.zeros_like(total)
        for i in range(k):
            kept = torch.nonzero(many[these] > i).view(-1)
            if len(kept) == 0:
                break
            everyone = len(kept) == len(total)
            value = gathered.index_select(0, order[begin[these][kept] + i]).float()
            if weights is not None:
                kth = (rows.key[these, i] % k).long()[kept]
                value.mul_(weights[these][kept, kth].unsqueeze(1))
            moved = (owner[these, i] != owner[these, i - 1])[kept] if i else None
            if moved is not None and bool(moved.any()):
                into = kept[moved]
                total[into] = total[into] + partial[into].to(dtype).float()
                partial[into] = 0
            if everyone:
                partial.add_(value)
            else:
                partial[kept] = partial[kept] + value
        total.add_(partial.to(dtype))
        if add is not None:
            total.add_(add[these])
        out[these].copy_(total)
