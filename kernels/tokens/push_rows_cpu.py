"""push_rows on the CPU: a compiled loop over tokens, or torch operations where there is none."""

from __future__ import annotations

from functools import cache

import torch

from ..cpu_code.compile import Loop, compiled
from ..cpu_code.llvm_ir import Function, Value
from .group_rows import Groups, padding_rows
from .rows import Buffers, TokenRows

_BYTES = 128  # of a vector


def push_rows_cpu(
    x: torch.Tensor,
    rows: TokenRows,
    buffers: Buffers,
    groups: Groups,
    own: int,
    weights: torch.Tensor | None,
    weight_buffers: Buffers | None,
    has_padding: bool = True,
) -> None:
    """push_rows on the CPU, of rows as they are stored."""
    loop, (tokens, k) = _pushes_loop(), rows.key.shape
    if loop is None:
        push_rows_torch(x, rows, buffers, weights, weight_buffers)
    else:
        key, row = rows.key.contiguous(), rows.row.contiguous()
        if weights is not None and weights.stride(1) != 1:
            weights = weights.contiguous()
        row_bytes, addresses = x.shape[1] * x.itemsize, buffers.host_addresses()
        stride, numbers = 0, None
        if weights is not None and weight_buffers is not None:
            stride, numbers = weights.stride(0) * 4, weight_buffers.host_addresses()
        loop(
            tokens, tokens * k * row_bytes, key, row, addresses, x, x.stride(0) * x.itemsize, row_bytes,
            None if numbers is None else weights, stride, numbers, k,
        )  # fmt: skip
    padding = padding_rows(groups) if has_padding else None
    if padding is not None and len(padding):
        for of_rows in (buffers, weight_buffers):
            if of_rows is not None:
                of_rows.tensors[own].index_fill_(0, padding, 0)


def push_rows_torch(
    x: torch.Tensor,
    rows: TokenRows,
    buffers: Buffers,
    weights: torch.Tensor | None,
    weight_buffers: Buffers | None,
) -> None:
    """push_rows without padding, in torch operations: all rows of a destination at a time."""
    k = rows.key.shape[1]
    destination = rows.key // max(k, 1)
    numbers = None if weight_buffers is None else weight_buffers.parts()
    for i, (buffer, first) in enumerate(buffers.parts()):
        token, at = ((rows.row >= 0) & (destination == i)).nonzero(as_tuple=True)
        row = rows.row[token, at].long() - first
        buffer.index_copy_(0, row, x.index_select(0, token))
        if weights is not None and numbers is not None:
            numbers[i][0][row] = weights[token, rows.key[token, at] % k]


@cache
def _pushes_loop() -> Loop | None:
    """The loop over tokens of push_rows."""
    f = Function("pushes", (
        "first", "end", "key", "row", "buffers", "x", "x_stride", "row_bytes", "weights", "weight_stride",
        "weight_buffers", "k",
    ))  # fmt: skip
    key, row, buffers, x = (f.pointer(name) for name in ("key", "row", "buffers", "x"))
    weights, weight_buffers = f.pointer("weights"), f.pointer("weight_buffers")
    x_stride, row_bytes, weight_stride, k = (f.number(name) for name in ("x_stride", "row_bytes", "weight_stride", "k"))
    weighted, k32, whole = f.is_given(weights), k.to("i32"), row_bytes & -_BYTES

    def copy(kind: str, source: Value, target: Value, at: Value) -> None:
        f.store(f.load(kind, f.at(source, at)), f.at(target, at))

    def pair(t: Value, source: Value, i: Value) -> None:
        of_row = f.load("i32", row, t * k + i)

        def kept() -> None:
            of_key, of_row64 = f.load("i32", key, t * k + i), of_row.to("i64")
            destination, index = (of_key // k32).to("i64"), (of_key % k32).to("i64")
            target = f.at(f.load("ptr", buffers, destination), of_row64 * row_bytes)
            f.loop(0, whole, lambda at: copy(f"<{_BYTES // 8} x i64>", source, target, at), step=_BYTES)
            f.loop(whole, row_bytes, lambda at: copy("i8", source, target, at))

            def store_weight() -> None:
                weight = f.load("float", f.at(weights, t * weight_stride), index)
                f.store(weight, f.load("ptr", weight_buffers, destination), of_row64)

            f.when(weighted, store_weight)

        f.when(of_row >= 0, kept)

    def token(t: Value) -> None:
        source = f.at(x, t * x_stride)
        f.loop(0, k, lambda i: pair(t, source, i))

    f.loop(f.number("first"), f.number("end"), token)
    return compiled(f)
