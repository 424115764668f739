"""Every kernel compiled for GPUs that are not here: that it compiles, how wide it accesses memory, that nothing spills."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardweave.kernels import Boxes, Launch, copy_launches, reduce_launches
from shardweave.kernels.copy_boxes import copy_boxes_kernel, copy_constants
from shardweave.kernels.reduce_boxes import reduce_boxes_kernel, reduce_constants

pytestmark = pytest.mark.aot

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
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


def boxes_of(kind: str, contributors: int = 1, fill: bool = False) -> Boxes:
    """A 512 x 512 box in which every vector fits ("wide"), or one column too many ("odd"), and so on."""
    rows, cols = 512, 512
    source, target = {
        "wide": ([1024, 1], [1024, 1]),
        "odd": ([1021, 1], [1021, 1]),
        "transposed": ([1, 1024], [1024, 1]),
        "odd transposed": ([1, 1021], [1021, 1]),
        "strided": ([1024, 2], [1024, 2]),
    }[kind]
    return Boxes(
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
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    pointers = {"descriptors": "*i64", "source_table": "*i64", "target_table": "*i64"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i64") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps})


def accesses(compiled, target: str) -> Counter:
    """Bytes per access to the count of vector or tile accesses, loads and stores apart; descriptors' are left out."""
    if target == "gfx942":
        found = re.findall(r"(?:global|buffer|flat)_(load|store)_(\w+)", compiled.asm["amdgcn"])
        widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}
        return Counter((op, next((w for name, w in widths.items() if kind.startswith(name)), 0)) for op, kind in found)
    found = re.findall(r"(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    return Counter(({"ld": "load", "st": "store"}[op], int(v or 1) * int(b) // 8) for op, v, b in found)


def assert_no_spill(compiled, target: str, tmp_path: Path) -> None:
    if target == "gfx942":
        counts = re.findall(r"\.(?:v|s)gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert counts and set(counts) == {"0"}, counts
        return
    assert "local" not in re.findall(r"\.(local|shared)\b", compiled.asm["ptx"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("no cuobjdump in triton's wheel: spills cannot be checked")
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    text = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    assert usage["STACK"] == "0" and usage["LOCAL"] == "0" and int(usage["REG"]) <= 255, usage


def copy_variant(boxes: Boxes, itemsize: int, aligns=(16, 16)) -> tuple[Launch, dict]:
    (launch,) = copy_launches(boxes, itemsize, *aligns)
    return launch, copy_constants(launch, *aligns, many_sources=True, many_targets=len(boxes) > 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["wide", "odd", "transposed", "odd transposed", "strided"])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_copy_boxes_compiles_without_spills(target, kind, itemsize, tmp_path):
    for fill in (False, True):
        boxes = boxes_of(kind, fill=fill)
        for aligns in ((16, 16), (itemsize, itemsize)):
            for launch in copy_launches(boxes, itemsize, *map(lambda a: min(a, 16), aligns)):
                constants = copy_constants(launch, *aligns, many_sources=True, many_targets=fill)
                assert_no_spill(compile_kernel(copy_boxes_kernel, target, constants), target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["wide", "transposed"])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_copy_boxes_accesses_16_bytes_where_aligned(target, kind, itemsize):
    launch, constants = copy_variant(boxes_of(kind), itemsize)
    compiled = compile_kernel(copy_boxes_kernel, target, constants)
    found = accesses(compiled, target)
    tile, threads = launch.rows * launch.columns * launch.source_word, 32 * launch.num_warps
    for op in ("load", "store"):
        most = tile // 16 // (threads * (2 if target == "gfx942" else 1))
        assert found[op, 16] == max(most, 1), found
    assert {width for op, width in found if op == "store"} == {16}
    assert {width for op, width in found if op == "load"} <= {8, 16}  # 8: the descriptor


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "contributors"), [("sum", 1), ("sum", 8), ("max", 2), ("min", 2), ("prod", 3)])
def test_reduce_boxes_compiles_without_spills(target, dtype, op, contributors, tmp_path):
    outs = {dtype, torch.float32 if dtype is not torch.float32 else torch.bfloat16} if op == "sum" else {dtype}
    if dtype.is_floating_point and contributors == 1:
        outs.add(torch.float8_e4m3fn)
    soft = dtype is torch.float8_e4m3fn and target in ("sm_80", "gfx942")
    for kind in ("wide", "odd") if contributors > 1 else ("strided", "transposed"):
        boxes = boxes_of(kind, contributors, fill=op == "sum")
        for out in sorted(outs, key=str):
            (launch,) = reduce_launches(boxes, dtype, out)
            divide = op == "sum" and dtype.is_floating_point
            constants = reduce_constants(launch, contributors, dtype, op, divide, out, soft=soft)
            assert_no_spill(compile_kernel(reduce_boxes_kernel, target, constants), target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
        (torch.bool, torch.bool),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
    ids=str,
)
def test_reduce_boxes_accesses_16_bytes_where_aligned(target, dtype, out):
    (launch,) = reduce_launches(boxes_of("wide", 2), dtype, out)
    soft = dtype is torch.float8_e4m3fn and target in ("sm_80", "gfx942")
    constants = reduce_constants(launch, 2, dtype, "sum", False, out, soft=soft)
    found = accesses(compile_kernel(reduce_boxes_kernel, target, constants), target)
    assert found["load", 16] >= 2 and found["store", 16] >= 1, found
    assert {width for op, width in found if op == "store"} == {16}, found
    assert {width for op, width in found if op == "load"} <= {8, 16}, found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_max_keeps_nan_and_division_is_rounded_correctly(target):
    (launch,) = reduce_launches(boxes_of("wide", 2), torch.float32, torch.float32)
    ptx = compile_kernel(
        reduce_boxes_kernel, target, reduce_constants(launch, 2, torch.float32, "max", True, torch.float32)
    ).asm["ptx"]
    assert "max.NaN.f32" in ptx and "div.rn.f32" in ptx and ".ftz" not in ptx
