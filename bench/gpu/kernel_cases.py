"""The cases of the kernels on boxes, with the share of the copy ceiling that each has to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from shardweave.kernels import (
    StridedBoxes,
    copy_boxes,
    copy_table,
    reduce_boxes,
    reduce_table,
)

MIB = 1 << 20
Made = tuple[Callable[[], object], Callable[[], bool]]
"""A call, and a check of its last result."""


@dataclass(frozen=True)
class Case:
    """One box of a source buffer copied to a target buffer, or the sum of several of its boxes.

    Attributes:
        share: the part of the copy ceiling that the kernel has to reach; 0: it has no target.
        sizes: elements of the source and of the target.
        starts: of each box in the source, in elements.
        skip: elements before both buffers, which set their alignment.
    """

    name: str
    share: float
    device: torch.device
    dtype: torch.dtype
    sizes: tuple[int, int]
    extent: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    skip: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written in one call."""
        return (len(self.starts) + 1) * int(np.prod(self.extent)) * self.dtype.itemsize

    def make(self) -> Made:
        """The kernel's call on new buffers, whose target is poisoned, and a check of the target."""
        return self._made(self._kernel)

    @cached_property
    def _kernel(self) -> Callable[..., object]:
        if len(self.starts) == 1:
            return partial(copy_boxes, copy_table(self._boxes, self.dtype, self.device))
        return partial(reduce_boxes, reduce_table(self._boxes, self.dtype, "sum", device=self.device))

    @cached_property
    def _boxes(self) -> StridedBoxes:
        zero, contributors = np.zeros(1, np.int64), len(self.starts)
        return StridedBoxes(
            source=np.zeros((1, contributors), np.int64),
            target=zero,
            source_offset=np.array([self.starts]),
            target_offset=zero,
            extent=np.array([self.extent]),
            source_stride=np.array([[self.source_stride] * contributors]),
            target_stride=np.array([self.target_stride]),
        )

    def _made(self, call: Callable[..., object]) -> Made:
        source = random_buffer(self.sizes[0] + self.skip, self.dtype, self.device)[self.skip :]
        target = poisoned(self.sizes[1] + self.skip, self.dtype, self.device)[self.skip :]
        return partial(call, [source], [target]), partial(self._right, source, target)

    def _right(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether the target has the sum of the boxes, element by element, and is poison elsewhere."""
        total = torch.zeros(self.extent, device=self.device)
        for start in self.starts:
            total += source[start:].as_strided(self.extent, self.source_stride)
        expected = poisoned(len(target), self.dtype, self.device)
        expected.as_strided(self.extent, self.target_stride).copy_(total)
        return bool(target.view(torch.uint8).equal(expected.view(torch.uint8)))


def checked(run: Callable[[], Any], right: Callable[[Any], bool]) -> Made:
    """A call whose result is checked."""
    results: list[Any] = []

    def call() -> None:
        results[:] = [run()]

    return call, lambda: bool(right(results[0]))


def random_buffer(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any of the dtypes."""
    return torch.randint(-8, 9, (elements,), dtype=torch.int8, device=device).to(dtype)


def poisoned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bytes of 255: NaN, or -1."""
    return torch.full((elements * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)


def cases(device: torch.device, payload: int = 256 * MIB, side: int = 4096) -> list[Case]:
    """On `payload` bytes each, matrices of `side` and of twice as many rows; by default those of the targets. Nothing
    is allocated yet."""
    bf16, words = torch.bfloat16, torch.int32

    def copy(name: str, share: float, run: int, pad: int, skip: int, dtype: torch.dtype) -> Case:
        """Rows of `run` bytes, `pad` bytes apart in the source and adjoining in the target, `skip` bytes behind a
        boundary of 512."""
        columns, gap, first = (n // dtype.itemsize for n in (run, pad, skip))
        rows = max(payload // run, 1)
        sizes = rows * (columns + gap), rows * columns
        strides = (columns + gap, 1), (columns, 1)
        return Case(f"copy, {name}", share, device, dtype, sizes, (rows, columns), *strides, skip=first)

    def transposition(share: float, n: int) -> Case:
        return Case(f"transposition, bf16 {n}×{n}", share, device, bf16, (n * n, n * n), (n, n), (1, n), (n, 1))

    def reduction(share: float, terms: int, dtype: torch.dtype) -> Case:
        """What a rank does with what its peers pushed, contiguous and one behind the other."""
        name = f"reduction, {terms} contributors, {'bf16' if dtype == bf16 else 'float32'}"
        n = payload // (terms * dtype.itemsize)
        starts = tuple(k * n for k in range(terms))
        return Case(name, share, device, dtype, (terms * n, n), (n,), (1,), (1,), starts)

    return [
        copy("one run of everything", 0.92, payload, 16, 0, bf16),
        copy("16-byte aligned, runs of 4 KiB", 0.92, 4096, 16, 0, bf16),
        copy("16-byte aligned, runs of 512 B", 0.92, 512, 16, 0, bf16),
        copy("16-byte aligned, runs of 256 B", 0.75, 256, 16, 0, bf16),
        copy("16-byte aligned, runs of 64 B", 0.75, 64, 16, 0, bf16),
        copy("4-byte aligned, runs of 516 B", 0.80, 516, 4, 4, words),
        copy("4-byte aligned, runs of 4 KiB", 0.80, 4096, 4, 4, words),
        copy("2-byte aligned, runs of 514 B", 0.60, 514, 2, 2, bf16),
        copy("2-byte aligned, runs of 4 KiB", 0.60, 4096, 2, 2, bf16),
        transposition(0.80, side),
        transposition(0.80, 2 * side),
        transposition(0.0, side - 1),
        reduction(0.90, 8, bf16),
        reduction(0.0, 8, torch.float32),
        reduction(0.0, 64, bf16),
    ]
