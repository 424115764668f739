"""A prepared launch passes the same arguments to the compiled kernel as Triton's own launch.

Needs no GPU: a recording driver replaces it, and the kernel is compiled for sm_90.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from kernel_box_cases import random_case
from triton.backends.compiler import GPUTarget

from shardweave.errors import ArgumentError
from shardweave.kernels import StridedBoxes, copy_table, reduce_table
from shardweave.kernels.addresses import BaseAddresses
from shardweave.kernels.channel import SLOT, Channel, Failure, pack
from shardweave.kernels.copy_boxes import copy_boxes_kernel
from shardweave.kernels.dtypes import poison_word
from shardweave.kernels.launch import PreparedLaunch
from shardweave.kernels.reduce_boxes import reduce_boxes_kernel
from shardweave.kernels.signal import build_signal, signal, signal_constants, signal_kernel

pytestmark = pytest.mark.aot

STREAM, FUNCTION = 7, 11
KERNELS = (copy_boxes_kernel, reduce_boxes_kernel, signal_kernel)


class Recorder:
    """The parts of a Triton driver that a launch uses."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils, self.loaded = self, 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, *binary: Any) -> tuple[int, ...]:
        self.loaded += 1
        return 5, FUNCTION, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        names = list(source.signature)

        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, enter: Any,
                   leave: Any, *arguments: Any) -> None:  # fmt: skip
            assert len(arguments) == len(names)
            self.launched.append(((x, y, z), stream, function, packed, dict(zip(names, arguments, strict=True))))

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    if not isinstance(copy_boxes_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    recorder = Recorder()
    for kernel in KERNELS:
        kernel.device_caches.clear()
    # Put back by hand: without a GPU there is no driver to reset it to.
    monkeypatch.setattr(triton.runtime.driver, "_active", recorder)
    yield recorder
    for kernel in KERNELS:
        kernel.device_caches.clear()


def cases() -> list[tuple[Any, list[int], Any]]:
    """Return kernels, their scalars, and tables of boxes."""
    import numpy as np

    rng = np.random.default_rng(3)
    copies = random_case(rng, 2, unit=8, kind="straight", fill=1, buffers=3).boxes
    many = random_case(rng, 2, kind="transposed", buffers=7).boxes
    terms = random_case(rng, 2, contributors=3, unit=4, kind="straight", buffers=2).boxes
    return [
        (copy_boxes_kernel, [-(1 << 60)], copy_table(copies, torch.bfloat16)),
        (copy_boxes_kernel, [0], copy_table(many, torch.float32)),
        (reduce_boxes_kernel, [0, 1 << 62], reduce_table(terms, torch.bfloat16, "sum", divisor=3.0)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_prepared_launch_equals_triton_launch(which: int, driver: Recorder) -> None:
    kernel, scalars, table = cases()[which]
    ((launch, constants), *_) = table.specialisations()
    prepared = PreparedLaunch(kernel, launch, torch.device("cpu"), scalars, constants)
    assert driver.loaded == 1 and not driver.launched  # loaded before the first call
    source_table, target_table = (torch.zeros(8, dtype=torch.int64) for _ in range(2))
    for sources, targets in (([1 << 46, 16, 0, 48], [1 << 40]), ([0, 0, 0, 0], [64]), ([3, 5, 7, 9], [1])):
        prepared(source_table, target_table, sources, targets)
        addresses = dict(
            zip(("source0", "source1", "source2", "source3", "target0"), [*sources, *targets], strict=True)
        )
        names = ["fill", "divisor"][: len(scalars)]
        kernel[(len(prepared.descriptors),)](
            prepared.descriptors, source_table, target_table, **addresses, **dict(zip(names, scalars, strict=True)),
            **constants,
        )  # fmt: skip
        ours, theirs = driver.launched[-2:]
        assert ours[:4] == theirs[:4] == ((len(launch.descriptors), 1, 1), STREAM, FUNCTION, ours[3])
        assert list(ours[4]) == list(theirs[4]) == kernel.arg_names
        for name in kernel.arg_names:
            a, b = ours[4][name], theirs[4][name]
            assert a is b if isinstance(a, torch.Tensor) else a == b, name
    # Addresses and fills of every size and alignment: one binary.
    assert driver.loaded == 1 and len(kernel.device_caches[0][0]) == 1


def test_addresses_and_fills_are_64_bit(driver: Recorder) -> None:
    boxes = StridedBoxes([[0]], [0], [[0]], [0], [[4]], [[[1]]], [[1]])
    ((launch, constants),) = copy_table(boxes, torch.int32).specialisations()
    PreparedLaunch(copy_boxes_kernel, launch, torch.device("cpu"), [0], constants)
    (compiled,) = copy_boxes_kernel.device_caches[0][0].values()
    signature = compiled.src.signature
    assert [signature[name] for name in ("source0", "source3", "target0", "fill")] == ["i64"] * 4
    assert compiled.metadata.num_warps == constants["num_warps"]


USES: tuple[tuple[dict[str, Any], torch.dtype | None], ...] = (
    ({"wait": True, "credit": 1}, None),
    ({"send": True, "wait": True}, None),
    ({"send": True}, torch.bfloat16),
    ({"send": True}, torch.complex64),
    ({}, torch.bool),
)


@pytest.mark.parametrize(("use", "dtype"), USES, ids=str)
def test_signal_bypasses_the_binder(
    use: dict[str, Any], dtype: torch.dtype | None, driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pads = torch.zeros(2, 3, SLOT, dtype=torch.int64)
    slots = [pads[1, i].data_ptr() for i in range(3)]
    channel = Channel(pads[0], slots, [pack(1, peer, 5) for peer in (0, 2, 3)], Failure(torch.device("cpu")))
    channel.cpu_path = False  # as on a GPU
    build_signal(channel, **use, poison=dtype)
    assert driver.loaded == 1 and not driver.launched  # loaded before the first call
    run, word = signal_kernel.run, 8 if dtype is None else poison_word(dtype)[1]
    constants = signal_constants(**{"send": False, "wait": False, **use}, poison=dtype is not None, size=word)
    for n, limit, fingerprint in ((0, 1, 0), (5, 1 << 40, 1), (16, 16, (1 << 62) + 3)):
        out = None if dtype is None else torch.zeros(2 * n + 1, dtype=dtype)[1:]  # aligned, and not
        with monkeypatch.context() as patch:
            patch.setattr(signal_kernel, "run", lambda *_, **__: pytest.fail("Triton's binder is entered"))
            signal(channel, **use, fingerprint=fingerprint, limit=limit, poison=out)
        address, words = (0, 0) if out is None else (out.data_ptr(), out.numel() * out.itemsize // word)
        run(
            channel.table, channel.pad, channel.failure.error, grid=(3,), warmup=False,
            host_error=channel.failure.host_error.data_ptr(), fingerprint=fingerprint, limit=limit, out=address,
            words=words, poison=0 if dtype is None else poison_word(dtype)[0], **constants,
        )  # fmt: skip
        ours, theirs = driver.launched[-2:]
        assert ours[:4] == theirs[:4] == ((3, 1, 1), STREAM, FUNCTION, ours[3])
        assert list(ours[4]) == list(theirs[4]) == signal_kernel.arg_names
        for name in signal_kernel.arg_names:
            a, b = ours[4][name], theirs[4][name]
            assert a is b if isinstance(a, torch.Tensor) else a == b, name
    # One binary for all fingerprints, bounds and outputs.
    assert len(driver.launched) == 6 and driver.loaded == 1 and len(signal_kernel.device_caches[0][0]) == 1
    (compiled,) = signal_kernel.device_caches[0][0].values()
    assert [compiled.src.signature[name] for name in ("host_error", "fingerprint", "limit", "out", "words")] == [
        "i64"
    ] * 5


def test_build_signal_prepares_each_use(driver: Recorder) -> None:
    pads = torch.zeros(2, 1, SLOT, dtype=torch.int64)
    channel = Channel(pads[0], [pads[1].data_ptr()], [pack(0, 1, 0)], Failure(torch.device("cpu")))
    channel.cpu_path = False
    for use, dtype in USES * 2:
        build_signal(channel, **use, poison=dtype)
    assert driver.loaded == len(USES)
    signal(channel, send=True, poison=torch.zeros(3, dtype=torch.bfloat16))
    ((grid, *_, arguments),) = driver.launched
    assert grid == (1, 1, 1) and arguments["words"] == 3 and arguments["poison"] == poison_word(torch.bfloat16)[0]


@pytest.mark.parametrize("fixed", [(), (1,), (1, 2), (0, 1, 2, 3), (1, 2, 3), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("arguments", [1, 2, 4])
def test_fixed_buffers_resolve_as_given_ones(fixed: tuple[int, ...], arguments: int) -> None:
    import numpy as np

    memory = torch.zeros(64, dtype=torch.int16)
    buffers = [memory[at:] for at in (0, 16, 32, 36)]  # the last at a multiple of 8 bytes only
    form = np.array([0, 3, 1, 2, 1]), torch.int16, 2, torch.device("cpu"), arguments
    given, fixed_pointers = (BaseAddresses("sources", *form) for _ in range(2))
    fixed_pointers.fix([b if i in fixed else None for i, b in enumerate(buffers)])
    for x in (buffers[0], torch.zeros(4, dtype=torch.int16), memory[1:]):
        now = [b if i in fixed else x if i == 0 else b for i, b in enumerate(buffers)]
        want, got = given.resolve(now), fixed_pointers.resolve(now)
        assert got[0] == want[0] and got[2] == want[2]
        assert got[1].equal(want[1])
    with pytest.raises(ArgumentError, match=r"sources\[1\] has dtype torch.int32; the table is for"):
        given.fix([None, torch.zeros(4, dtype=torch.int32), buffers[2], buffers[3]])
