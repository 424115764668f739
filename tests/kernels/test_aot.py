"""Kernels compiled ahead of time: width of memory accesses, memory order, and no register spills."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton

from shardweave.bench.codegen import aot
from shardweave.bench.codegen.aot import TARGETS, accesses
from shardweave.bench.codegen.launches import of_ranks, programs, specialisations
from shardweave.kernels import StridedBoxes, copy_launches, reduce_launches
from shardweave.kernels.compare_words import compare_words_kernel
from shardweave.kernels.copy_boxes import copy_boxes_kernel, copy_constants
from shardweave.kernels.reduce_boxes import reduce_boxes_kernel, reduce_constants
from shardweave.kernels.signal import signal_constants, signal_kernel

pytestmark = pytest.mark.aot
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int64,
    torch.bool,
]


def each_target_in_turn(names: str, *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over `target` and all values. Neighbouring cases are compiled for GPUs of different vendors:
    each value meets both vendors, and each value of the other parameters. Each case is compiled for one other GPU in
    `make test-long`."""

    def turns(targets: tuple[str, ...], marks: Any) -> list[Any]:
        cases = product(*(range(len(of)) for of in values))
        return [
            pytest.param(targets[sum(at) % 2], *(of[i] for of, i in zip(values, at, strict=True)), marks=marks)
            for at in cases
        ]

    cases = turns(("sm_90", "gfx942"), ()) + turns(("sm_80", "sm_100"), pytest.mark.long)
    return pytest.mark.parametrize(["target", *names.split(", ")], cases, ids=str)


def boxes_of(kind: str, contributors: int = 1, fill: bool = False) -> StridedBoxes:
    """A 512 x 512 box in which every vector fits ("wide"), or one column too many ("odd"), and so on."""
    rows, cols = 512, 512
    source, target = {
        "wide": ([1024, 1], [1024, 1]),
        "odd": ([1021, 1], [1021, 1]),
        "transposed": ([1, 1024], [1024, 1]),
        "odd transposed": ([1, 1021], [1021, 1]),
        "strided": ([1024, 2], [1024, 2]),
    }[kind]
    return StridedBoxes(
        np.full((1 + fill, contributors), [[-1]] * fill + [[1]]),
        np.arange(1 + fill),
        np.zeros((1 + fill, contributors), np.int64),
        np.zeros(1 + fill, np.int64),
        np.array([[rows, cols]] * (1 + fill)),
        np.array([[source] * contributors] * (1 + fill)),
        np.array([target] * (1 + fill)),
    )


def compile_kernel(kernel, target: str, constants: dict):
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    pointers = ("descriptors", "source_table", "target_table", "table", "pad", "error")
    kinds = {name: "*i64" if name in pointers else "i64" for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants.keys() & kinds.keys(), "constexpr")
    return aot.compile_kernel(kernel, target, constants, signature, pointers[:3])


def assert_no_spill(compiled, target: str) -> None:
    if not target.startswith("gfx"):
        assert "local" not in re.findall(r"\.(local|shared)\b", compiled.asm["ptx"])
    registers, spilled = aot.resources(compiled, target)
    if registers is None:
        pytest.skip("no cuobjdump in triton's wheel: spills cannot be checked")
    assert spilled == 0 and registers <= 255


def soft(target: str, *dtypes: torch.dtype) -> bool:
    return torch.float8_e4m3fn in dtypes and target in aot.WITHOUT_FLOAT8


@each_target_in_turn("kind, itemsize", ("wide", "odd", "transposed", "odd transposed", "strided"), (1, 2, 4, 8))
def test_copy_boxes_is_vectorised_and_does_not_spill(target, kind, itemsize):
    boxes = boxes_of(kind)
    (launch,) = copy_launches(boxes, itemsize)
    constants = copy_constants(launch, buffers=(2, 1))
    compiled = compile_kernel(copy_boxes_kernel, target, constants)
    assert_no_spill(compiled, target)
    if kind in ("wide", "transposed"):
        results = accesses(compiled, target)
        assert {width for op, width in results if op == "store"} == {16}, results
        assert {width for op, width in results if op == "load"} <= {8, 16}, results  # 8: the descriptor
        per_thread = launch.rows * launch.columns * launch.source_word // (TARGETS[target].warp_size * launch.num_warps)
        assert results["load", 16] == results["store", 16] == per_thread // 16, results


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_copy_boxes_for_unaligned_buffers_and_fills(target):
    for aligns in ((16, 16), (2, 2), (16, 4)):
        for launch in copy_launches(boxes_of("wide", fill=True), 2, *aligns):
            constants = copy_constants(launch, aligns)
            assert_no_spill(compile_kernel(copy_boxes_kernel, target, constants), target)


