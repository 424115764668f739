"""The checks of hints in the interpreter find kernels that are wrong, and accept those that are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hint_checks import checked

pytestmark = pytest.mark.interp


@triton.jit
def copy_words(source, target, length, stride, VEC: tl.constexpr, ALIGN: tl.constexpr, COLS: tl.constexpr):
    """Copies two rows of `length` words."""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int16)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(tl.int16)), ALIGN)
    c = tl.arange(0, COLS)
    for row in range(2):
        at = tl.multiple_of(row * stride, VEC) + c
        tl.store(there + at, tl.load(here + at, mask=c < length, other=0), mask=c < length)


def copied(length: int, stride: int, shift: int = 0, vector: int = 8) -> None:
    memory = torch.zeros(2, 256, dtype=torch.int16)
    source, target = (row[-(row.data_ptr() // 2) % 8 :][shift:] for row in memory)
    copy_words[(1,)](source.data_ptr(), target.data_ptr(), length, stride, VEC=vector, ALIGN=2 * vector, COLS=32)


def test_true_hints_are_counted() -> None:
    before = checked.copy()
    copied(length=24, stride=32)
    assert checked - before == {"multiple_of": 4, "loads": 2, "stores": 2}
    copied(length=21, stride=21, shift=1, vector=1)  # promises nothing


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 24, "stride": 36}, r"tl.multiple_of\(\[36\]…, \[8\]\)"),
        ({"length": 24, "stride": 32, "shift": 3}, r"tl.multiple_of\(\[\d+\]…, \[16\]\)"),
        ({"length": 21, "stride": 32}, "a load of shape .* is not one of vectors of 8 words of 2 bytes"),
    ],
    ids=["stride", "address", "mask"],
)
def test_false_hint_is_found(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        copied(**given)


@triton.jit
def hint_blocks(out, STEP: tl.constexpr, RUN: tl.constexpr, FIRST: tl.constexpr, SAME: tl.constexpr):
    i = tl.arange(0, 16)
    at = i // 4 * STEP + i % 4
    at = tl.multiple_of(tl.max_contiguous(at, [RUN]), [FIRST])
    tl.store(out + at, tl.max_constancy(i // 4, [SAME]))


@pytest.mark.parametrize(
    ("constants", "false"),
    [
        ((8, 4, 8, 4), None),
        ((4, 16, 16, 2), None),
        ((8, 8, 8, 4), "max_contiguous"),
        ((6, 4, 4, 4), "multiple_of"),
        ((8, 4, 8, 8), "max_constancy"),
    ],
    ids=str,
)
def test_hints_of_blocks(constants: tuple[int, ...], false: str | None) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    if false is None:
        hint_blocks[(1,)](out, *constants)
    else:
        with pytest.raises(Exception, match=rf"tl.{false}\("):
            hint_blocks[(1,)](out, *constants)
