"""Copies of boxes into contiguous pieces, in stores of 16 bytes whatever the lengths of rows are.

A tile is a range of a piece. Each lane finds its word's place in the source by division: rows may be short, and begin
anywhere. So loads, of this device's memory, are as narrow as a word; stores, which go to a peer, are not.
`tiling.packed_launch` makes the descriptors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .addresses import source_address, target_address


@triton.jit
def pack_tile(
    row,  # of the tile's descriptor, int64 [5 + 3 * AXES]
    source_table,
    target_table,
    source0,
    source1,
    source2,
    source3,
    target0,
    WORD: tl.constexpr,
    VD: tl.constexpr,
    COLS: tl.constexpr,
    AXES: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """Copy a tile of up to COLS words, and write zeros up to the next multiple of VD words."""
    source_base = source_address(source_table, tl.load(row), source0, source1, source2, source3, SOURCES)
    target_base = target_address(target_table, tl.load(row + 1), target0, TARGETS)
    target_offset = tl.multiple_of(tl.load(row + 3), VD)
    left = tl.load(row + 4).to(tl.int32)
    c = tl.arange(0, COLS)
    place = tl.load(row + 2) + c.to(tl.int64) * 0
    rest = c
    for axis in tl.static_range(AXES):
        at = rest + tl.load(row + 6 + 3 * axis).to(tl.int32)
        if axis < AXES - 1:
            extent = tl.load(row + 5 + 3 * axis).to(tl.int32)
            rest = at // extent
            at -= rest * extent
        place += at.to(tl.int64) * tl.load(row + 7 + 3 * axis)
    source = tl.multiple_of(source_base.to(tl.pointer_type(WORD)), ALIGN_S)
    target = tl.multiple_of(target_base.to(tl.pointer_type(WORD)), ALIGN_D) + target_offset
    words = tl.load(source + place, mask=c < left, other=0)
    # The compiler widens a masked store only if it knows the mask to be equal in each vector.
    whole = tl.multiple_of((left + (VD - 1)) // VD * VD, VD)
    tl.store(target + c, words, mask=c < whole)