REDUCED = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
REDUCTIONS = (
    [("sm_90", dtype, op, 2, "wide") for dtype in DTYPES for op in ("sum", "max")]
    + [("sm_90", dtype, "sum", 8, "odd") for dtype in DTYPES[1::3]]
    + [("sm_90", torch.bfloat16, "sum", 2, kind) for kind in ("transposed", "odd transposed", "strided")]
    + [("sm_90", torch.bfloat16, "sum", contributors, "wide") for contributors in (1, 4, 8, 16, 17, 64)]
    + [("sm_90", torch.bfloat16, op, 3, "wide") for op in ("min", "prod")]
    + [("gfx942", dtype, "sum", 2, "wide") for dtype in REDUCED]
    + [
        pytest.param(target, dtype, "sum", 2, "wide", marks=pytest.mark.long)
        for target, dtype in zip(("sm_80", "sm_100") * 2, REDUCED, strict=True)
    ]
)


@pytest.mark.parametrize(("target", "dtype", "op", "contributors", "kind"), REDUCTIONS, ids=str)
def test_reduce_boxes_is_vectorised_and_does_not_spill(target, dtype, op, contributors, kind):
    (launch,) = reduce_launches(boxes_of(kind, contributors), dtype, dtype)
    divide = op == "sum" and dtype.is_floating_point
    constants = reduce_constants(
        launch, contributors, dtype, op, divide, dtype, buffers=(5, 1), soft=soft(target, dtype)
    )
    compiled = compile_kernel(reduce_boxes_kernel, target, constants)
    assert_no_spill(compiled, target)
    if kind == "wide":
        results = accesses(compiled, target)
        assert {width for op, width in results if op == "store"} == {16}, results
        assert {width for op, width in results if op == "load"} <= {8, 16}, results
        assert results["load", 16] >= min(contributors, 2), results


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.int64, torch.float16),
]


@each_target_in_turn("cast", CASTS)
def test_reduce_boxes_casts_in_whole_vectors(target, cast):
    dtype, out = cast
    (launch,) = reduce_launches(boxes_of("wide", fill=True), dtype, out)
    constants = reduce_constants(launch, 1, dtype, "sum", False, out, soft=soft(target, dtype))
    compiled = compile_kernel(reduce_boxes_kernel, target, constants)
    assert_no_spill(compiled, target)
    results = accesses(compiled, target)
    assert min(width for op, width in results if op == "load") >= 8, results
    assert min(width for op, width in results if op == "store") >= 8, results


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_max_keeps_nan_and_division_is_rounded_correctly(target):
    (launch,) = reduce_launches(boxes_of("wide", 2), torch.float32, torch.float32)
    ptx = compile_kernel(
        reduce_boxes_kernel, target, reduce_constants(launch, 2, torch.float32, "max", True, torch.float32)
    ).asm["ptx"]
    assert "max.NaN.f32" in ptx and "div.rn.f32" in ptx and ".ftz" not in ptx


SIGNALS = {
    "barrier": {"send": True, "wait": True},
    "credit": {"send": False, "wait": True, "credit": 1},
    **{f"release {size}": {"send": True, "wait": False, "poison": True, "size": size} for size in (1, 2, 4, 8)},
}


@each_target_in_turn("use", list(SIGNALS))
def test_signal_releases_after_a_barrier_and_polls_by_loads(target, use, tmp_path):
    constants = signal_constants(**SIGNALS[use], timed=target != "gfx942", ptx=target != "gfx942")
    compiled = compile_kernel(signal_kernel, target, constants)
    if target == "gfx942":
        assert_no_spill(compiled, target)
        text = compiled.asm["amdgcn"]
        writebacks = len(re.findall(r"buffer_wbl2\s+sc0 sc1", text))  # what a release at system scope begins with
        assert writebacks == int(constants["SEND"]), text
        return
    ptx = compiled.asm["ptx"]
    names = r"(bar\.sync|barrier\.sync|fence\.\S+|membar\.\S+|(?:ld|st|atom)\S*\.global\.\S+)"
    results = re.findall(r"^\s*(?:@!?%?\w+\s+)?" + names, ptx, re.MULTILINE)
    release = [i for i, name in enumerate(results) if "release" in name]
    if constants["SEND"]:
        (at,) = release
        assert results[at] == "st.release.sys.global.b64" and "bar.sync" in results[:at], results
    else:
        assert not release, results
    polls = [name for name in results if "acquire" in name]
    # One look at the pad first, and one in the loop.
    assert polls == ["ld.global.sys.acquire.b64"] * (1 + int(constants["WAIT"])), results
    # The timer is read before the loop and in it.
    assert ptx.count("%globaltimer") == 2 * int(constants["WAIT"]), ptx
    # Memory of peers and of the host is not changed by atomic operations, which PCIe may lack.
    assert not [name for name in results if name.startswith("atom") and ".sys" in name], results
    assert results.count("st.relaxed.sys.global.b64") == 2 + int(constants["SEND"]), results
    # A membar for the release and none besides: neither written out nor made of something else.
    assert not [name for name in results if name.startswith(("fence", "membar"))], results
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    assert_no_signal_spill(compiled, tool, tmp_path, int(constants["SEND"]))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compare_words_stores_its_code(target):
    constants = {"PTX": target != "gfx942", "num_warps": 1}
    kinds = dict.fromkeys(compare_words_kernel.arg_names, "i64") | dict.fromkeys(("received", "codes", "error"), "*i64")
    compiled = aot.compile_kernel(compare_words_kernel, target, constants, kinds | {"PTX": "constexpr"}, ())
    assert_no_spill(compiled, target)
    if target != "gfx942":
        system = re.findall(r"\S*\.sys\.\S+", compiled.asm["ptx"])
        assert system == ["st.relaxed.sys.global.b64"], system


