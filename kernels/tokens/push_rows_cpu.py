"""push_rows on the CPU: a compiled loop over tokens, or torch operations where there is none."""

from __future__ import annotations

import torch

from .compiled_loops import compiled_loop
from .group_rows import Groups, padding_rows
from .rows import Buffers, TokenRows

_NO_WEIGHTS: tuple[torch.Tensor | None, int, torch.Tensor | None, bool] = None, 0, None, False


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
    loop, (tokens, k) = compiled_loop("pushes"), rows.key.shape
    if loop is None:
        push_rows_torch(x, rows, buffers, weights, weight_buffers)
    else:
        key, row = rows.key.contiguous(), rows.row.contiguous()
        if weights is not None and weights.stride(1) != 1:
            weights = weights.contiguous()
        row_bytes, of_weights = x.shape[1] * x.itemsize, _NO_WEIGHTS
        if weights is not None and weight_buffers is not None:
            of_weights = weights, weights.stride(0), weight_buffers.host_addresses(), True
        loop(
            tokens, tokens * k * row_bytes, key, row, buffers.host_addresses(), x, x.stride(0) * x.itemsize, row_bytes,
            *of_weights, k,
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
    numbers = None if weight_buffers is None else weight_buffers.tensors
    for i, buffer in enumerate(buffers.tensors):
        token, at = ((rows.row >= 0) & (destination == i)).nonzero(as_tuple=True)
        row = rows.row[token, at].long()
        buffer.index_copy_(0, row, x.index_select(0, token))
        if weights is not None and numbers is not None:
            numbers[i][row] = weights[token, rows.key[token, at] % k]
