"""The checks of bounds in the interpreter find kernels that access what they were not given, and accept the others."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds_checks import accessed

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
