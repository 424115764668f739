"""Loops compiled for the CPU: IR, machine code, and what happens where nothing can be compiled."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from shardweave.errors import ArgumentError
from shardweave.kernels import PAYLOADS
from shardweave.kernels.cpu_code import compile as cpu_compile
from shardweave.kernels.cpu_code.compile import Loop, NotCompiledError, compiled, machine_code, object_file
from shardweave.kernels.cpu_code.elements import Elements
from shardweave.kernels.cpu_code.llvm_ir import Function, Value
from shardweave.kernels.tokens import (
    combine_rows_cpu,
    count_pairs_cpu,
    locate_rows_cpu,
    push_rows_cpu,
    weigh_rows_cpu,
)

pytestmark = pytest.mark.plan


def squares() -> Function:
    """out[i] = i * i + out[i]"""
    f = Function("squares", ("first", "end", "out"))
    out = f.pointer("out")
    f.loop(f.number("first"), f.number("end"), lambda i: f.store(i * i + f.load("i64", out, i), out, i))
    return f


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("number", [0, 1, 3, 1000])
def test_each_iteration_is_done_once(threads: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_compile, "_PARALLEL", 8)
    out = np.zeros(1001, np.int64)
    Loop(squares())(number, 8 * number, out.ctypes.data)
    assert out.tolist() == [i * i for i in range(number)] + [0] * (1001 - number)


def test_forked_processes_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu_compile, "_PARALLEL", 8)
    loop = Loop(squares())
    out = np.frombuffer(mmap.mmap(-1, 800), np.int64)  # shared
    loop(100, 800, out.ctypes.data)
    child = os.fork()
    if not child:
        loop(100, 800, out.ctypes.data)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 and out.tolist() == [2 * i * i for i in range(100)]


def test_values() -> None:
    """Every operation on values, with loops in conditions in loops."""
    f = Function("values", ("first", "end", "x", "out"))
    x, out = f.pointer("x"), f.pointer("out")

    def row(r: Value) -> None:
        a, b = f.load("i64", x, r * 2), f.load("i64", x, r * 2 + 1)

        def sum_to() -> list[Value]:
            return [*f.loop(0, a, lambda i, s: [s + i * f.when(i.differs(3), lambda: [i], [b])[0]], [b])]

        (total,) = f.when(a >= 0, sum_to, [f.constant("i64", -7)])
        quotient = a // b + (a % b << 1) + (a & 6) + (b >> 1)
        small = a.below(b).to("i64") + a.equals(b).to("i64") * 2 + (a < b).to("i64") * 4
        floats = f.vector([(a.to("i32") + 0).to("i32").bits("float")] * 4).bits("i32").bits("float")
        nan = floats.is_nan().where(f.zero("<4 x float>"), floats).sum().bits("i32").signed_to("i64")
        for i, value in enumerate((total, quotient, small, nan)):
            f.store(value, f.at(out, r * 32 + 8 * i))

    f.loop(f.number("first"), f.number("end"), row)
    pairs = [(5, 3), (-4, 9), (0, 1), (7, 7), (0x7FC00000 - (1 << 32), 5)]
    given, result = np.array(pairs, np.int64), np.zeros((len(pairs), 4), np.int64)
    Loop(f)(len(pairs), 0, given.ctypes.data, result.ctypes.data)
    for (a, b), (total, quotient, small, nan) in zip(pairs, result.tolist(), strict=True):
        unsigned = a % 2**64
        assert total == (b + sum(i * (i if i != 3 else b) for i in range(a)) if a >= 0 else -7)
        wanted = (unsigned // b + (unsigned % b << 1) + (a & 6) + (b >> 1) + 2**63) % 2**64 - 2**63
        assert quotient == wanted
        assert small == (unsigned < b) + 2 * (a == b) + 4 * (a < b)
        of_bits = np.array([a % 2**32], np.uint32).view(np.float32)[0]
        four = np.float32(0) if np.isnan(of_bits) else (of_bits + of_bits) + (of_bits + of_bits)
        assert nan == four.view(np.int32)


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements(dtype: torch.dtype, n: int) -> None:
    """Conversions are torch's, for values between those of the dtype, zeros, subnormal and large ones, and NaN."""
    names = "x", "narrow", "wide", "rounded"
    f = Function("elements", ("first", "end", *names))
    x, narrow, wide, rounded = map(f.pointer, names)
    elements = Elements(f, dtype, n)

    def move(i: Value) -> None:
        value = f.load(elements.float, f.at(x, i * 4 * n))
        elements.store(value, f.at(narrow, i * dtype.itemsize * n))
        f.store(elements.load(f.at(narrow, i * dtype.itemsize * n)), f.at(wide, i * 4 * n))
        f.store(elements.rounded(value), f.at(rounded, i * 4 * n))

    f.loop(f.number("first"), f.number("end"), move)
    exponents = torch.arange(1 << 12, dtype=torch.int32) << 20  # all of them, both signs
    fractions = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x18000, 0x3000, 0xFFFFF])
    given = (exponents[:, None] + fractions.int()).flatten().view(torch.float32)
    results = torch.zeros(given.shape, dtype=dtype), torch.zeros_like(given), torch.zeros_like(given)
    Loop(f)(len(given) // n, 0, given, *results)
    want = given.to(dtype)
    assert torch.equal(results[0].nan_to_num(1.5, None, None), want.nan_to_num(1.5, None, None))
    assert torch.equal(results[0].signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    for result in results[1:]:
        assert torch.equal(result.isnan(), want.isnan())
        assert torch.equal(result[~want.isnan()], want.float()[~want.isnan()])


def test_code_cannot_be_written() -> None:
    loop = Loop(squares())
    address = loop._memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"
            return
    pytest.fail("the code is not mapped")


def ir_of(body: str, more: str = "") -> str:
    return f"{more}\ndefine void @given(ptr %p) nounwind {{\n{body}\n  ret void\n}}"


def test_constants_are_loaded() -> None:
    factors = (3, 5, 7, 11, 13, 17, 19, 23)
    product = f"mul <8 x i32> %v, <{', '.join(f'i32 {x}' for x in factors)}>"
    code, start = machine_code(
        object_file(
            ir_of(f"  %v = load <8 x i32>, ptr %p, align 4\n  %w = {product}\n  store <8 x i32> %w, ptr %p, align 4")
        ),
        "given",
    )
    assert b"".join(x.to_bytes(4, "little") for x in factors) in code  # they are in memory
    memory, numbers = cpu_compile.executable(code), np.arange(8, dtype=np.int32)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(memory.ctypes.data + start)(numbers.ctypes.data)
    assert numbers.tolist() == [i * x for i, x in enumerate(factors)]


def test_code_that_refers_to_other_memory_is_refused() -> None:
    elf = object_file(ir_of("  call void @other(ptr %p)", "declare void @other(ptr)"))
    with pytest.raises(ValueError, match="calls functions or refers to other memory"):
        machine_code(elf, "given")


def test_functions_are_found_by_name() -> None:
    elf = object_file(
        ir_of("  store i32 5, ptr %p", "define void @before(ptr %p) {\n  store i32 7, ptr %p\n  ret void\n}")
    )
    (code, first), (same, second) = machine_code(elf, "before"), machine_code(elf, "given")
    assert code == same and first == 0 < second < len(code)
    with pytest.raises(ValueError, match="no function giv$"):
        machine_code(elf, "giv")


@pytest.mark.parametrize("features, refused", [("", "half"), ("+avx2,+f16c", None), ("+avx512f,+avx512bw,+fma", None)])
def test_all_loops_compile(features: str, refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They call nothing; where a processor cannot convert float16, those with it are refused."""
    if os.uname().machine != "x86_64":
        pytest.skip("processors of x86_64")
    functions: list[Function] = []
    for module in (combine_rows_cpu, count_pairs_cpu, locate_rows_cpu, push_rows_cpu, weigh_rows_cpu):
        monkeypatch.setattr(module, "compiled", functions.append)
    uncached: Callable[[Callable], Callable] = lambda loop: loop.__wrapped__  # noqa: E731
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale in (None, torch.float32, torch.float8_e8m0fnu):
            for nested in (False, True):
                uncached(combine_rows_cpu._sums_loop)(dtype, scale, nested)
        uncached(weigh_rows_cpu._weighs_loop)(dtype)
    for loop in (combine_rows_cpu._values_loop, locate_rows_cpu._locations_loop, push_rows_cpu._pushes_loop):
        uncached(loop)()
    for ids in (torch.int32, torch.int64):
        uncached(count_pairs_cpu._counts_loop)(ids)
    assert len(functions) == 26
    monkeypatch.setattr(cpu_compile, "cpu_target", lambda: ("x86_64", features))
    for function in functions:
        ir = function.ir()
        if refused is not None and re.search(rf"\b{refused}\b", ir):
            with pytest.raises(ValueError, match="calls functions or refers to other memory"):
                machine_code(object_file(ir), function.name)
        else:
            code, start = machine_code(object_file(ir), function.name)
            assert start == 0 and len(code) < 8192


def of_another_machine(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    return "this is Linux riscv64; allowed: Linux on x86_64 or aarch64"


def of_another_triton(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu_compile, "_llvm", lambda machine: type("", (), {"translate_to_asm": lambda: None}))
    return f"triton {triton.__version__} takes other arguments to compile"


def without_executable_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", refuse)
    return "[Errno 1] Operation not permitted"


@pytest.mark.parametrize("change", [of_another_machine, of_another_triton, without_executable_memory])
def test_what_cannot_be_compiled_says_so_once(
    change: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not any(map(combine_rows_cpu.why_not_compiled, PAYLOADS))
    why = change(monkeypatch)
    with pytest.raises(NotCompiledError, match=re.escape(why)):
        Loop(squares())
    monkeypatch.setattr(cpu_compile, "_warned", set())
    monkeypatch.setattr(logging.getLogger("shardweave"), "propagate", True)
    with caplog.at_level(logging.WARNING, "shardweave.kernels"):
        assert compiled(squares()) is None and compiled(squares()) is None
    (message,) = caplog.messages
    assert message.endswith(
        "torch operations dispatch and combine tokens on CPUs, many times as slow as loops that Triton's LLVM "
        f"compiles, which it cannot here: {why}"
    )
    assert [combine_rows_cpu.why_not_compiled(dtype) for dtype in PAYLOADS] == [why] * len(PAYLOADS)


@pytest.mark.parametrize("address", ["storage freed", "zero tensor"])
def test_tensors_without_memory_are_refused(address: str) -> None:
    x = torch.zeros(5, dtype=torch.int64) if address == "storage freed" else torch._efficientzerotensor(5)
    if address == "storage freed":
        x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"a Tensor of shape \(5,\) without memory; allowed: a tensor with memory"):
        Loop(squares())(5, 0, x)
    Loop(squares())(0, 0, x[:0])
    Loop(squares())(0, 0, None)


def test_call_ends_after_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise at any time, but the threads use the caller's memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_compile, "_PARALLEL", 8)
    loop, ended, interrupts = Loop(squares()), [], [KeyboardInterrupt("first"), KeyboardInterrupt("second")]
    in_caller = threading.get_ident()

    def call(parameters: Any) -> None:
        if threading.get_ident() == in_caller:
            raise interrupts[0]
        time.sleep(0.2)
        ended.append(parameters[0])

    real_wait = cpu_compile.wait

    def interrupted(futures: Any) -> None:
        if len(interrupts) > 1:
            raise interrupts.pop()
        real_wait(futures)

    monkeypatch.setattr(cpu_compile, "wait", interrupted)
    monkeypatch.setattr(loop, "_call", call)
    with pytest.raises(KeyboardInterrupt):
        loop(9, 90, 0)
    assert sorted(ended) == [3, 6]


def test_call_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends: a pool takes nothing more."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu_compile, "_PARALLEL", 8)
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(cpu_compile, "_threads", lambda pid: pool)
    out = torch.zeros(100, dtype=torch.int64)
    Loop(squares())(100, 800, out)
    assert out.tolist() == [i * i for i in range(100)]
