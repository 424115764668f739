"""The token kernels compiled ahead of time: rows move 16 bytes at a time, no register spills, and sums are rounded as
their definition says."""

from __future__ import annotations

import os
import re
from random import Random

import pytest
import torch
import triton
from test_aot import TARGETS
from triton.runtime.jit import JITFunction

from shardweave.bench.codegen import aot
from shardweave.bench.codegen.launches import KERNELS, Layer, Specialisation, dispatches, specialisations
from shardweave.kernels.tokens.count_pairs import MOST_PHYSICAL_EXPERTS
from shardweave.kernels.tokens.push_rows import push_rows_kernel

pytestmark = pytest.mark.aot
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))

# Small layers that cover both routing kernels, tables, weights, sums, padding and unaligned addresses.
LAYERS = (
    Layer("large", 7168, 8, 256, 2, 300, options={"align": 8, "zero_rows": True}),
    Layer("decode", 4096, 2, 8, 2, 4, torch.float32, torch.int32),
    Layer(
        "odd", 30, 3, 5, 2, 7, torch.float16, odd=True, experts_twice=True, options={"save": "copy", "zero_rows": True}
    ),
    Layer("batched", 64, 1, 5, 2, 7, options={"expert_capacity": 3, "layout": "batched"}),
    Layer("most experts", 64, 2, MOST_PHYSICAL_EXPERTS, 2, 40),
    Layer("chunks", 64, 1, 5, 2, 7, options={"chunk_capacity": 1.25}),
    Layer("fp8", 7168, 8, 256, 2, 300, options={"quantize": "fp8_128", "quantize_output": "fp8_128"}),
    Layer("blocks", 7168, 8, 256, 2, 300, options={"quantize": "mxfp8", "scale_layout": "blocked", "align": 32}),
)


@pytest.fixture(scope="module")
def launched() -> list[Specialisation]:
    if not isinstance(push_rows_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    return specialisations(dispatches(LAYERS))


def test_all_token_kernels_are_launched(launched: list[Specialisation]) -> None:
    on_boxes = {"copy_boxes", "reduce_boxes", "copy_direct", "copy_window", "reduce_window"}
    assert {s.kernel for s in launched} | on_boxes == set(KERNELS)
    # Recording has ended, and addresses are those of memory again.
    assert JITFunction.run.__module__ == "triton.runtime.jit" and torch.empty(2).data_ptr() % 64 == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launched_token_kernels_are_vectorised(launched: list[Specialisation], target: str) -> None:
    """Each kernel at each alignment, with few experts and the most, with quantized rows and others."""
    once = {
        (s.kernel, s.constants.get("ALIGN"), s.constants.get("EXPERTS"), bool(s.constants.get("GROUP"))): s
        for s in reversed(launched)
    }
    assert {s.kernel for s in once.values()} == {s.kernel for s in launched}
    for s in once.values():
        results = aot.compiled_for(target, s)
        assert aot.faults(s, target, results) == [], (str(s), results)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_some_launched_token_kernels_are_vectorised(launched: list[Specialisation], target: str) -> None:
    """`python -m shardweave.bench.codegen.aot` compiles all of them."""
    for s in Random(target).sample(launched, min(8 * PARTS, len(launched))):
        results = aot.compiled_for(target, s)
        assert aot.faults(s, target, results) == [], (str(s), results)


def fused_operations(compiled) -> list[str]:
    """The instructions that multiply and add with one rounding.

    On AMD GPUs `v_fma_mix` also converts 16-bit floats for a product (plus -0) or for a sum (of a term times 1), which
    round as the operation alone does.
    """
    if "ptx" in compiled.asm:
        return re.findall(r"\bfma\..*", compiled.asm["ptx"])
    fused = re.findall(r"v_(?:pk_)?(?:fma|mac|mad)(?:c|k)?_(?:mix|f32).*", compiled.asm["amdgcn"])
    return [line for line in fused if not re.search(r"_mix.* 1\.0,|_mix.*, (?:neg\()?0\b", line)]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_products_are_rounded_before_they_are_added(launched: list[Specialisation], target: str) -> None:
    """So that sums are those of the definition, on every GPU."""
    for kernel in ("combine_rows", "push_sums", "weigh_rows"):
        s = next(s for s in launched if s.kernel == kernel and not s.constants.get("GROUP"))
        constants = aot.constants_on(target, s)
        assert not fused_operations(aot.compile_kernel(KERNELS[kernel], target, constants, s.signature, s.aligned))


def test_narrow_row_accesses_are_reported(launched: list[Specialisation]) -> None:
    push = next(
        s
        for s in launched
        if s.kernel == "push_rows" and s.constants["K"] == 8 and s.constants["HAS_WEIGHTS"] and not s.quantizes
    )
    assert push.vectors == (16, 16) and push.row_accesses == (1, 9)
    # 4 KiB a program of 128 threads: two accesses of 16 bytes for each piece.
    whole = aot.Compiled(40, 0, 0, {4: 20, 8: 9, 16: 2}, {4: 9, 16: 18})
    assert aot.faults(push, "sm_90", whole) == []
    wrong = aot.Compiled(40, 0, 0, {4: 28}, {4: 13, 16: 17})
    assert aot.faults(push, "sm_90", wrong) == [
        "loads of [4] bytes where 16 are possible",
        "stores of [4, 16] bytes where 16 are possible",
    ]
    assert aot.faults(push, "sm_90", aot.Compiled(40, 48, 0, {16: 2}, {16: 18})) == ["48 spilled"]
    narrow = next(s for s in launched if s.kernel == "push_rows" and s.constants["ALIGN"] == 2)
    # 64 bytes, one element for each of 32 threads.
    assert aot.faults(narrow, "sm_90", aot.Compiled(40, 0, 0, {2: 1}, {2: 4})) == []
    signal = next(s for s in launched if s.kernel == "signal")
    assert aot.faults(signal, "sm_90", aot.Compiled(40, 0, 8, {8: 3}, {})) == []
