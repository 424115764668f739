"""combine_rows and gather_values on the CPU: compiled loops over tokens, or torch operations where there are none."""

from __future__ import annotations

import torch

from .compiled_loops import compiled_loop
from .quantize_rows import QuantizedRows
from .rows import CHUNK, Buffers, TokenRows


def combine_rows_cpu(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
    nodes: torch.Tensor | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """combine_rows on the CPU."""
    (tokens, k), (_, hidden) = rows.key.shape, out.shape
    loop = compiled_loop("sums", out.dtype)
    if loop is None:
        combine_rows_torch(rows, buffers, out, weights, add, nodes, quantized)
        return
    key, row = rows.key.contiguous(), rows.row.contiguous()
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    of_weights, of_add = ((x, 0 if x is None else x.stride(0), x is not None) for x in (weights, add))
    addresses, row_bytes = buffers.host_addresses(), buffers.shape[1] * buffers.dtype.itemsize
    scales_at, group, powers = 0, 0, False
    if quantized is not None:
        how, scales_at = quantized.how, quantized.scales_at
        group, powers = how.group or hidden, how.scale_dtype is not torch.float32
    loop(
        tokens, tokens * k * row_bytes, key, row, addresses, addresses, None if nodes is None else nodes.contiguous(),
        nodes is not None, *of_weights, out, out.stride(0), *of_add, k, hidden, row_bytes, scales_at, group, powers,
    )  # fmt: skip


def combine_rows_torch(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
    nodes: torch.Tensor | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """combine_rows in torch operations, by its definition: a pair of each token at a time."""
    (tokens, k), (_, hidden), dtype = rows.key.shape, out.shape, out.dtype
    tensors, most = buffers.tensors, max(1, CHUNK // max(hidden, 1))
    for first in range(0, tokens, most):
        these = slice(first, first + most)
        key, row, result = rows.key[these].long(), rows.row[these].long(), out[these]
        total, partial, of_nodes = (torch.zeros(result.shape, device=out.device) for _ in range(3))
        last, last_node = (torch.full((len(key),), -1, device=out.device) for _ in range(2))

        def move(chosen: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
            at = chosen.nonzero()[:, 0]
            target.index_add_(0, at, source.index_select(0, at).to(dtype).float())
            source.index_fill_(0, at, 0)

        for of_key, of_row in zip(key.T, row.T, strict=True):
            destination, kept = of_key // k, of_row >= 0
            move(kept & (destination != last), partial, total)
            if nodes is not None:
                node = torch.where(kept, nodes[destination.where(kept, 0)].long(), last_node)
                move(node != last_node, total, of_nodes)
                last_node = node
            for i, tensor in enumerate(tensors):
                at = (kept & (destination == i)).nonzero()[:, 0]
                value = tensor.index_select(0, of_row[at])
                value = value.float() if quantized is None else quantized.values(value, hidden)
                if weights is not None:
                    value *= weights[first + at, of_key[at] % k][:, None]
                partial.index_add_(0, at, value)
            last = torch.where(kept, destination, last)
        total += partial.to(dtype).float()
        if nodes is not None:
            total = of_nodes + total.to(dtype).float()
        result.copy_(total if add is None else total + add[these])


def gather_values_cpu(rows: TokenRows, buffers: Buffers, out: torch.Tensor) -> None:
    """gather_values on the CPU; `out` holds zeros."""
    (tokens, k), loop = rows.key.shape, compiled_loop("values")
    key, row = rows.key.contiguous(), rows.row.contiguous()
    if loop is None:
        destination = key // max(k, 1)
        for i, values in enumerate(buffers.tensors):
            token, at = ((row >= 0) & (destination == i)).nonzero(as_tuple=True)
            out[token, (key[token, at] % k).long()] = values[row[token, at].long()]
    else:
        loop(tokens, 0, key, row, buffers.host_addresses(), out, k)
