from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_box_cases import Case, random_bytes, random_case, raw
from variants import crossed

from shardweave.kernels import (
    LaunchConfig,
    StridedBoxes,
    copy_boxes,
    copy_boxes_cpu,
    copy_table,
)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
KINDS = ["any", "straight", "transposed", "strided"]
SMALL = LaunchConfig(tile_bytes=64, accesses_per_thread=1, num_warps=1)  # many tiles from small boxes


def one_box(extent, source_stride, target_stride, fill=0, source=0, source_offset=0, target_offset=0) -> StridedBoxes:
    return StridedBoxes(
        np.array([[source]]),
        np.array([0]),
        np.array([[source_offset]]),
        np.array([target_offset]),
        np.array([extent], np.int64).reshape(1, -1),
        np.array([[source_stride]], np.int64).reshape(1, 1, -1),
        np.array([target_stride], np.int64).reshape(1, -1),
        fill,
    )


def enumerate_copy(boxes: StridedBoxes, sources: list[np.ndarray], targets: list[np.ndarray], fill: np.ndarray) -> None:
    """Element by element over [elements, itemsize] bytes."""
    for i in range(len(boxes)):
        for index in itertools.product(*map(range, boxes.extent[i])):
            at = boxes.target_offset[i] + np.dot(boxes.target_stride[i], index)
            element = fill
            if boxes.source[i, 0] >= 0:
                element = sources[boxes.source[i, 0]][
                    int(boxes.source_offset[i, 0] + np.dot(boxes.source_stride[i, 0], index))
                ]
            targets[boxes.target[i]][int(at)] = element


def check_copy(
    rng, case: Case, dtype: torch.dtype, device: str, config: LaunchConfig | None = SMALL, skip=(0, 0)
) -> None:
    """Compare with the enumeration on targets of random bytes; elements outside the boxes must not change."""
    sources = [random_bytes(rng, size, dtype, skip[0]).to(device)[:] for size in case.source_sizes]
    targets = [random_bytes(rng, size, dtype, skip[1]).to(device)[:] for size in case.target_sizes]
    if device != "cpu" and any(skip):  # a transfer makes a fresh, aligned tensor
        sources = [torch.cat([t.new_empty(skip[0]), t])[skip[0] :] for t in sources]
        targets = [torch.cat([t.new_empty(skip[1]), t])[skip[1] :] for t in targets]
    want = [raw(t).copy() for t in targets]
    element = raw(torch.tensor([case.boxes.fill]).to(dtype))[0]
    enumerate_copy(case.boxes, [raw(s) for s in sources], want, element)
    table = copy_table(case.boxes, dtype, device, config)
    copy_boxes(table, sources, targets)
    for got, expected in zip(targets, want, strict=True):
        np.testing.assert_array_equal(raw(got), expected)


@pytest.mark.parametrize("axes", range(5))
def test_copy_boxes_cpu_equals_enumeration(axes):
    rng = np.random.default_rng(axes)
    for dtype in DTYPES:
        case = random_case(rng, axes, fill=1)
        sources = [random_bytes(rng, size, dtype, 1) for size in case.source_sizes]
        targets = [random_bytes(rng, size, dtype, 2) for size in case.target_sizes]
        want = [raw(t).copy() for t in targets]
        enumerate_copy(case.boxes, [raw(s) for s in sources], want, raw(torch.tensor([1]).to(dtype))[0])
        copy_boxes_cpu(case.boxes, sources, targets)
        for got, expected in zip(targets, want, strict=True):
            np.testing.assert_array_equal(raw(got), expected)


def one_of_its_size(kind: str, dtype: torch.dtype) -> bool:
    """Whether this dtype stands for those of its size with boxes of this kind."""
    alike = [other for other in DTYPES if other.itemsize == dtype.itemsize]
    return KINDS.index(kind) % len(alike) == alike.index(dtype)


@crossed("kind, dtype", KINDS, DTYPES, ids=str, gate=one_of_its_size)
def test_copy_boxes_equals_enumeration(device, dtype, kind):
    rng = np.random.default_rng([dtype.itemsize, len(kind)])
    for axes in range(5):
        fill = None if axes == 1 else 0 if dtype.is_complex else 1
        check_copy(rng, random_case(rng, axes, count=3, kind=kind, fill=fill, most=5), dtype, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", ["straight", "transposed"])
def test_kernel_copies_aligned_boxes_in_default_tiles(device, dtype, kind):
    rng = np.random.default_rng(5)
    check_copy(rng, random_case(rng, 2, unit=8, kind=kind, count=4, most=16), dtype, device, config=None)


@pytest.mark.parametrize("buffers", [1, 3, 4, 5, 9])
def test_copy_boxes_reads_addresses_from_table(device, buffers):
    rng = np.random.default_rng(buffers)
    check_copy(rng, random_case(rng, 2, buffers=buffers, count=12, fill=1, most=4), torch.int16, device)


@pytest.mark.parametrize("skip", [(1, 0), (0, 1), (2, 4)])
def test_kernel_narrows_its_words_for_unaligned_buffers(device, skip):
    rng = np.random.default_rng(6)
    case = random_case(rng, 2, unit=8, kind="straight", count=3)
    check_copy(rng, case, torch.bfloat16, device, skip=skip)


def test_kernel_copies_bytes_from_and_to_odd_addresses(device):
    base = torch.arange(64, dtype=torch.uint8, device=device)
    source = base[1:41]
    out = torch.zeros(43, dtype=torch.uint8, device=device)
    copy_boxes(copy_table(one_box([5, 8], [8, 1], [8, 1]), 1, device), [source], [out[3:]])
    assert out.tolist() == [0] * 3 + list(range(1, 41))


def test_copy_boxes_of_no_boxes_launches_nothing(device):
    for extent in ([0], [3, 0]):
        table = copy_table(one_box(extent, [1] * len(extent), [1] * len(extent)), torch.float32, device)
        assert table.variant(16, 16) == []
        copy_boxes(table, [torch.zeros(0, device=device)], [torch.zeros(0, device=device)])
