"""gather_values: fetch one number per row, such as a weight's gradient, from the destinations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointers import on_device, runs_on
from .rows import Buffers, TokenRows, cdiv

BLOCK = tl.constexpr(256)


@triton.jit(do_not_specialize=["pairs"])
def gather_values_kernel(key_in, row_in, buffers, out, pairs, K: tl.constexpr):
    """Program i fetches the values of BLOCK pairs."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_in + i, mask=i < pairs, other=0)
    row = tl.load(row_in + i, mask=i < pairs, other=-1)
    kept = row >= 0
    source = tl.load(buffers + key // K, mask=kept, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(source + row, mask=kept, other=0.0)
    tl.store(out + i // K * K + key % K, value, mask=i < pairs)


def gather_values(rows: TokenRows, buffers: Buffers) -> torch.Tensor:
    """Return the value of each pair's row, float32 [T, K]; 0 where there is no row.

    Args:
        rows: from locate_rows.
        buffers: float32 [R] of each destination.
    """
    tokens, k = rows.key.shape
    out = torch.zeros((tokens, k), dtype=torch.float32, device=rows.key.device)
    if not runs_on(out.device):
        pairs = rows.sorted_pairs(len(buffers))
        places = zip(buffers.tensors, pairs.row.split(pairs.sizes), strict=True)
        out[pairs.token, pairs.kth] = torch.cat([buffer.index_select(0, at) for buffer, at in places])
        return out
    if out.numel():
        table, _ = buffers.table()
        with on_device(out.device):
            gather_values_kernel[(cdiv(out.numel(), BLOCK.value),)](
                rows.key, rows.row, table, out, out.numel(), K=k, num_warps=4
            )
    return out
