"""Triton's own launcher passes on what prepared launches give it: arguments and grids as the compiled kernels demand.

Needs no GPU, but a C compiler: a stub of libcuda.so.1 records what `cuLaunchKernelEx` is given.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile
import traceback
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import triton
import triton.language as tl
from dispatcher_settings import with_options
from stub_libcuda import STREAM, Launched, StubDriver, compiler, kernels_on_the_cpu
from warm_python import run_python

from shardweave.kernels import StridedBoxes, copy_table, launch, reduce_table
from shardweave.kernels.channel import SLOT, Channel, Failure, pack
from shardweave.kernels.compare_words import WordComparison, compare_words_kernel
from shardweave.kernels.copy_boxes import copy_boxes, copy_boxes_kernel
from shardweave.kernels.dtypes import poison_word
from shardweave.kernels.reduce_boxes import reduce_boxes, reduce_boxes_kernel
from shardweave.kernels.signal import signal, signal_constants, signal_kernel
from shardweave.kernels.store_word import PTX
from shardweave.runtime.moe.options import DispatchOptions

pytestmark = pytest.mark.aot
CPU = torch.device("cpu")


def check(launched: Launched, kernel: Any, constants: dict[str, Any], programs: int, given: dict[str, int]) -> None:
    """Compare a launch with the parameters of the kernel that are no constants, and with what its binary takes."""
    names = [name for name in kernel.arg_names if name not in constants]
    assert launched.kernel == kernel.__name__ and list(given) == names
    block = (32 * constants["num_warps"], 1, 1)
    assert (launched.grid, launched.block, launched.stream) == ((programs, 1, 1), block, STREAM), launched
    *arguments, scratch, profile_scratch = launched.arguments
    assert not any(scratch) and not any(profile_scratch)
    assert [len(argument) for argument in arguments] == [8] * len(names), (names, arguments)
    got = {name: int.from_bytes(value, "little") for name, value in zip(names, arguments, strict=True)}
    wrong = {name: (got[name], value) for name, value in given.items() if got[name] != value % (1 << 64)}
    assert not wrong, wrong
    shared = set()
    for compiled in kernel.device_caches[0][0].values():
        # The compiler relies on them: a GPU faults on an address that is not what it was compiled for.
        for (at, *_), attributes in compiled.src.attrs.items():
            name = kernel.arg_names[at]
            for attribute, divisor in attributes:
                assert attribute == "tt.divisibility" and given[name] % divisor == 0, (name, given[name], divisor)
        shared.add(compiled.metadata.shared)
    assert launched.shared_bytes in shared


def boxes_of(buffers: int, targets: int, terms: int = 1, fill: float | None = None) -> StridedBoxes:
    """Boxes [5, 24], each from other buffers; the last is filled where there is a fill."""
    source = [[(i + j) % buffers for j in range(terms)] for i in range(max(buffers, targets))]
    if fill is not None:
        source.append([-1] * terms)
    number = len(source)
    return StridedBoxes(
        source, [i % targets for i in range(number)], [[0] * terms] * number, [200 * i for i in range(number)],
        [[24, 5]] * number, [[[1, 24]] * terms] * number, [[1, 32]] * number, fill=fill or 0,
    )  # fmt: skip


def launches_of_boxes(stub: StubDriver) -> int:
    """Copies and reductions with few and many buffers, aligned and not, with and without a fill or divisor."""
    number = 0
    forms: list[tuple[Any, Callable[..., None], Any, list[int]]] = [
        (copy_boxes_kernel, copy_boxes, copy_table(boxes_of(3, 1), torch.bfloat16), []),
        (copy_boxes_kernel, copy_boxes, copy_table(boxes_of(7, 3, fill=-2.0), torch.float32), []),
        (reduce_boxes_kernel, reduce_boxes, reduce_table(boxes_of(2, 1, 2), torch.bfloat16, "sum"), [0x3FF0 << 48]),
        (
            reduce_boxes_kernel, reduce_boxes, reduce_table(boxes_of(6, 2, 3), torch.float32, "sum", divisor=3.0),
            [0x4008 << 48],
        ),
    ]  # fmt: skip
    for kernel, function, table, scalars in forms:
        fewest = [table.sources.count, table.targets.count]
        for skew in (0, 1):
            kernel.device_caches.clear()
            table.variants.clear()
            sources, targets = ([memory(table.dtype, 2000, skew) for _ in range(count)] for count in fewest)
            before = len(stub.launches)
            function(table, sources, targets)
            (variant,) = table.variants.values()
            specialised = table.specialisations(*next(iter(table.variants)))
            # Loaded before the first call, which launches once for each part.
            assert stub.images and len(stub.launches) - before == len(variant) == len(specialised)
            parts = zip(stub.launches[before:], variant, specialised, strict=True)
            for launched, prepared, (launch_, constants) in parts:
                addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in (sources, targets)]
                first = [*addresses[0], 0, 0, 0, 0][:4], addresses[1][:1]
                tables = [int.from_bytes(launched.arguments[i], "little") for i in (1, 2)]
                for at, buffers, few in zip(tables, addresses, (4, 1), strict=True):
                    if len(buffers) > few:
                        assert words_at(at, len(buffers))[few:] == buffers[few:]
                pattern = struct.pack("f", table.boxes.fill) * 2 if launch_.has_fill else bytes(8)
                fill = int.from_bytes(pattern, "little")  # 8 bytes of it
                names = [name for name in kernel.arg_names if name not in constants]
                values = [prepared.descriptors.data_ptr(), *tables, *first[0], *first[1], fill, *scalars]
                check(launched, kernel, constants, len(launch_.descriptors), dict(zip(names, values, strict=True)))
                number += 1
    return number


def memory(dtype: torch.dtype, numel: int, skew: int) -> torch.Tensor:
    """Aligned to 16 bytes, or `skew` elements beyond."""
    whole = torch.zeros(numel + 16, dtype=dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[skew:]


def words_at(address: int, number: int) -> list[int]:
    return list((ctypes.c_int64 * number).from_address(address))


USES: tuple[tuple[dict[str, Any], torch.dtype | None], ...] = (
    ({"wait": True, "credit": 1}, None),
    ({"send": True, "wait": True}, None),
    ({"send": True}, torch.bfloat16),
    ({}, torch.complex64),
)


def launches_of_signals(stub: StubDriver) -> int:
    pads = torch.zeros(2, 3, SLOT, dtype=torch.int64)
    slots = [pads[1, i].data_ptr() for i in range(3)]
    channel = Channel(pads[0], slots, [pack(1, peer, 5) for peer in (0, 2, 3)], Failure(CPU))
    channel.cpu_path = False
    for use, dtype in USES:
        signal_kernel.device_caches.clear()
        filler, word = (0, 8) if dtype is None else poison_word(dtype)
        constants = signal_constants(**{"send": False, "wait": False, **use}, poison=dtype is not None, size=word)
        for n, limit, fingerprint in ((0, 1, 0), (5, 1 << 62, (1 << 63) - 1), (16, 16, 16)):
            out = None if dtype is None else memory(dtype, n, 1)
            signal(channel, **use, fingerprint=fingerprint, limit=limit, poison=out)
            address, words = (0, 0) if out is None else (out.data_ptr(), out.numel() * out.itemsize // word)
            given = {
                "table": channel.table.data_ptr(), "pad": channel.pad.data_ptr(),
                "error": channel.failure.error.data_ptr(), "host_error": channel.failure.host_error.data_ptr(),
                "fingerprint": fingerprint, "limit": limit, "out": address, "words": words, "poison": filler,
            }  # fmt: skip
            check(stub.launches[-1], signal_kernel, constants, 3, given)
    return 3 * len(USES)


def launches_of_comparisons(stub: StubDriver) -> int:
    for size in (1, 16):
        codes = torch.tensor([pack(0, peer, 0) for peer in range(size)])
        compare, out = WordComparison(codes, Failure(CPU)), memory(torch.bfloat16, 8 * size, 1)
        for received, expected in ((torch.zeros(size + 1, dtype=torch.int64)[1:], -1), (codes[:0], 1 << 62)):
            compare(received, expected, out)
            given = {
                "received": received.data_ptr(), "number": received.numel(), "expected": expected,
                "codes": codes.data_ptr(), "error": compare.failure.error.data_ptr(),
                "host_error": compare.failure.host_error.data_ptr(), "out": out.data_ptr(), "nbytes": 2 * out.numel(),
            }  # fmt: skip
            check(stub.launches[-1], compare_words_kernel, {"num_warps": 1, "PTX": PTX}, 1, given)
    return 4


@triton.jit
def fill_words(out, number):
    """Triton compiles a number of 1 in, and that addresses are multiples of 16 if the first one is."""
    i = tl.arange(0, 16)
    tl.store(out + i, 1, mask=i < number)


def launches_that_are_wrong(stub: StubDriver) -> int:
    """Launches that the check must refuse: a number that was compiled in, an address that is less aligned than the one
    compiled for, arguments in another order, another grid."""
    table = copy_table(boxes_of(1, 1), torch.float32)
    ((launch_, constants),) = table.specialisations()
    prepared = launch.PreparedLaunch(copy_boxes_kernel, launch_, CPU, [3], constants)
    names = [name for name in copy_boxes_kernel.arg_names if name not in constants]
    empty, found = torch.empty(0, dtype=torch.int64), 0

    def given(sources: Sequence[int]) -> dict[str, int]:
        return dict(zip(names, [prepared.descriptors.data_ptr(), 0, 0, *sources, 64, 3], strict=True))

    prepared(empty, empty, [16, 32, 48, 64], [64])
    programs = len(launch_.descriptors)
    check(stub.launches[-1], copy_boxes_kernel, constants, programs, given([16, 32, 48, 64]))
    right = stub.launches[-1]
    words = torch.zeros(17, dtype=torch.int64)
    for number, out in ((1, words), (2, words[1:])):
        fill_words.device_caches.clear()
        start = launch.prepared(fill_words, (1, 1, 1), CPU, (words, number), 1)
        start(out, number)
        try:
            at = {"out": out.data_ptr(), "number": number}
            check(stub.launches[-1], fill_words, {"num_warps": 1}, 1, at)
        except AssertionError:
            found += 1
    for wrong in (
        lambda: check(right, copy_boxes_kernel, constants, programs, given([32, 16, 48, 64])),
        lambda: check(right, copy_boxes_kernel, constants, programs + 1, given([16, 32, 48, 64])),
    ):
        try:
            wrong()
        except AssertionError:
            found += 1
    return found


class CheckedKernel:
    """A kernel that is loaded, each of whose launches is compared with what it is given."""

    def __init__(self, stub: StubDriver, seen: Counter[str], kernel: Any, compiled: Any) -> None:
        self._stub, self._seen, self._kernel, self._compiled = stub, seen, kernel, compiled

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        start = self._compiled[grid]

        def checked(*given: Any) -> None:
            before = len(self._stub.launches)
            start(*given)
            assert len(self._stub.launches) == before + 1
            self._check(grid, given)

        return checked

    def _check(self, grid: Any, given: Sequence[Any]) -> None:
        kernel, compiled, launched = self._kernel, self._compiled, self._stub.launches[-1]
        block = (32 * compiled.metadata.num_warps, 1, 1)
        assert launched.kernel == kernel.__name__ and len(given) == len(kernel.params)
        assert (launched.grid, launched.block, launched.stream) == (grid, block, STREAM), launched
        assert launched.shared_bytes == compiled.metadata.shared
        values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in given]
        passed = [(p, v, isinstance(g, torch.Tensor)) for p, v, g in zip(kernel.params, values, given, strict=True)
                  if not p.is_constexpr]  # fmt: skip
        sizes = [8 if tensor else {"i32": 4, "i64": 8}[p.annotation_type] for p, _, tensor in passed]
        *arguments, _, _ = launched.arguments
        assert [len(argument) for argument in arguments] == sizes, (kernel, arguments)
        for (param, value, _), argument, size in zip(passed, arguments, sizes, strict=True):
            assert -(1 << 8 * size - 1) <= value < 1 << 8 * size - 1, (kernel, param.name)
            assert int.from_bytes(argument, "little") == value % (1 << 8 * size), (kernel, param.name)
        assert _holds(compiled, kernel, values)
        self._seen[kernel.__name__] += 1


@contextmanager
def checked_kernels(stub: StubDriver) -> Iterator[Counter[str]]:
    """In this block all launches of kernels that it loads are checked, and counted by name."""
    seen, loaded = Counter[str](), launch.loaded

    def load(kernel: Any, *arguments: Any, **options: Any) -> CheckedKernel:
        return CheckedKernel(stub, seen, kernel, loaded(kernel, *arguments, **options))

    modules = [m for name, m in sys.modules.items() if name.startswith("shardweave.kernels.")]
    everywhere = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, launch.Launches)}.values()
    with ExitStack() as patches:
        patches.enter_context(patch.object(launch, "loaded", load))
        for launches in everywhere:  # what was loaded before is not checked here
            patches.enter_context(patch.object(launches, "_loaded", {}))
        yield seen


def tokens_of_a_layer(number: int, odd: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, 24] with a row stride of 25, ids and weights [T, 7], in new memory."""
    x = memory(torch.bfloat16, number * 25, int(odd))[: number * 25].view(number, 25)[:, :24]
    ids = memory(torch.int64, number * 7, int(odd))[: number * 7].view(number, 7)
    return x.requires_grad_(), ids, torch.rand(number, 7).requires_grad_()


