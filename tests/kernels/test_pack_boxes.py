"""Boxes that are packed into contiguous pieces of windows: whole, in stores of 16 bytes, with nothing beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import pytest
import torch
from hint_checks import checked
from test_window_launches import channel

from shardweave.kernels import StridedBoxes, Turn, WindowUse, copy_launches, run_in_window, window_table
from shardweave.kernels.boxes import coalesce
from shardweave.kernels.tiling import LaunchConfig, packed_launch

CPU = torch.device("cpu")
SMALL = LaunchConfig(tile_bytes=64, accesses_per_thread=1, num_warps=1)  # many tiles from small boxes
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


def moves_of_packed(launch) -> Iterator[tuple[int, int]]:
    """As `moves_of`, by what a packed launch's descriptors say."""
    word = launch.source_word
    for row in launch.descriptors.tolist():
        _, _, offset, target, left, *axes = row
        assert left <= launch.columns and (target * word) % 16 == 0
        for lane in range(left):
            at, rest = offset, lane
            for number, (extent, start, stride) in enumerate(zip(axes[::3], axes[1::3], axes[2::3], strict=True), 1):
                rest += start
                rest, here = divmod(rest, extent) if number < launch.axes else (0, rest)
                at += here * stride
            yield from (((target + lane) * word + byte, at * word + byte) for byte in range(word))


@pytest.mark.plan
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_descriptors_cover_every_byte_once(itemsize: int) -> None:
    for name, of in BOXES.items():
        boxes, _ = pieces(of, itemsize)
        launches = copy_launches(boxes, itemsize, config=SMALL, pieces=True)
        assert {launch.kind for launch in launches} <= {"packed", "straight", "transposed"}, name
        got = [move for launch in launches if launch.kind == "packed" for move in moves_of_packed(launch)]
        assert all(launch.target_vector * launch.target_word == 16 for launch in launches), name
        if len(launches) == 1 and launches[0].kind == "packed":
            assert sorted(got) == sorted(moves_of(boxes, itemsize)), name


@pytest.mark.plan
def test_what_is_not_packed() -> None:
    """Boxes that are aligned to 16 bytes throughout, with many axes, or too long for int32."""
    (wide,) = copy_launches(pieces([((4, 16), (32, 1), 0)], 2)[0], 2, pieces=True)
    assert wide.kind == "straight" and wide.source_vector == wide.target_vector == 2 and wide.source_word == 8
    many = tuple(2 * 3**i for i in range(8))
    (box,) = copy_launches(pieces([((2,) * 8, many[::-1], 0)], 2)[0], 2, pieces=True)
    assert box.kind != "packed"
    long = coalesce(pieces([((2, 1 << 31), (1 << 33, 2), 0)], 1)[0])
    assert packed_launch(long, 1, 16, SMALL) is None


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
