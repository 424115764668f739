"""Boxes that are packed into contiguous pieces of windows: whole, in stores of 16 bytes, with nothing beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import pytest
import torch
from hint_checks import checked

from shardweave.kernels import StridedBoxes, Turn, WindowUse, run_in_window, window_table
from shardweave.kernels.channel import SLOT, Channel, Failure, pack

CPU = torch.device("cpu")
Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Extents, source strides and source offset."""

BOXES: dict[str, list[Box]] = {
    "short rows": [((5, 7), (21, 1), 7)],
    "odd offset": [((35,), (1,), 3)],
    "even words": [((6, 6), (10, 1), 2)],
    "one element": [((1, 1), (9, 1), 4)],
    "transposed": [((7, 5), (1, 7), 0)],
    "every second": [((9,), (2,), 1)],
    "three axes": [((2, 3, 5), (40, 8, 1), 1)],
    "empty": [((3, 0), (8, 1), 0)],
    "wide and odd": [((4, 16), (32, 1), 0), ((3, 3), (11, 1), 1)],
    "several": [((5, 7), (9, 1), 2), ((1,), (1,), 0), ((17, 3), (3, 1), 5)],
}


def channel(number: int) -> Channel:
    pads = torch.zeros(2, 3, SLOT, dtype=torch.int64)
    slots = [pads[1, i].data_ptr() for i in range(3)]
    return Channel(pads[0], slots, [pack(1, peer, number) for peer in (0, 2, 3)], Failure(CPU))


def pieces(boxes: Sequence[Box], itemsize: int) -> tuple[StridedBoxes, int]:
    """The boxes into pieces of target 1, one after the other, and the elements of that target."""
    targets, sources, end, unit = [], [], 16 // itemsize, 16 // itemsize
    for extent, strides, offset in boxes:
        contiguous = tuple(prod(max(n, 1) for n in extent[i + 1 :]) for i in range(len(extent)))
        targets.append((1, (extent, contiguous, end)))
        sources.append([(0, (extent, strides, offset))])
        end += -(-prod(extent) // unit) * unit
    axes = max(len(extent) for extent, *_ in boxes)
    full = [(n, (_padded(e, axes, 1), _padded(s, axes, 0), at)) for n, (e, s, at) in targets]
    read = [[(n, (_padded(e, axes, 1), _padded(s, axes, 0), at)) for n, (e, s, at) in row] for row in sources]
    return StridedBoxes.of_rows(full, read, 0), end + unit


def _padded(numbers: Sequence[int], axes: int, value: int) -> tuple[int, ...]:
    return (value,) * (axes - len(numbers)) + tuple(numbers)


def moves_of(boxes: StridedBoxes, itemsize: int) -> Iterator[tuple[int, int]]:
    """The bytes of the target and of the source that boxes copy."""
    for i in range(len(boxes)):
        for index in itertools.product(*map(range, boxes.extent[i])):
            to = int(boxes.target_offset[i] + np.dot(boxes.target_stride[i], index))
            of = int(boxes.source_offset[i, 0] + np.dot(boxes.source_stride[i, 0], index))
            yield from ((to * itemsize + byte, of * itemsize + byte) for byte in range(itemsize))


@pytest.mark.interp
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.long) for d in (torch.uint8, torch.float32, torch.complex128)),
    ],
    ids=str,
)
def test_pieces_are_whole_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    """Hints hold, and bytes outside the pieces, rounded up to 16 bytes, do not change."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    before = checked["multiple_of"]
    for name, of in BOXES.items():
        for skip in (0, 1):
            boxes, elements = pieces(of, dtype.itemsize)
            use = WindowUse(channel(1), channel(0), True, 4096)
            table = window_table(boxes, dtype, CPU, use, pieces=True)
            bytes_ = torch.randint(0, 256, ((256 + skip) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            source = bytes_.view(dtype)[skip:]
            window = torch.full((elements * dtype.itemsize,), 0xA5, dtype=torch.uint8)
            want, inside = window.clone(), torch.zeros(len(window), dtype=torch.bool)
            for to, at in moves_of(boxes, dtype.itemsize):
                want[to], inside[to // 16 * 16 : to // 16 * 16 + 16] = bytes_[at + skip * dtype.itemsize], True
            written = torch.zeros(len(window), dtype=torch.bool)
            written[[to for to, _ in moves_of(boxes, dtype.itemsize)]] = True
            run_in_window(table, [source], [window[:0].view(dtype), window.view(dtype)], Turn(7, 9))
            assert window[written].equal(want[written]), (name, skip)
            assert bool((window[~inside] == 0xA5).all()), (name, skip)
    assert checked["multiple_of"] > before
