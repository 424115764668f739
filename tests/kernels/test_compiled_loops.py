"""Loops compiled by numba: elements, threads of forked processes, and what happens without numba."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable

import pytest
import torch
from warm_python import run_python

from shardweave.kernels import PAYLOADS
from shardweave.kernels.tokens import compiled_loops
from shardweave.kernels.tokens.compiled_loops import Loop, compiled_loop, why_not_compiled

pytest.importorskip("numba", reason="numba is not installed; it comes with shardweave[cpu]")
pytestmark = pytest.mark.plan


class Copies:
    """The loop of gather_values, of numbers in order: it copies them."""

    def __init__(self, number: int) -> None:
        self.key, self.row = torch.zeros(number, dtype=torch.int32), torch.arange(number, dtype=torch.int32)
        self.values = torch.arange(1.0, number + 1)
        self.buffers = torch.tensor([self.values.data_ptr()])
        # Shared with forked processes.
        self.out = torch.frombuffer(mmap.mmap(-1, 4 * number + 4), dtype=torch.float32)[:number]
        self.loop = Loop("values")

    def __call__(self, number: int) -> None:
        self.loop(number, 8 * number, self.key, self.row, self.buffers, self.out, 1)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled_loops, "_PARALLEL", 8)


@pytest.mark.usefixtures("three_threads")
def test_forked_processes_have_threads_of_their_own() -> None:
    copies = Copies(100)
    copies(100)
    copies.out.zero_()
    child = os.fork()
    if not child:
        copies(100)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 and copies.out.equal(copies.values)


@pytest.mark.parametrize("dtype", PAYLOADS)
def test_elements(dtype: torch.dtype) -> None:
    """Conversions are torch's, for values between those of the dtype, zeros, subnormal and large ones, and NaN."""
    from numba import cfunc, float32, int64, types, uint16, void

    from shardweave.kernels.tokens import loops_cpu

    of, value_of, store, rounded = loops_cpu.CODES[dtype], loops_cpu.value_of, loops_cpu.store, loops_cpu.rounded

    def convert(x, narrow, wide, around, n):  # type: ignore[no-untyped-def]
        for i in range(n):
            store(narrow, i, x[i], of)
            wide[i] = value_of(narrow[i], of)
            around[i] = rounded(x[i], of)

    floats, elements = types.CPointer(float32), types.CPointer(float32 if dtype is torch.float32 else uint16)
    compiled = cfunc(void(floats, elements, floats, floats, int64))(convert)
    exponents = torch.arange(1 << 12, dtype=torch.int32) << 20  # all of them, both signs
    fractions = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2001, 0x18000, 0x3000, 0xFFFFF]
    given = (exponents[:, None] + torch.tensor(fractions).int()).flatten().view(torch.float32)
    narrow, wide, around = torch.zeros(given.shape, dtype=dtype), torch.zeros_like(given), torch.zeros_like(given)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(compiled.address)
    call(*(x.data_ptr() for x in (given, narrow, wide, around)), len(given))
    want, number = given.to(dtype), ~given.isnan()
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert narrow.view(bits)[number].equal(want.view(bits)[number])
    assert narrow.isnan().equal(~number)
    for result in wide, around:
        assert result.isnan().equal(~number)
        assert result.view(torch.int32)[number].equal(want.float().view(torch.int32)[number])


def without_numba(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "numba", None)
    return "numba is not installed: pip install 'shardweave[cpu]'"


def with_numba_that_fails(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("numba.cfunc", refuse)
    return "numba fails: no"


@pytest.mark.parametrize("change", [without_numba, with_numba_that_fails])
def test_what_is_not_compiled_says_so_once(
    change: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert why_not_compiled() is None
    monkeypatch.delitem(sys.modules, "shardweave.kernels.tokens.loops_cpu", raising=False)
    why = change(monkeypatch)
    for cached in compiled_loop, compiled_loops._warn:
        monkeypatch.setattr(compiled_loops, cached.__name__, compiled_loops.cache(cached.__wrapped__))
    monkeypatch.setattr(logging.getLogger("shardweave"), "propagate", True)
    with caplog.at_level(logging.WARNING, "shardweave.kernels"):
        assert compiled_loops.compiled_loop("values") is None
        assert compiled_loops.compiled_loop("sums", torch.float32) is None
    (message,) = caplog.messages
    assert message.endswith(
        f"torch operations dispatch and combine tokens on CPUs, in several times the time of loops: {why}"
    )
    assert why_not_compiled() == why


def test_numba_is_imported_when_a_loop_is_needed() -> None:
    code = "import sys, shardweave; assert 'numba' not in sys.modules"
    done = run_python([sys.executable, "-c", code], timeout=120)
    assert not done.returncode, done.stderr
