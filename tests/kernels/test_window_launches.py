"""Launches that wait for peers and signal them: compiled ahead of time, and their arguments; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
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
from shardweave.kernels.direct_boxes import copy_direct_kernel
from shardweave.kernels.reduce_boxes import reduce_constants
from shardweave.kernels.tiling import LaunchConfig
from shardweave.kernels.window_boxes import copy_window_kernel, reduce_window_kernel
from shardweave.kernels.window_use import use_constants, waiting_programs

pytestmark = pytest.mark.aot
CPU = torch.device("cpu")
POINTERS = (
    "descriptors", "source_table", "target_table", "awaited", "pad", "signalled", "error", "finished", "started",
    "ready", "ready_pad", "arrived", "arrived_pad",
)  # fmt: skip
TABLES = {"SOURCE_TABLE": 2, "TARGET_TABLE": 8}
UNUSED = "CREDIT", "WRITES", "PULLS"  # by a direct push


def compiled(kernel: Any, target: str, constants: dict[str, Any]) -> Any:
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    kinds = {name: "*i64" if name in POINTERS else "i64" for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants.keys() & kinds.keys(), "constexpr")
    return aot.compile_kernel(kernel, target, constants, signature, POINTERS[:3])


def packing(target: str, extent: tuple[int, ...], strides: tuple[int, ...], itemsize: int, aligned: int = 16) -> Any:
    """A push of a strided box to one of 7 peers, as a piece."""
    nvidia = target != "gfx942"
    contiguous = tuple(prod(extent[i + 1 :]) for i in range(len(extent)))
    boxes = StridedBoxes([[0]], [1], [[0]], [0], [extent], [[strides]], [contiguous])
    config = LaunchConfig.for_window(32 << 20, 116)
    (launch,) = copy_launches(boxes, itemsize, aligned, config=config, pieces=True)
    assert launch.kind == "packed"
    constants = copy_constants(launch, (aligned, 16), buffers=(1, 8)) | TABLES | {"AXES": launch.axes}
    pushing = use_constants(7, True, False, False, 8, launch.num_warps, timed=nvidia, ptx=nvidia)
    return compiled(copy_window_kernel, target, constants | pushing)


def kernels_of(target: str) -> dict[str, Any]:
    """Pushes to 7 peers, into windows and into outputs, and a reduction of 8 terms that releases."""
    nvidia = target != "gfx942"
    (copy,) = copy_launches(boxes_of("wide"), 2)
    pushing = use_constants(7, True, False, False, 8, copy.num_warps, timed=nvidia, ptx=nvidia)
    (reduce,) = reduce_launches(boxes_of("wide", 8), torch.bfloat16, torch.bfloat16)
    reading = use_constants(7, False, False, True, 2, reduce.num_warps, timed=nvidia, ptx=nvidia)
    form = reduce, 8, torch.bfloat16, "sum", False, torch.bfloat16
    direct = copy_constants(copy, buffers=(1, 8)) | use_constants(
        7, True, False, True, 2, copy.num_warps, nvidia, nvidia
    )
    return {
        "direct push": compiled(copy_direct_kernel, target, {n: v for n, v in direct.items() if n not in UNUSED}),
        "push": compiled(
            copy_window_kernel, target, copy_constants(copy, buffers=(1, 8)) | pushing | TABLES | {"AXES": 0}
        ),
        "reduce": compiled(reduce_window_kernel, target, reduce_constants(*form, buffers=(2, 1)) | reading | TABLES),
    }


def _last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)


def test_memory_order_and_vectors() -> None:
    for use, kernel in kernels_of("sm_90").items():
        ptx = kernel.asm["ptx"]
        names = re.findall(r"^\s*(?:@!?%?\w+\s+)?(bar\.sync|(?:ld|st|atom)\S*\.global\.\S+)", ptx, re.MULTILINE)
        system = [name for name in names if ".sys" in name]
        # One poll for each wait, by which all peers are seen, in the loop; a relaxed look at the fingerprint where they
        # are compared, and at whether this rank has failed before.
        waits, compared = {"direct push": (2, 2), "push": (1, 0), "reduce": (1, 1)}[use]
        assert system.count("ld.acquire.sys.global.b64") == waits, (use, system)
        assert system.count("ld.relaxed.sys.global.b64") == waits + compared, (use, system)
        assert not [name for name in system if name.startswith("atom")], system
        count, release = names.index("atom.global.gpu.acq_rel.add.u64"), _last(names, "st.release.sys.global.b64")
        # All warps' accesses, then the count of finished programs, then the release by the last program, which a direct
        # push follows with a wait for the peers.
        assert "bar.sync" in names[count - 2 : count] and count < release, (use, names)
        after = [name for name in names[release + 1 :] if name != "bar.sync"]
        assert after == [] or (use == "direct push" and "ld.acquire.sys.global.b64" in after), (use, after)
        # The announcement is the first release of all, and before the first wait.
        assert system.count("st.release.sys.global.b64") == waits, (use, system)
        if use == "direct push":
            assert names.index("st.release.sys.global.b64") < names.index("ld.acquire.sys.global.b64"), names
        widths = {width for op, width in aot.accesses(kernel, "sm_90") if op == "load"}
        assert 16 in widths, widths
        registers, spilled = aot.resources(kernel, "sm_90")
        assert registers is None or (spilled == 0 and registers <= 128), (use, registers, spilled)


@pytest.mark.parametrize(
    ("extent", "strides", "itemsize", "aligned"),
    [
        ((4096, 7), (21, 1), 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ((999, 77), (101, 1), 1, 1),
                ((999, 7), (21, 1), 4, 16),
                ((999, 7), (9, 1), 8, 16),
                ((999, 6), (22, 1), 2, 16),
                ((4096, 7), (1, 4096), 2, 16),
                ((9, 8, 7, 6, 5), (50000, 5000, 500, 50, 7), 2, 16),
            )
        ),
    ],
    ids=str,
)
def test_pieces_are_stored_in_16_bytes(
    extent: tuple[int, ...], strides: tuple[int, ...], itemsize: int, aligned: int
) -> None:
    """Whatever the rows are. Narrower stores are the counts of the use and of its signal."""
    kernel = packing("sm_90", extent, strides, itemsize, aligned)
    stores = {width: n for (op, width), n in aot.accesses(kernel, "sm_90").items() if op == "store"}
    assert set(stores) == {8, 16} and stores[8] == 2, stores
    assert re.search(r"st\.global\S*\.v(4\.b32|2\.b64)", kernel.asm["ptx"])
    registers, spilled = aot.resources(kernel, "sm_90")
    assert registers is None or (spilled == 0 and registers <= 128), (registers, spilled)


@pytest.mark.long
def test_kernels_for_amd() -> None:
    for kernel in (*kernels_of("gfx942").values(), packing("gfx942", (4096, 7), (21, 1), 2, 2)):
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