def launches_of_tokens(stub: StubDriver) -> int:
    """A layer and its backward on virtual ranks, with many tokens and few, aligned and not."""
    from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

    with checked_kernels(stub) as seen:
        for tokens, odd in ((200, False), (3, True)):
            d = VirtualTokenDispatcher(
                2,
                num_experts=5,
                top_k=7,
                hidden=24,
                max_tokens=tokens,
                options=DispatchOptions(align=4, overflow="drop", zero_rows=True),
            )
            xs, ids, weights = zip(*[tokens_of_a_layer(tokens, odd)] * 2, strict=True)
            routed = d.dispatch(xs, ids, weights)
            ys = d.combine([r.x * 1 for r in routed], routed, add=xs)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert seen.total() > 40
    return len(seen)


def launches_of_windowed_tokens(stub: StubDriver) -> int:
    """Layers and their backward through windows, by one rank: first calls, and those that make their launches again."""
    from shardweave.bench.gpu.lone_rank import TIMEOUT, Alone, Mirror, MirrorTransport, alone_among
    from shardweave.runtime.moe import dispatcher
    from shardweave.runtime.moe.dispatcher import TokenDispatcher

    transport = MirrorTransport(0, 4, TIMEOUT, Mirror(CPU), Alone())
    transport._watchdog = None  # GPUs have none
    alone_among({"symmetric_memory": transport})
    found = Mock(choose=lambda *_: (transport, ""), number_dispatcher=lambda ranks: 1)
    repeated, again = 0, launch.RepeatedLaunch.__call__

    def counted(made: Any, values: Any) -> None:
        nonlocal repeated
        repeated += 1
        again(made, values)

    with (
        checked_kernels(stub) as seen,
        patch.object(dispatcher, "transports_of", lambda *_: found),
        patch.object(dispatcher, "why_not_backend", lambda *_: None),
        patch.object(launch.RepeatedLaunch, "__call__", counted),
    ):
        for settings in (
            {"pooled_buffers": 2}, {"pooled_buffers": 0, "zero_rows": True}, {"pooled_buffers": 2, "quantize": "mxfp8"},
        ):  # fmt: skip
            d = TokenDispatcher(
                **with_options(
                    num_experts=5,
                    top_k=7,
                    hidden=24,
                    max_tokens=200,
                    align=4,
                    overflow="drop",
                    transport="symmetric_memory",
                    **settings,
                )
            )
            for tokens, odd in ((200, False), (3, True), (200, False), (3, True), (200, True), (0, False)):
                x, ids, weights = tokens_of_a_layer(tokens, odd)
                routed = d.dispatch(x, ids, weights)
                rows = routed.x if routed.scale is None else routed.dequantized()
                values = routed.output_buffer().copy_(rows) if odd else rows * 1
                y = d.combine(values, routed, add=None if odd else x)
                if y.requires_grad:
                    y.backward(torch.ones_like(y))
    assert repeated > 10, repeated
    return len(seen)


