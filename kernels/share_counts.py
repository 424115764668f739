"""share_counts: this rank's counts into its row of every rank's matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointers import on_device, runs_on
from .rows import Buffers, power_of_two


@triton.jit(do_not_specialize=["me", "length"])
def share_counts_kernel(counts, matrices, me, length, LENGTH: tl.constexpr):
    """Program i writes to matrix i."""
    matrix = tl.load(matrices + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, LENGTH)
    tl.store(matrix + me * length + i, tl.load(counts + i, mask=i < length, other=0), mask=i < length)


def share_counts(counts: torch.Tensor, matrices: Buffers, me: int) -> None:
    """Write `counts`, int32 [S + 1], to row `me` of all matrices, int32 [W, S + 1]."""
    if not runs_on(counts.device):
        for matrix in matrices.tensors:
            matrix[me].copy_(counts)
        return
    table, _ = matrices.table()
    length = len(counts)
    with on_device(counts.device):
        share_counts_kernel[(len(matrices),)](counts, table, me, length, LENGTH=power_of_two(length), num_warps=4)
