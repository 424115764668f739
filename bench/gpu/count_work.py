"""`TRITON_INTERPRET=1 python -m shardweave.bench.gpu.count_work --out FILE`: the work of redistributions and of token
dispatch, counted.

Needs no GPU: rank 0 runs among peers that are itself (`host_work.Mirror`). Triton's interpreter executes its kernels;
launches and the bytes of each load and store are counted as they happen. Then the same call is made with launches that
do nothing, and Python's calls are counted. The first call, which plans and compiles, does not count. No count depends
on the machine; host times do.
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
import torch.distributed as dist
from triton.runtime import interpreter

from shardweave.bench.gpu import token_work
from shardweave.bench.gpu.host_work import Mirror, MirrorTransport, measure
from shardweave.bench.gpu.token_work import TokenCase, TokenWork, host_microseconds, null_launches
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import provenance_lines, table
from shardweave.bench.suites.suite_host import RANKS as RANKS_OF_HOST_WORK
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
TIMED_CALLS, ROUNDS = 1000, 7
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


def counted(operation: str, ranks: int, pooled: bool = False) -> tuple[Any, ...]:
    """A row of the table; `pooled`: ranks write directly into pooled outputs."""
    provider = _Kept(_CPU)
    transport = MirrorTransport(0, ranks, 10.0, provider, Alone())
    transport._watchdog, transport.windows = None, WindowPolicy("push")
    if pooled:
        transport.pool_outputs(tuple(range(ranks)), SIDE * SIDE * DTYPE.itemsize, 1)
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
        operation + ", direct" * pooled, ranks, found["launches"],
        found["load", False] + found["load", True], found["store", False],
        found["store", True], sent * DTYPE.itemsize, calls,
    )  # fmt: skip


@torch.no_grad()
def counted_tokens(case: TokenCase) -> list[tuple[Any, ...]]:
    """Rows of the table of token dispatch: a dispatch, and its combine."""
    work, rows = TokenWork(case), list[tuple[Any, ...]]()
    for name, call in work.calls.items():
        with Counts(work.memory.windows) as counts:
            call()
        work.transport.check()
        found = counts.found
        rows.append((
            f"{name}, {case}", found["launches"], found["load", False] + found["load", True], found["store", False],
            found["store", True], work.payload,
        ))  # fmt: skip
    with null_launches():
        work = TokenWork(case)
        for i, call in enumerate(work.calls.values()):
            call()
            rows[i] += (python_calls(call), f"{host_microseconds(call, TIMED_CALLS):.1f}")
    return rows


_EXPLAINED_TOKENS = f"""
## Token dispatch

Rank 0 of {token_work.RANKS} through windows and pooled buffers; the other ranks have as many tokens. Experts' output
lies in other memory, from which `combine` copies it to the window. Bytes as above, of windows and pooled buffers of all
ranks; the counts of other ranks are there, the rows that they push are not. The payload is the rows that go to peers or
come from them. Host times are the median of {TIMED_CALLS} calls whose launches do nothing, on CPU tensors, without
gradients.
"""
_EXPLAINED_HOST = f"""
## Host time of a cached redistribution

Of the loop inside `DTensor.redistribute`, by rank 0 of {RANKS_OF_HOST_WORK} through windows of symmetric memory: from a
local tensor and two specs to a local tensor, whose allocation is included. Median of {ROUNDS} rounds of {TIMED_CALLS}
calls whose launches do nothing, on CPU tensors (`bench/gpu/host_work.py`). P → R is two exchanges.
"""
_EXPLAINED = f"""
Run with TRITON_INTERPRET=1. Rank 0 of 2 and 8 ranks, tensors of {SIDE} x {SIDE} {str(DTYPE)[6:]}, pushed through
windows of symmetric memory; "direct": into outputs of peers in pooled buffers (`prepare(..., pooled_outputs=1)`). Bytes
read are of this rank's memory: inputs, tables, and what peers have pushed into its window. Bytes written are of its own
memory and, apart, of windows, which are those of its peers when data is pushed; of a direct push what this rank keeps
counts as windows. Words that signals exchange atomically do not count. The payload is what peers need of this rank.
Python calls are of a cached call whose launches do nothing, below `BoundProgram.run`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.count_work", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there (default: print it)")
    given = parser.parse_args(argv)
    if not interpreted(signal_kernel):
        parser.error("kernels are compiled in this process; set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    rows = [counted(operation, ranks) for operation in OPERATIONS for ranks in RANKS]
    rows += [counted(operation, ranks, True) for operation in ("all-gather", "all-to-all") for ranks in RANKS]
    heads = ("operation", "ranks", "launches", "bytes read", "bytes written, own memory", "bytes written, windows",
             "payload sent", "Python calls")  # fmt: skip
    tokens = [row for case in token_work.CASES for row in counted_tokens(case)]
    token_heads = ("operation", *heads[2:], "host, µs")
    lines = ["# Work of redistributions and token dispatch, counted", "", *provenance_lines(provenance()), _EXPLAINED]
    dist.destroy_process_group()  # that of the dispatchers
    host = [(found["kind"], f"{found['windows']:.1f}") for found in measure(_CPU, ROUNDS, TIMED_CALLS, ["windows"])]
    lines += [*table(heads, rows), _EXPLAINED_HOST, *table(("redistribution", "host, µs"), host)]
    lines += [_EXPLAINED_TOKENS, *table(token_heads, tokens)]
    text = "\n".join(lines) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
