"""share_counts: this rank's counts into its row of every rank's matrix."""

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
    told = tl.load(counts + i, mask=i < length, other=0)
    tl.store(matrix + me * width + i, tl.where(i < length, told, word), mask=i < width)


def share_counts(counts: torch.Tensor, matrices: Buffers, me: int, word: int | None = None) -> None:
    """Write `counts`, int32 [S + 1], to row `me` of all matrices, int32 [W, S + 1]; or, with a word of 31 bits, [W,
    S + 2], the word last."""
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
