"""Loops compiled by numba: elements, threads, numba's cache, and what happens without numba."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from warm_python import run_python

from shardweave.errors import ArgumentError
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
@pytest.mark.parametrize("number", [0, 1, 3, 1000])
def test_each_iteration_is_done(number: int) -> None:
    copies = Copies(1001)
    copies(number)
    assert copies.out.tolist() == [*range(1, number + 1), *[0] * (1001 - number)]


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


@pytest.mark.usefixtures("three_threads")
def test_call_ends_after_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise at any time, but the threads use the caller's memory."""
    copies, ended, interrupts = Copies(9), [], [KeyboardInterrupt("first"), KeyboardInterrupt("second")]
    in_caller = threading.get_ident()

    def call(first: int, *parameters: Any) -> None:
        if threading.get_ident() == in_caller:
            raise interrupts[0]
        time.sleep(0.2)
        ended.append(first)

    real_wait = compiled_loops.wait

    def interrupted(futures: Any) -> None:
        if len(interrupts) > 1:
            raise interrupts.pop()
        real_wait(futures)

    monkeypatch.setattr(compiled_loops, "wait", interrupted)
    monkeypatch.setattr(copies.loop, "_call", call)
    with pytest.raises(KeyboardInterrupt):
        copies(9)
    assert sorted(ended) == [3, 6]


@pytest.mark.usefixtures("three_threads")
def test_call_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends: a pool takes nothing more."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(compiled_loops, "_threads", lambda pid: pool)
    copies = Copies(100)
    copies(100)
    assert copies.out.equal(copies.values)


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


def loops_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of loops as a file of its own, beside which numba keeps its code."""
    from shardweave.kernels.tokens import loops_cpu

    path = folder / "loops_of_test.py"
    shutil.copy(str(loops_cpu.__file__), path)
    spec = importlib.util.spec_from_file_location("loops_of_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kept", ["beside the source", "by the user", "nowhere"])
def test_code_is_kept(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the source; where that is not writable in the user's folder; else each process compiles."""
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    module, user = loops_in(tmp_path, monkeypatch), tmp_path / "user"
    monkeypatch.setenv("XDG_CACHE_HOME", str(user))
    if kept != "beside the source":
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        (tmp_path / "__pycache__").write_text("no folder")
    if kept == "nowhere":
        user.write_text("no folder")
    hits = [compiled_loops._compiled(*module.values()).cache_hits for _ in range(2)]
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.nbc")}
    assert (found, hits) == {
        "beside the source": ({"__pycache__"}, [0, 1]),
        "by the user": ({"user"}, [0, 1]),
        "nowhere": (set(), [0, 0]),
    }[kept]


def test_one_of_many_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes that start at once; the others find what it has written, of each dtype its own."""
    module, children = loops_in(tmp_path, monkeypatch), []
    for _ in range(4):
        children.append(os.fork())
        if not children[-1]:
            hits = 99
            try:
                hits = sum(counted(module, dtype) for dtype in (torch.int32, torch.int64))
            finally:
                os._exit(hits)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert max(codes) <= 2 and sum(codes) == 6


def counted(module: ModuleType, ids_dtype: torch.dtype) -> int:
    """Compile the loop of count_pairs, and check it; whether it was in the cache."""
    compiled = compiled_loops._compiled(*module.counts(ids_dtype))
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(compiled.address)
    ids, results = torch.tensor([1, 0, 1], dtype=ids_dtype), torch.zeros(3, 3, dtype=torch.int32)
    call(0, 3, ids.data_ptr(), 2, 0, 0, 2, *(x.data_ptr() for x in results))
    assert results.tolist() == [[1, 0, 1], [0, 0, 1], [1, 2, 0]]
    return compiled.cache_hits


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


@pytest.mark.parametrize("address", ["storage freed", "zero tensor"])
def test_tensors_without_memory_are_refused(address: str) -> None:
    copies = Copies(5)
    x = torch.zeros(5) if address == "storage freed" else torch._efficientzerotensor(5)
    if address == "storage freed":
        x.untyped_storage().resize_(0)
    copies.out = x
    with pytest.raises(ArgumentError, match=r"a Tensor of shape \(5,\) without memory; allowed: a tensor with memory"):
        copies(5)
    copies.out = x[:0]
    copies(0)
    copies.loop(0, 0, copies.key, copies.row, copies.buffers, None, 1)


def test_numba_is_imported_when_a_loop_is_needed() -> None:
    code = "import sys, shardweave; assert 'numba' not in sys.modules"
    done = run_python([sys.executable, "-c", code], timeout=120)
    assert not done.returncode, done.stderr
