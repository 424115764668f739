"""`TRITON_INTERPRET=1 python -m shardweave.bench.gpu.count_work --out FILE`: the work of redistributions, counted.

Needs no GPU: rank 0 runs among peers that are itself (`host_work.Mirror`). Triton's interpreter executes its kernels;
launches and the bytes of each load and store are counted as they happen. Then the same call is made with launches that
do nothing, and Python's calls are counted. The first call, which plans and compiles, does not count. No count depends
on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from shardweave.bench.gpu.host_work import Mirror, MirrorTransport
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import provenance_lines, table
from shardweave.bench.suites.suite_host import Alone
from shardweave.kernels.launch import interpreted
from shardweave.kernels.signal import signal_kernel
from shardweave.planner import Exchange, plan
from shardweave.runtime.executor.bind import BoundProgram
from shardweave.runtime.executor.copies import contiguous_strides
from shardweave.runtime.transports.backend_limits import WindowPolicy

OPERATIONS = {
    "all-gather": ("S0", "R"),
    "reduce-scatter": ("P", "S0"),
    "all-to-all": ("S0", "S1"),
    "all-reduce": ("P", "R"),
}
RANKS = (2, 8)
SIDE, DTYPE = 256, torch.bfloat16
_CPU = torch.device("cpu")


class Counts:
    """Launches, and bytes of loads and stores by where they go, of the calls in its body.

    Attributes:
        found: by "launches", and by ("load" or "store", whether to a window).
    """

    def __init__(self, windows: Sequence[torch.Tensor]) -> None:
        self.found: Counter[Any] = Counter()
        self._ranges = [(w.data_ptr(), w.data_ptr() + w.numel()) for w in windows]
        self._patches = ExitStack()

    def __enter__(self) -> Counts:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store

        def launch(self_: Any, *arguments: Any, **named: Any) -> Any:
            self.found["launches"] += 1
            return call(self_, *arguments, **named)

        def loaded(self_: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._count("load", pointers, mask)
            return load(self_, pointers, mask, *rest)

        def stored(self_: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._count("store", pointers, mask)
            return store(self_, pointers, value, mask, *rest)

        enter = self._patches.enter_context
        enter(mock.patch.object(executor, "__call__", launch))
        enter(mock.patch.object(builder, "create_masked_load", loaded))
        enter(mock.patch.object(builder, "create_masked_store", stored))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()

    def _count(self, kind: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data.astype(bool)].astype(np.int64)
        width = max(pointers.dtype.element_ty.primitive_bitwidth // 8, 1)
        in_window = np.zeros(addresses.shape, bool)
        for first, end in self._ranges:
            in_window |= (addresses >= first) & (addresses < end)
        windows = int(in_window.sum())
        self.found[kind, True] += windows * width
        self.found[kind, False] += (addresses.size - windows) * width


class _Kept(Mirror):
    """Keeps the memory that it makes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.windows: list[torch.Tensor] = []

    def join(self, *arguments: Any) -> dict[int, torch.Tensor]:
        memory = super().join(*arguments)
        self.windows += memory.values()
        return memory


def python_calls(call: Callable[[], object]) -> int:
    """The number of Python functions that a call enters."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number - 1  # the call itself


def counted(operation: str, ranks: int) -> tuple[Any, ...]:
    """A row of the table."""
    provider = _Kept(_CPU)
    transport = MirrorTransport(0, ranks, 10.0, provider, Alone())
    transport._watchdog, transport.windows = None, WindowPolicy("push")
    program = plan((ranks,), (SIDE, SIDE), str(DTYPE)[6:], *OPERATIONS[operation])
    x = torch.ones(program.source_shape(0), dtype=DTYPE)
    bound = BoundProgram(program, 0, contiguous_strides(x.shape), transport, DTYPE, _CPU)

    def call() -> None:
        for _request in bound.run(x, bound.fingerprint):
            raise RuntimeError("a request to the host")

    call()
    with Counts(provider.windows) as counts:
        call()
    transport.check()
    with mock.patch.object(interpreter.GridExecutor, "__call__", lambda *_, **__: None):
        call()
        calls = python_calls(call)
    found = counts.found
    sent = sum(program.traffic(step, 0).sent for step in program.steps if isinstance(step, Exchange))
    return (
        operation, ranks, found["launches"], found["load", False] + found["load", True], found["store", False],
        found["store", True], sent * DTYPE.itemsize, calls,
    )  # fmt: skip


_EXPLAINED = f"""
Run with TRITON_INTERPRET=1. Rank 0 of 2 and 8 ranks, tensors of {SIDE} x {SIDE} {str(DTYPE)[6:]}, pushed through
windows of symmetric memory. Bytes read are of this rank's memory: inputs, tables, and what peers have pushed into its
window. Bytes written are of its own memory and, apart, of windows, which are those of its peers when data is pushed.
Words that signals exchange atomically do not count. The payload is what peers need of this rank. Python calls are of a
cached call whose launches do nothing, below `BoundProgram.run`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.count_work", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there (default: print it)")
    given = parser.parse_args(argv)
    if not interpreted(signal_kernel):
        parser.error("kernels are compiled in this process; set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    rows = [counted(operation, ranks) for operation in OPERATIONS for ranks in RANKS]
    heads = ("operation", "ranks", "launches", "bytes read", "bytes written, own memory", "bytes written, windows",
             "payload sent", "Python calls")  # fmt: skip
    lines = ["# Work of redistributions, counted", "", *provenance_lines(provenance()), _EXPLAINED]
    lines += table(heads, rows)
    text = "\n".join(lines) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
