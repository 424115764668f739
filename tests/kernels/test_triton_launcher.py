"""Triton's own launcher passes on what prepared launches give it: arguments and grids as the compiled kernels demand.

Needs no GPU, but a C compiler: a stub of libcuda.so.1 records what `cuLaunchKernelEx` is given.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import triton
import triton.language as tl
from dispatcher_settings import with_options
from stub_libcuda import STREAM, StubDriver, compiler, kernels_on_the_cpu
from warm_python import run_python

from shardweave.kernels import StridedBoxes, copy_table, launch, reduce_table
from shardweave.kernels.channel import SLOT, Channel, Failure, pack
from shardweave.kernels.compare_words import WordComparison
from shardweave.kernels.copy_boxes import copy_boxes
from shardweave.kernels.reduce_boxes import reduce_boxes
from shardweave.kernels.signal import signal
from shardweave.runtime.moe.options import DispatchOptions

pytestmark = pytest.mark.aot
CPU = torch.device("cpu")


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
    forms: list[tuple[Callable[..., None], Any]] = [
        (copy_boxes, copy_table(boxes_of(3, 1), torch.bfloat16)),
        (copy_boxes, copy_table(boxes_of(7, 3, fill=-2.0), torch.float32)),
        (reduce_boxes, reduce_table(boxes_of(2, 1, 2), torch.bfloat16, "sum")),
        (reduce_boxes, reduce_table(boxes_of(6, 2, 3), torch.float32, "sum", divisor=3.0)),
    ]
    with checked_kernels(stub) as seen:
        for (function, table), skew in product(forms, (0, 1)):
            counts = table.sources.count, table.targets.count
            function(table, *([memory(table.dtype, 2000, skew) for _ in range(count)] for count in counts))
    return len(seen)


def memory(dtype: torch.dtype, numel: int, skew: int) -> torch.Tensor:
    """Aligned to 16 bytes, or `skew` elements beyond."""
    whole = torch.zeros(numel + 16, dtype=dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[skew:]


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
    with checked_kernels(stub) as seen:
        for use, dtype in USES:
            for n, limit, fingerprint in ((0, 1, 0), (5, 1 << 62, (1 << 63) - 1), (16, 16, 16)):
                out = None if dtype is None else memory(dtype, n, 1)
                signal(channel, **use, fingerprint=fingerprint, limit=limit, poison=out)
    return len(seen)


def launches_of_comparisons(stub: StubDriver) -> int:
    with checked_kernels(stub) as seen:
        for size in (1, 16):
            codes = torch.tensor([pack(0, peer, 0) for peer in range(size)])
            compare, out = WordComparison(codes, Failure(CPU)), memory(torch.bfloat16, 8 * size, 1)
            for received, expected in ((torch.zeros(size + 1, dtype=torch.int64)[1:], -1), (codes[:0], 1 << 62)):
                compare(received, expected, out)
    return len(seen)


@triton.jit
def fill_words(out, number: tl.int32):
    """Triton compiles in that addresses are multiples of 16 if the first one is."""
    i = tl.arange(0, 16)
    tl.store(out + i, 1, mask=i < number)


def launches_that_are_wrong(stub: StubDriver) -> int:
    """An address that is less aligned than the one compiled for: the check must refuse it."""
    words = torch.zeros(17, dtype=torch.int64)
    with checked_kernels(stub) as seen:
        start = launch.prepared(fill_words, (1, 1, 1), CPU, (words, 2), 1)
        start(words, 2)
        try:
            start(words[1:], 2)
        except AssertionError:
            return len(seen)
    return 0


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
    from lone_rank import TIMEOUT, Alone, Mirror, MirrorTransport, alone_among

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


FUNCTIONS = {launches_of_boxes: 2, launches_of_signals: 1, launches_of_comparisons: 1, launches_that_are_wrong: 1}
"""And how many kernels each launches."""
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
