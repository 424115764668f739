"""What the kernels' benchmark measures: boxes with sources and targets, and what a case has to reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from shardweave.kernels import (
    CopyTable,
    ReduceTable,
    StridedBoxes,
    copy_boxes,
    copy_boxes_cpu,
    copy_table,
    reduce_boxes,
    reduce_boxes_cpu,
    reduce_table,
)

MIB = 1 << 20
Made = tuple[Callable[[], object], Callable[[], bool]]


@dataclass(frozen=True)
class Case:
    """One kernel on one set of boxes.

    Attributes:
        share: the part of the copy ceiling that it has to reach.
        moved: bytes read and written in one call.
        make: new poisoned buffers: the kernel's call on them, and whether its targets are right.
        make_reference: the same by the torch reference.
    """

    name: str
    share: float
    moved: int
    make: Callable[[], Made]
    make_reference: Callable[[], Made] | None = None


def copy_case(
    name: str, share: float, device: torch.device, payload: int, run: int, pad: int, skip: int, dtype: torch.dtype
) -> Case:
    """Rows of `run` bytes, `pad` bytes apart in the source and adjoining in the target, both beginning `skip` bytes
    behind a boundary of 512; `payload` bytes in all."""
    columns, gap, first = (n // dtype.itemsize for n in (run, pad, skip))
    rows = max(payload // run, 1)
    boxes = _one_box([0], (rows, columns), (columns + gap, 1), (columns, 1))
    sizes = rows * (columns + gap) + first, rows * columns + first
    return Case(name, share, 2 * rows * run, *_copies(boxes, sizes, first, dtype, device))


def transposition_case(name: str, share: float, device: torch.device, side: int, dtype: torch.dtype) -> Case:
    boxes = _one_box([0], (side, side), (1, side), (side, 1))
    sizes = side * side, side * side
    return Case(name, share, 2 * side * side * dtype.itemsize, *_copies(boxes, sizes, 0, dtype, device))


def _one_box(
    offsets: list[int], extent: tuple[int, ...], source_stride: tuple[int, ...], target_stride: tuple[int, ...]
) -> StridedBoxes:
    """From places in one source, a contributor each, to the beginning of one target."""
    zero = np.zeros(1, np.int64)
    return StridedBoxes(
        source=np.zeros((1, len(offsets)), np.int64),
        target=zero,
        source_offset=np.array([offsets]),
        target_offset=zero,
        extent=np.array([extent]),
        source_stride=np.array([[source_stride] * len(offsets)]),
        target_stride=np.array([target_stride]),
    )


def _copies(
    boxes: StridedBoxes, sizes: Sequence[int], first: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Made], Callable[[], Made]]:
    @cache
    def table() -> CopyTable:
        return copy_table(boxes, dtype, device)

    def make(by_kernel: bool) -> Made:
        source, target = random_buffer(sizes[0], dtype, device)[first:], poisoned(sizes[1], dtype, device)[first:]
        call = partial(copy_boxes, table()) if by_kernel else partial(copy_boxes_cpu, boxes)
        return partial(call, [source], [target]), partial(_right, boxes, source, target)

    return partial(make, True), partial(make, False)


def _right(boxes: StridedBoxes, source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the target has the sum of the one box's sources, element by element, and is poison otherwise."""
    expected = torch.full_like(target.view(torch.uint8), 255).view(target.dtype)
    at = _places(boxes.extent[0], boxes.target_stride[0], target.device)
    total = torch.zeros(at.shape, dtype=torch.float32, device=target.device)
    for k, offset in enumerate(boxes.source_offset[0].tolist()):
        total += source[_places(boxes.extent[0], boxes.source_stride[0, k], source.device) + offset]
    expected[at] = total.to(target.dtype)
    return bool(target.view(torch.uint8).equal(expected.view(torch.uint8)))