def assert_no_signal_spill(compiled, tool: Path, tmp_path: Path, membars: int) -> None:
    """Like assert_no_spill, but scalars that all threads need go through shared memory here; MEMBARs are counted."""
    if not tool.exists():
        pytest.skip("no cuobjdump in triton's wheel: spills and MEMBARs cannot be checked")
    (tmp_path / "signal.cubin").write_bytes(compiled.asm["cubin"])
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}  # it calls nvdisasm
    text = subprocess.run(
        [tool, "-res-usage", "-sass", tmp_path / "signal.cubin"], capture_output=True, text=True, env=environment
    ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    assert usage["STACK"] == "0" and usage["LOCAL"] == "0" and int(usage["REG"]) <= 64, usage
    assert text.count("MEMBAR") == membars, text


SAMPLE = (
    (((4, 2), (8191, 8193), "bfloat16", "S0 S1", "S1 S0"), {}),
    (((4, 2), (4096, 4096), "bfloat16", "S0 S1", "S1 S0"), {"transposed": True}),
    (((4, 2), (4096, 4096), "float8_e4m3fn", "P S0", "S0 S0"), {}),
    (((2, 2), (9, 13), "float32", "Pmax R", "S1 R"), {"odd": True}),
)


def assert_sound(results: list) -> None:
    wrong = [
        (target, str(s), compiled if isinstance(compiled, str) else aot.faults(s, target, compiled))
        for s, by in results
        for target, compiled in by.items()
        if isinstance(compiled, str) or aot.faults(s, target, compiled)
    ]
    assert not wrong


def test_common_specialisations_of_programs_are_vectorised():
    if not isinstance(copy_boxes_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    used = [s for request, options in SAMPLE for s in specialisations(of_ranks(*request, **options))]
    kernels = ["copy_boxes", "copy_direct", "copy_window", "reduce_boxes", "reduce_window"]
    assert {s.kernel for s in used} == set(kernels) and len(used) > 10
    assert any(s.constants["TRANSPOSED"] for s in used) and any(s.constants["ALIGN_S"] == 4 for s in used)
    # An input pushed into several windows, an output out of the input and several of them: worlds that have windows.
    assert {(1, 2), (2, 1), (3, 1), (5, 1)} <= {(s.constants["SOURCES"], s.constants["TARGETS"]) for s in used}
    sample = [*used[::8], *(s for s in used if s.constants["TRANSPOSED"] or s.kernel == "reduce_boxes")]
    results = [(s, {target: aot.compiled_for(target, s) for target in ("sm_90", "gfx942")}) for s in sample]
    assert_sound(results)
    text = aot.report(results)
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == kernels and all(row[4] == "0" for row in rows)
    assert sum(int(row[1]) for row in rows) == len(sample)


BYTES = (
    (((4, 2), (4096, 4096), "uint8", "Pmax R", "S1 R"), {}),
    (((4, 2), (4096, 4096), "bool", "P S0", "S0 S0"), {}),
)
"""Reductions of bytes, of which ptxas would spill some without `registers_of_sm`."""


@pytest.mark.parametrize("target", ["sm_90"])
def test_reductions_in_windows_take_the_registers_that_they_need(target):
    if not isinstance(copy_boxes_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    used = [s for request, options in BYTES for s in specialisations(of_ranks(*request, **options))]
    reductions = [s for s in used if s.kernel == "reduce_window"]
    assert reductions and all(s.constants["maxnreg"] == 255 for s in reductions)
    assert_sound([(s, {target: aot.compiled_for(target, s)}) for s in reductions[:3]])


def test_narrow_accesses_and_spills_are_reported():
    (s, *_) = specialisations(of_ranks(*SAMPLE[1][0]))
    assert s.vectors == (16, 16)
    whole = aot.Compiled(40, 0, 0, {8: 8, 16: 4}, {16: 4})
    assert aot.faults(s, "sm_90", whole) == []
    assert aot.faults(s, "sm_90", replace(whole, spills=8)) == ["8 spilled"]
    assert aot.faults(s, "sm_90", aot.Compiled(40, 48, 0, {8: 8, 16: 4}, {8: 8})) == [
        "48 spilled",
        "stores of [8] bytes where 16 are possible",
    ]
    assert "loads of [8] bytes" in str(aot.faults(s, "sm_90", aot.Compiled(40, 0, 0, {8: 16}, {16: 4})))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_some_specialisations_of_programs_are_vectorised(target: str):
    """`python -m shardweave.bench.codegen.aot` compiles all of them."""
    if not isinstance(copy_boxes_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    runs = Random(target).sample([run for _, run in programs()], 200)
    used = specialisations((str(number), run) for number, run in enumerate(runs))
    assert_sound([(s, {target: aot.compiled_for(target, s)}) for s in used[:: max(1, len(used) // (8 * PARTS))]])