def _holds(compiled: Any, kernel: Any, given: list[int]) -> bool:
    """Whether the arguments are what a kernel was compiled for; every other one would make a GPU fault."""
    for (at, *_), attributes in compiled.src.attrs.items():
        if any(a != "tt.divisibility" or given[at] % divisor for a, divisor in attributes):
            return False
    return True


FUNCTIONS = {
    launches_of_boxes: 8,
    launches_of_signals: 12,
    launches_of_comparisons: 4,
    launches_that_are_wrong: 4,
}
LONG = {launches_of_tokens: 10, launches_of_windowed_tokens: 12}


def run_all(functions: dict[Callable[..., int], int]) -> dict[str, int | str]:
    """What each function returns, or its error. For a process of its own."""
    ended: dict[str, int | str] = {}
    with tempfile.TemporaryDirectory(prefix="shardweave-stub-") as folder:
        stub = StubDriver(Path(folder))
        kernels_on_the_cpu()
        for function in functions:
            try:
                ended[function.__name__] = function(stub)
            except Exception:
                ended[function.__name__] = traceback.format_exc()
    return ended


@pytest.fixture(scope="module")
def ended() -> dict[str, int | str]:
    return ended_in_a_process("FUNCTIONS")


def ended_in_a_process(functions: str) -> dict[str, int | str]:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: its driver is loaded, not a stub")
    if compiler() is None:
        pytest.skip("no C compiler")
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = run_python(
        [sys.executable, "-c", f"import test_triton_launcher as t; print(t.run_all(t.{functions}))"], timeout=600,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return literal_eval(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_launcher_passes_arguments_on(function: Callable[..., int], ended: dict[str, int | str]) -> None:
    assert ended[function.__name__] == FUNCTIONS[function]


@pytest.mark.long
def test_launcher_passes_arguments_of_token_kernels_on() -> None:
    assert ended_in_a_process("LONG") == {function.__name__: kernels for function, kernels in LONG.items()}