def _places(extent: Any, stride: Any, device: torch.device) -> torch.Tensor:
    """int64: where each element of a box lies."""
    at = torch.zeros((), dtype=torch.int64, device=device)
    for n, step in zip(extent.tolist(), stride.tolist(), strict=True):
        at = at[..., None] + torch.arange(n, device=device) * step
    return at.reshape(-1)


def reduction_case(
    name: str, share: float, device: torch.device, terms: int, elements: int, dtype: torch.dtype
) -> Case:
    """The sum of `terms` contiguous slabs of one buffer: what a rank does with what its peers pushed."""
    boxes = _one_box([k * elements for k in range(terms)], (elements,), (1,), (1,))

    @cache
    def table() -> ReduceTable:
        return reduce_table(boxes, dtype, "sum", device=device)

    def make(by_kernel: bool) -> Made:
        source, target = random_buffer(terms * elements, dtype, device), poisoned(elements, dtype, device)
        if by_kernel:
            call = partial(reduce_boxes, table(), [source], [target])
        else:
            call = partial(reduce_boxes_cpu, boxes, [source], [target], "sum")
        return call, partial(_right, boxes, source, target)

    moved = (terms + 1) * elements * dtype.itemsize
    return Case(name, share, moved, partial(make, True), partial(make, False))


def random_buffer(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any of the dtypes."""
    return torch.randint(-8, 9, (elements,), dtype=torch.int8, device=device).to(dtype)


def poisoned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bytes of 255: NaN, or -1."""
    return torch.full((elements * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)


def cases(device: torch.device, dry: bool) -> list[Case]:
    """Those of the targets; dry ones are as many, but tiny."""
    return cases_of(device, 1 << 13 if dry else 256 * MIB, 64 if dry else 4096)


def cases_of(device: torch.device, payload: int, side: int) -> list[Case]:
    """On `payload` bytes each; matrices of `side` and of twice as many rows. Nothing is allocated yet."""
    bf16, words = torch.bfloat16, torch.int32
    return [
        copy_case("copy, one run of everything", 0.92, device, payload, payload, 16, 0, bf16),
        copy_case("copy, 16-byte aligned, runs of 4 KiB", 0.92, device, payload, 4096, 16, 0, bf16),
        copy_case("copy, 16-byte aligned, runs of 512 B", 0.92, device, payload, 512, 16, 0, bf16),
        copy_case("copy, 16-byte aligned, runs of 256 B", 0.75, device, payload, 256, 16, 0, bf16),
        copy_case("copy, 16-byte aligned, runs of 64 B", 0.75, device, payload, 64, 16, 0, bf16),
        copy_case("copy, 4-byte aligned, runs of 516 B", 0.80, device, payload, 516, 4, 4, words),
        copy_case("copy, 4-byte aligned, runs of 4 KiB", 0.80, device, payload, 4096, 4, 4, words),
        copy_case("copy, 2-byte aligned, runs of 514 B", 0.60, device, payload, 514, 2, 2, bf16),
        copy_case("copy, 2-byte aligned, runs of 4 KiB", 0.60, device, payload, 4096, 2, 2, bf16),
        transposition_case(f"transposition, bf16 {side}×{side}", 0.80, device, side, bf16),
        transposition_case(f"transposition, bf16 {2 * side}×{2 * side}", 0.80, device, 2 * side, bf16),
        transposition_case(f"transposition, bf16 {side - 1}×{side - 1} (no target)", 0.0, device, side - 1, bf16),
        reduction_case("reduction, 8 contributors, bf16", 0.90, device, 8, payload // 16, bf16),
        reduction_case("reduction, 8 contributors, float32 (no target)", 0.0, device, 8, payload // 32, torch.float32),
        reduction_case("reduction, 64 contributors, bf16 (no target)", 0.0, device, 64, payload // 128, bf16),
    ]


def rotation(moved: int, cache: int) -> int:
    """How many sets of buffers have to take turns so that none is still in a cache when its turn comes."""
    return max(2, math.ceil(4 * cache / moved) + 1)
