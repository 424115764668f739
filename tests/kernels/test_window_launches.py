"""Launches that wait for peers and signal them: compiled ahead of time, and their arguments; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from test_aot import assert_no_spill, boxes_of
from test_launch import Recorder

from shardweave.bench.codegen import aot
from shardweave.kernels import (
    StridedBoxes,
    Turn,
    WindowUse,
    copy_launches,
    reduce_launches,
    run_in_window,
    window_table,
)
from shardweave.kernels.channel import SLOT, Channel, Failure, pack
from shardweave.kernels.copy_boxes import copy_constants
from shardweave.kernels.reduce_boxes import reduce_constants
from shardweave.kernels.window_boxes import copy_window_kernel, reduce_window_kernel
from shardweave.kernels.window_use import use_constants, waiting_programs

pytestmark = pytest.mark.aot
CPU = torch.device("cpu")
POINTERS = (
    "descriptors", "source_table", "target_table", "awaited", "pad", "signalled", "error", "finished",
)  # fmt: skip
TABLES = {"SOURCE_TABLE": 2, "TARGET_TABLE": 8}


def compiled(kernel: Any, target: str, constants: dict[str, Any]) -> Any:
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    kinds = {name: "*i64" if name in POINTERS else "i64" for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants.keys() & kinds.keys(), "constexpr")
    return aot.compile_kernel(kernel, target, constants, signature, POINTERS[:3])


def kernels_of(target: str) -> dict[str, Any]:
    """A push to 7 peers, and a reduction of 8 terms that releases."""
    nvidia = target != "gfx942"
    (copy,) = copy_launches(boxes_of("wide"), 2)
    pushing = use_constants(7, True, False, False, 8, copy.num_warps, timed=nvidia, ptx=nvidia)
    (reduce,) = reduce_launches(boxes_of("wide", 8), torch.bfloat16, torch.bfloat16)
    reading = use_constants(7, False, False, True, 2, reduce.num_warps, timed=nvidia, ptx=nvidia)
    form = reduce, 8, torch.bfloat16, "sum", False, torch.bfloat16
    return {
        "push": compiled(copy_window_kernel, target, copy_constants(copy, buffers=(1, 8)) | pushing | TABLES),
        "reduce": compiled(reduce_window_kernel, target, reduce_constants(*form, buffers=(2, 1)) | reading | TABLES),
    }


def test_memory_order_and_vectors() -> None:
    for use, kernel in kernels_of("sm_90").items():
        ptx = kernel.asm["ptx"]
        names = re.findall(r"^\s*(?:@!?%?\w+\s+)?(bar\.sync|(?:ld|st|atom)\S*\.global\.\S+)", ptx, re.MULTILINE)
        system = [name for name in names if ".sys" in name]
        # One poll, by which all peers are seen, in the loop; a relaxed look at the fingerprint where they are compared.
        assert system.count("ld.acquire.sys.global.b64") == 1, (use, system)
        assert system.count("ld.relaxed.sys.global.b64") == 1 + (use == "reduce"), (use, system)
        assert not [name for name in system if name.startswith("atom")], system
        at = {name: names.index(name) for name in ("atom.global.gpu.acq_rel.add.u64", "st.release.sys.global.b64")}
        count, release = at.values()
        # All warps' accesses, then the count of finished programs, then the release by the last program.
        assert "bar.sync" in names[count - 2 : count] and count < release == len(names) - 1, (use, names)
        widths = {width for op, width in aot.accesses(kernel, "sm_90") if op == "load"}
        assert 16 in widths, widths
        registers, spilled = aot.resources(kernel, "sm_90")
        assert registers is None or (spilled == 0 and registers <= 128), (use, registers, spilled)


@pytest.mark.long
def test_kernels_for_amd() -> None:
    for kernel in kernels_of("gfx942").values():
        assert_no_spill(kernel, "gfx942")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    if not isinstance(copy_window_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    recorder = Recorder()
    monkeypatch.setattr(triton.runtime.driver, "_active", recorder)
    for name in ("copy_boxes", "reduce_boxes", "window_boxes"):
        monkeypatch.setattr(f"shardweave.kernels.{name}.runs_on", lambda device: True, raising=False)
    copy_window_kernel.device_caches.clear()
    yield recorder
    copy_window_kernel.device_caches.clear()


def channel(number: int) -> Channel:
    pads = torch.zeros(2, 3, SLOT, dtype=torch.int64)
    slots = [pads[1, i].data_ptr() for i in range(3)]
    return Channel(pads[0], slots, [pack(1, peer, number) for peer in (0, 2, 3)], Failure(CPU))


def test_arguments_and_programs(driver: Recorder) -> None:
    """One launch for each call, with as many programs as tiles up to a bound; only the last of a use signals."""
    use = WindowUse(channel(1), channel(0), False, 4096, torch.bfloat16)
    use.programs = 5
    boxes = StridedBoxes([[1]], [0], [[0]], [0], [[1 << 16, 4]], [[[1, 1 << 16]]], [[1, 1 << 16]])
    table = window_table(boxes, torch.bfloat16, CPU, use)
    window, x, out = (torch.zeros(4 << 16, dtype=torch.bfloat16) for _ in range(3))
    table.sources.fix([None, window], use.stride)
    for send in (True, False):
        run_in_window(table, [x, window], [out], Turn(7, 9, send, out))
        (grid, *_, given) = driver.launched[-1]
        assert grid == (5, 1, 1) and given["tiles"] > 5
        assert (given["fingerprint"], given["limit"], given["send"]) == (7, 9, int(send))
        assert (given["out"], given["words"], given["stride"]) == (out.data_ptr(), out.numel(), 4096)
        assert (given["source1"], given["target0"]) == (window.data_ptr(), out.data_ptr())
        assert given["awaited"] is use.awaited.table and given["signalled"] is use.signalled.table
    assert len(driver.launched) == 2 and driver.loaded == 1


def test_no_boxes_still_wait_and_signal(driver: Recorder) -> None:
    use = WindowUse(channel(1), channel(0), True, 4096)
    table = window_table(StridedBoxes.of_rows([], [], 0), torch.float32, CPU, use)
    run_in_window(table, [], [], Turn(7, 9))
    ((grid, *_, given),) = driver.launched
    assert grid == (1, 1, 1) and given["send"] == 1 and not table.variants[16, 16][0].descriptors.any()


@pytest.mark.parametrize(("processors", "programs"), [(132, 116), (8, 7), (4, 3), (2, 1), (1, 1)])
def test_waiting_programs_leave_processors(processors: int, programs: int) -> None:
    assert waiting_programs(processors) == programs
