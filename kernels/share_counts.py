"""share_counts: write this rank's counts to its row of every rank's matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointers import on_device, runs_on
from .rows import Buffers, power_of_two


@triton.jit(do_not_specialize=["me", "length", "width", "word"])
def share_counts_kernel(counts, matrices, me, length, width, word, LENGTH: tl.constexpr):
    """Program i writes to matrix i."""
    matrix = tl.load(matrices + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, LENGTH)
    values = tl.load(counts + i, mask=i < length, other=0)
    tl.store(matrix + me * width + i, tl.where(i < length, values, word), mask=i < width)


def share_counts(counts: torch.Tensor, matrices: Buffers, me: int, word: int | None = None) -> None:
    """Write `counts` to row `me` of all matrices.

    Args:
        counts: int32 [S + 1].
        matrices: int32 [W, S + 1] of each destination; with `word`, [W, S + 2].
        me: this rank, 0 to W - 1.
        word: a non-negative number below 2**31, written after the counts.
    """
    length, width = len(counts), len(counts) + (word is not None)
    if not runs_on(counts.device):
        for matrix in matrices.tensors:
            matrix[me, :length].copy_(counts)
            if word is not None:
                matrix[me, length] = word
        return
    table, _ = matrices.table()
    with on_device(counts.device):
        share_counts_kernel[(len(matrices),)](
            counts, table, me, length, width, word or 0, LENGTH=power_of_two(width), num_warps=4
        )
