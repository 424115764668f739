"""`overlaps_itself` and `ranges_overlap` against an enumeration of all offsets."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from shardweave.runtime.dtensor.overlap import overlaps_itself, ranges_overlap

pytestmark = pytest.mark.plan


def by_offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    offsets = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*map(range, sizes))]
    return len(set(offsets)) < len(offsets)


def made(sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0).set_(torch.empty(100_000).untyped_storage(), 0, sizes, strides)


def test_overlap_of_all_small_tensors() -> None:
    found = {True: 0, False: 0}
    for sizes in product((1, 2, 3, 4), repeat=2):
        for strides in product(range(8), repeat=2):
            assert overlaps_itself(made(sizes, strides)) == by_offsets(sizes, strides), (sizes, strides)
    random = Random(0)
    for _ in range(4000):
        ndim = random.randint(0, 5)
        sizes = tuple(random.choice((0, 1, 2, 2, 3, 4, 5)) for _ in range(ndim))
        most = random.choice((4, 12, 60))
        strides = tuple(random.choice((1, 2, 3)) * random.randint(0, most) for _ in range(ndim))
        expected = by_offsets(sizes, strides)
        assert overlaps_itself(made(sizes, strides)) == expected, (sizes, strides)
        found[expected] += 1
    assert min(found.values()) > 400


def test_overlap_of_views_and_expanded_tensors() -> None:
    x = torch.empty(1 << 10, 1 << 10, 4)
    for whole in (x, x.permute(2, 0, 1), x[::3, 5:900:7].transpose(0, 2), x[:0], x[0, 0, 0]):
        assert not overlaps_itself(whole)
    for shared in (x[:1].expand(3, -1, -1), x.unfold(1, 5, 3), torch.empty(12).as_strided((4, 4), (2, 1))):
        assert overlaps_itself(shared)
    assert not overlaps_itself(torch.empty(100).unfold(0, 5, 5))


def test_ranges_of_two_tensors() -> None:
    memory, other, random = torch.empty(64), torch.empty(64), Random(1)
    views = [memory.as_strided((m, n), (4, 1), at) for m in range(3) for n in range(4) for at in range(0, 20, 3)]
    views += [memory.as_strided((3, 2), (s, t), at) for s in range(4) for t in range(4) for at in range(0, 20, 3)]
    views += [view.view(torch.float16) for view in views if view.stride(1) == 1]
    found = {True: 0, False: 0}
    for _ in range(3000):
        a, b = random.choice(views), random.choice(views)
        first, second = (
            [
                (v.storage_offset() + i * v.stride(0) + j * v.stride(1)) * v.itemsize + byte
                for i, j in product(*map(range, v.shape))
                for byte in range(v.itemsize)
            ]
            for v in (a, b)
        )
        expected = bool(first and second) and min(first) <= max(second) and min(second) <= max(first)
        assert ranges_overlap(a, b) == expected
        assert not ranges_overlap(a, other)
        found[expected] += 1
    assert min(found.values()) > 400
