"""Kernels run as compiled for sm_90: some of the interpreted tests, on the interpreter of PTX in place of Triton's.

`SHARDWEAVE_TEST_PTX=1 pytest tests/kernels -m interp` runs others. Needs a C compiler, no GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from ptx.machine import Fault, Launch, run
from ptx.memory import GlobalMemory, MemoryFault
from stub_libcuda import compiler
from warm_python import run_python

pytestmark = pytest.mark.aot
SELECTED = (
    "test_copy_boxes.py::test_copy_boxes_equals_enumeration[cpu-transposed-torch.bfloat16]",
    "test_copy_boxes.py::test_copy_boxes_equals_enumeration[cpu-strided-torch.bool]",
    "test_copy_boxes.py::test_copy_boxes_reads_addresses_from_table[cpu-5]",
    "test_reduce_boxes.py::test_reduce_boxes_equals_cpu_path[cpu-torch.bfloat16-sum-None]",
    "test_reduce_boxes.py::test_reduce_boxes_equals_cpu_path[cpu-torch.float16-max-None]",
    "test_reduce_boxes.py::test_reduce_boxes_casts_as_torch[cpu-torch.int64-torch.float32]",
)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_interpreted_tests_pass_as_compiled() -> None:
    root = Path(__file__).parents[2]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = run_python(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/kernels/{t}" for t in SELECTED)],
        cwd=root, timeout=600, env={**kept, "SHARDWEAVE_TEST_PTX": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and f"{len(SELECTED)} passed" in done.stdout, done.stdout + done.stderr


SUM = """
.visible .entry sum(.param .u64 sum_param_0)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.b64 %rd1, [sum_param_0];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    st.shared.b32 [%r2], %r1;
    bar.sync 0;
    xor.b32 %r3, %r2, 128;
    ld.shared.b32 %r4, [%r3];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r4;
    ret;
$L__func_end0:
}
"""
"""Each thread of two warps stores what its partner in the other warp has put into shared memory."""


def summed(text: str, words: int = 64, skew: int = 0) -> np.ndarray:
    out = np.full(words + 4, 7, np.uint32)
    at = out.ctypes.data + skew
    run([Launch(text, (1, 1, 1), 2, 256, [at.to_bytes(8, "little")], GlobalMemory([(out.ctypes.data, 4 * words)]))], 3,
        most_turns=1000)  # fmt: skip
    return out


def test_threads_exchange_through_shared_memory() -> None:
    out = summed(SUM)
    assert out[:64].tolist() == [i ^ 32 for i in range(64)] and (out[64:] == 7).all()


@pytest.mark.parametrize(
    "text, given, message",
    [
        (SUM.replace("bar.sync 0;", ""), {}, "without a barrier between"),
        (SUM, {"words": 63}, "is in no tensor of the launch"),
        (SUM, {"skew": 2}, "is no multiple of 4"),
        (SUM.replace("mov.u32 %r1, %tid.x", "mov.u32 %r1, %r8"), {}, "not defined in every lane"),
        (SUM.replace("xor.b32", "xor.relu.b32"), {}, "a form that is not known: xor.relu.b32"),
        (SUM.replace("bar.sync 0;", "$L__again: bra $L__again;"), {}, "not at its end"),
    ],
    ids=["a missing barrier", "out of bounds", "misaligned", "undefined", "an unknown instruction", "an endless loop"],
)
def test_what_a_gpu_would_not_survive_is_an_error(text: str, given: dict[str, int], message: str) -> None:
    with pytest.raises((Fault, MemoryFault), match=message):
        summed(text, **given)
