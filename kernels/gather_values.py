"""gather_values: one number per row, such as the gradient of its weight, back from the owners to tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .entries import entries_of
from .pointers import on_device, runs_on
from .rows import Buffers, TokenRows, cdiv

BLOCK = tl.constexpr(256)


@triton.jit(do_not_specialize=["entries"])
def gather_values_kernel(key_in, row_in, buffers, out, entries, K: tl.constexpr):
    """Program i fetches BLOCK entries."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_in + i, mask=i < entries, other=0)
    row = tl.load(row_in + i, mask=i < entries, other=-1)
    kept = row >= 0
    source = tl.load(buffers + key // K, mask=kept, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(source + row, mask=kept, other=0.0)
    tl.store(out + i // K * K + key % K, value, mask=i < entries)


def gather_values(rows: TokenRows, buffers: Buffers) -> torch.Tensor:
    """float32 [T, K]: what each entry's row has in its owner's buffer, float32 [R]; 0 where there is no row."""
    tokens, k = rows.key.shape
    out = torch.zeros((tokens, k), dtype=torch.float32, device=rows.key.device)
    if not runs_on(out.device):
        entries = entries_of(rows, len(buffers))
        places = zip(buffers.tensors, entries.row.split(entries.owners), strict=True)
        out[entries.token, entries.kth] = torch.cat([buffer.index_select(0, at) for buffer, at in places])
        return out
    if out.numel():
        table, _ = buffers.table()
        with on_device(out.device):
            gather_values_kernel[(cdiv(out.numel(), BLOCK.value),)](*rows, table, out, out.numel(), K=k, num_warps=4)
    return out
