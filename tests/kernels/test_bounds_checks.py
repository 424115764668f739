"""The checks of bounds in the interpreter find kernels that access what they were not given, and accept the others."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from bounds_checks import accessed

from shardweave.kernels import StridedBoxes, copy_boxes, copy_table
from shardweave.kernels.tiling import DESCRIPTOR, Launch

pytestmark = pytest.mark.interp


@triton.jit
def copy_numbers(source, target, length, first, COLS: tl.constexpr, BY_NUMBER: tl.constexpr):
    """Copies `length` numbers to `first` and what follows, in a block of two rows."""
    c = first + tl.reshape(tl.arange(0, 2 * COLS), [2, COLS])
    if BY_NUMBER:
        target = target.to(tl.int64).to(tl.pointer_type(tl.int32))
    tl.store(target + c, tl.load(source + c - first, mask=c < first + length, other=0), mask=c < first + length)


def copied(length: int, first: int = 0, by_number: bool = False) -> None:
    memory = torch.zeros(64, dtype=torch.int32)  # one memory: what is missed hits a neighbour
    source, target = torch.arange(32, dtype=torch.int32), memory[16:48]
    copy_numbers[(1,)](source, target.data_ptr() if by_number else target, length, first, COLS=32, BY_NUMBER=by_number)
    wanted = torch.zeros(64, dtype=torch.int32)
    wanted[16 + first :][:length] = source[:length]
    assert memory.equal(wanted)


@pytest.mark.parametrize("by_number", [False, True])
def test_accesses_within_bounds_are_counted(by_number: bool) -> None:
    before = accessed.copy()
    copied(32, by_number=by_number)
    copied(30, 2, by_number=by_number)
    copied(0, 10**6, by_number=by_number)  # no lane is active
    assert accessed - before == {"masked_load": 3, "masked_store": 3}


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize(
    ("length", "first", "kind"),
    [(33, 0, "masked_load"), (32, 1, "masked_store"), (8, -1, "masked_store"), (8, 10**6, "masked_store")],
)
def test_access_beside_a_tensor_is_found(length: int, first: int, kind: str, by_number: bool) -> None:
    with pytest.raises(Exception, match=rf"OutOfBounds.*{kind}: \d+ of 64 lanes, first lane \d+: bytes .* the tensor"):
        copied(length, first, by_number)


@triton.jit
def add_at(counter, at):
    tl.atomic_add(counter + at, 1, sem="relaxed")
    tl.atomic_cas(counter + at, 1, 2, sem="relaxed")


def test_atomic_operations_are_checked() -> None:
    counter = torch.zeros(4, dtype=torch.int64)
    before = accessed.copy()
    add_at[(1,)](counter, 3)
    assert counter[3] == 2 and accessed - before == {"atomic_rmw": 1, "atomic_cas": 1}
    with pytest.raises(Exception, match="OutOfBounds.*atomic_rmw: 1 of 1 lanes"):
        add_at[(1,)](counter, 4)


@triton.jit
def add_rows(table, out, rows, COLS: tl.constexpr):
    """Adds rows at addresses from a table, all in one block."""
    row = tl.arange(0, 4)
    base = tl.load(table + row, mask=row < rows, other=0).to(tl.pointer_type(tl.int32))
    c = tl.arange(0, COLS)
    numbers = tl.load(base[:, None] + c[None, :], mask=(row < rows)[:, None], other=0)
    tl.store(out + c, tl.sum(numbers, 0))


def test_each_address_of_a_table_has_its_own_bounds() -> None:
    rows = [torch.full((8,), 10**i, dtype=torch.int32) for i in range(3)]
    table = torch.tensor([row.data_ptr() for row in rows] + [0])
    out = torch.zeros(8, dtype=torch.int32)
    add_rows[(1,)](table, out, 3, COLS=8)
    assert out.equal(torch.full((8,), 111, dtype=torch.int32))
    rows[1] = torch.full((7,), 1, dtype=torch.int32)
    table[1] = rows[1].data_ptr()
    with pytest.raises(Exception, match="OutOfBounds.*masked_load: 1 of 32 lanes, first lane 15"):
        add_rows[(1,)](table, out, 3, COLS=8)


def test_freed_memory_is_found() -> None:
    gone = torch.full((8,), 1, dtype=torch.int32)
    table, out = torch.tensor([gone.data_ptr(), 0, 0, 0]), torch.zeros(8, dtype=torch.int32)
    add_rows[(1,)](table, out, 1, COLS=8)
    del gone
    with pytest.raises(Exception, match="OutOfBounds.*no tensor that is alive"):
        add_rows[(1,)](table, out, 1, COLS=8)


@pytest.mark.parametrize("change", ["source_offset", "target_offset", "rows", "columns"])
def test_wrong_descriptor_is_found(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that leaves its buffer by one element, as an error in the tiling would make it."""
    copies = import_module("shardweave.kernels.copy_boxes")  # the package has a function of this name
    launches = copies.tile_launches
    number = DESCRIPTOR.index(change)

    def wrong(*arguments: Any, **named: Any) -> list[Launch]:
        made = launches(*arguments, **named)
        for launch in made:
            launch.descriptors[:, number] += 1
        return made

    # The boxes end where their buffers end, inside larger memory; strides are odd, so that no access is a vector.
    boxes = StridedBoxes([[0]], [0], [[1]], [2], [[5, 3]], [[[1, 7]]], [[1, 9]])
    memory = torch.arange(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    source, target = memory[0][3 : 3 + 1 + 2 * 7 + 5], memory[1][3 : 3 + 2 + 2 * 9 + 5]
    copy_boxes(copy_table(boxes, torch.int16), [source], [target])
    assert target[2:].as_strided((3, 5), (9, 1)).equal(source[1:].as_strided((3, 5), (7, 1)))
    monkeypatch.setattr(copies, "tile_launches", wrong)
    with pytest.raises(Exception, match="OutOfBounds"):
        copy_boxes(copy_table(boxes, torch.int16), [source], [target])
