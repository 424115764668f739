"""Targets on a GPU and the figures reached: kernels beside a copy in the same run, whole programs, host work.

`make gpu` runs it after the tests: `python -m shardweave.bench.gpu.targets --out FOLDER` prints a line for each target,
with the median of every contender, and appends it to `targets.md`. A line that leaves CUDA unusable ends the process;
with `--go-on` another one measures what follows. The exit status is 1 if a line has no figure of ours, unless the
device does not support what it measures.
The ceiling of a case is `copy_` of as many bytes, read and written, timed like the case itself: in a CUDA graph, over
buffers that rotate past the L2 cache. Every result is checked before it is timed. With `--dry` every line runs without
a GPU, on tiny shapes, and no figure means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from shardweave.bench.baselines.token_kernels import Rival, combining, permuting, routing_and_permuting
from shardweave.bench.gpu.environment import described
from shardweave.bench.gpu.kernel_cases import Case, Made, cases
from shardweave.bench.gpu.measuring import COPY, Measuring
from shardweave.bench.gpu.outcomes import LOST, cuda_is_lost
from shardweave.bench.gpu.program_cases import direct_push, pack_and_unpack, whole_program
from shardweave.bench.gpu.token_cases import DRY_FEW, DRY_LARGE, FEW, FEW_SETS, LARGE, VirtualRank
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import figure, provenance_lines
from shardweave.bench.harness.measure import Sink, why_absent
from shardweave.bench.harness.results import Results, Row
from shardweave.errors import UnsupportedError
from shardweave.kernels import SLOT, Channel, Failure, pack, signal, wait_limit

SUITE, CEILING = "kernels", "of the ceiling"
HOST_TARGET_US = 15.0
NO_FIGURE = "dry run: no figure"


@dataclass
class Target:
    """What a case has to reach, and once it has run, what it reaches.

    Attributes:
        unit: "of the ceiling": a share. "×": the fastest other contender ÷ ours; with `at_least=False` ours ÷ it. Else
            that of the time of ours.
        bound: the least value, or the most. None: there is no target.
        measure: puts the rows of the case with this name into the sink of a `Measuring`.
        rows: of the case, by contender.
        missing: contenders without a row, and why.
        failed: whether ours has no row although the device supports it.
    """

    case: str
    unit: str
    bound: float | None
    at_least: bool
    measure: Callable[[str], object]
    rows: dict[str, Row] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def run(self, measuring: Measuring) -> None:
        """Measure; an error is noted and does not end the run."""
        results = Results()
        measuring.sink = Sink(SUITE, results.put)
        unsupported = False
        try:
            self.measure(self.case)
        except AssertionError as error:
            measuring.sink.fault(self.case, "ours", str(error))
        except Exception as error:
            unsupported = isinstance(error, UnsupportedError) and not measuring.dry
            measuring.sink.absent(self.case, "ours", why_absent("ours", error))
        self.rows = {row.contender: row for row in results.rows}
        self.missing = {one.contender: one.why for one in (*results.absent, *results.faults)}
        self.failed = "ours" in self.missing and not unsupported

    @property
    def value(self) -> float | None:
        """None where ours is missing, or all that it is compared with."""
        ours = self.rows.get("ours")
        others = [row.median for contender, row in self.rows.items() if contender not in ("ours", COPY)]
        if ours is None or (self.unit == "×" and not others):
            return None
        if self.unit == CEILING:
            return ours.share_of_ceiling
        if self.unit == "×":
            return min(others) / ours.median if self.at_least else ours.median / min(others)
        return ours.median

    @property
    def met(self) -> bool | None:
        if self.value is None or self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def shown(self, dry: bool) -> str:
        """The value and the median of every contender; or why there is no value."""
        if "ours" in self.missing:
            return f"not measured: {self.missing['ours']}"
        times = [f"{contender} {figure(row.median)} µs" for contender, row in self.rows.items()]
        note = "; ".join([*times, *(f"{name}: {why}" for name, why in self.missing.items())])
        if self.value is None:
            return f"not measured: nothing to compare with; {note}"
        if dry:
            return NO_FIGURE
        return f"{self.value:.1%}, {note}" if self.unit == CEILING else f"{self.value:.2f} {self.unit}, {note}"

    def judged(self, dry: bool) -> str:
        """The target, and whether it is met."""
        if self.bound is None:
            return ""
        bound = f"{self.bound:.0%}" if self.unit == CEILING else f"{self.bound:g} {self.unit}"
        met = "" if dry or self.met is None else ": met" if self.met else ": NOT met"
        return f" (target {'≥' if self.at_least else '≤'} {bound}{met})"


def targets(measuring: Measuring) -> Iterator[Target]:
    """All lines of the page, in its order. Those that take longest, beside other libraries, come last."""
    dry, device = measuring.dry, measuring.device
    shape, side = ((31, 33), 32) if dry else ((8191, 8193), 24576)
    large, few = (DRY_LARGE, DRY_FEW) if dry else (LARGE, FEW)
    yield Target(
        f"pack + unpack of S0 → S1, {shape[0]}×{shape[1]} bf16, 4 ranks: torch's ops ÷ ours", "×", 2.0, True,
        partial(pack_and_unpack, measuring, shape),
    )  # fmt: skip
    yield Target(
        f"whole S0 S1 → S1 S0, 4×4 virtual ranks, {side}² bf16, graph ÷ its kernels' sum", "×", 1.15, False,
        partial(whole_program, measuring, side),
    )  # fmt: skip
    gathered = 64 if dry else 8192
    yield Target(
        f"direct push of an all-gather, {gathered}² bf16, rank 0 of 8 virtual ranks: through windows ÷ ours", "×", 1.5,
        True, partial(direct_push, measuring, gathered),
    )  # fmt: skip
    kinds = cache(partial(host_work, dry))  # one run for both
    for transport, left_out in (
        ("windows", "through windows, launches"),
        ("messages", "by messages, launches and torch.distributed"),
    ):
        name = f"host work of a cached call {left_out} excluded, worst kind"
        yield Target(name, "µs", HOST_TARGET_US, False, partial(host, measuring, kinds, transport))
    yield Target(
        "a wait of 20 ms for a peer that never signals", "µs", 22_000, False, partial(late_peer, measuring),
    )  # fmt: skip
    for box in cases(device, 1 << 13, 64) if dry else cases(device):
        yield Target(box.name, CEILING, box.share or None, True, partial(boxes, measuring, box))
    rank = cache(lambda: VirtualRank(large, device))  # made by the first line that needs it, which may fail

    def push() -> Made:
        return rank().push(False)

    def combine() -> Made:
        return rank().combine()

    def route_and_push() -> Made:
        return rank().push(True)

    for name, make in (("push_rows", push), ("combine_rows", combine)):
        yield Target(f"{name}, {large}", CEILING, 0.85, True, partial(measuring.tokens, make=make, shape=large))
    yield Target(
        f"count_pairs, {large}", "µs", 30.0, False,
        lambda case: measuring.latency(case, rank().routed, FEW_SETS),
    )  # fmt: skip
    sets = measuring.sets(2 * few.moved)
    yield Target(
        f"decode: route + push + combine, {few}", "µs", 60.0, False,
        lambda case: measuring.latency(case, VirtualRank(few, device).both, sets),
    )  # fmt: skip
    batched = replace(few, batched=True)
    yield Target(
        f"decode: route + push + combine, {batched}", "µs", 60.0, False,
        lambda case: measuring.latency(case, VirtualRank(batched, device).both, sets),
    )  # fmt: skip
    yield Target(
        f"decode in fp8: route + quantizing push + combine, {few}", "µs", 60.0, False,
        lambda case: measuring.latency(case, VirtualRank(few, device).both_quantized, sets),
    )  # fmt: skip
    yield Target(
        f"quantize_rows, {large}", "µs", 40.0, False,
        lambda case: measuring.latency(case, rank().quantized, measuring.sets(large.quantized)),
    )  # fmt: skip
    for name, packed, moved in (
        ("push_rows of fp8_128 rows", lambda: rank().push_quantized(), large.moved_quantized),
        ("combine_rows of mxfp8 rows", lambda: rank().combine_quantized(), large.returned_quantized),
    ):
        yield Target(f"{name}, {large}", CEILING, 0.85, True, partial(quantized_rows, measuring, packed, moved))
    yield Target(
        f"dispatch + combine beside a matmul: one after the other ÷ ours, {large}",
        "×", 1.1, True, partial(two_phases, measuring, rank, 64 if dry else 8192),
    )  # fmt: skip
    for name, bound, make, rivals in (
        ("push_rows", 1.0, push, permuting),
        ("combine_rows", 1.0, combine, combining),
        ("route + push", 1.2, route_and_push, routing_and_permuting),
    ):
        yield Target(
            f"{name}: the best of others ÷ ours, {large}", "×", bound, True,
            partial(beside_others, measuring, rank, make, rivals),
        )  # fmt: skip


def boxes(measuring: Measuring, box: Case, _: str) -> None:
    measuring.boxes(box)


def beside_others(
    measuring: Measuring,
    rank: Callable[[], VirtualRank],
    make: Callable[[], Made],
    rivals: Callable[[VirtualRank, bool], Sequence[Rival]],
    case: str,
) -> None:
    measuring.tokens(case, make, rank().shape, rivals(rank(), measuring.dry), ceiling=False)


def quantized_rows(measuring: Measuring, make: Callable[[], Made], moved: int, case: str) -> None:
    measuring.time(case, {"ours": make}, moved, measuring.sets(moved), copied=moved)


def two_phases(measuring: Measuring, rank: Callable[[], VirtualRank], side: int, case: str) -> None:
    """What `dispatch_start` and `combine_start` are for: rows move while the device computes something else."""
    sides = {
        "ours": lambda: rank().beside_matmul(side, True),
        "one after the other": lambda: rank().beside_matmul(side, False),
    }
    measuring.time(case, sides, None, 1)


def host(measuring: Measuring, kinds: Callable[[], list[dict[str, Any]]], transport: str, case: str) -> None:
    """The slowest kind."""
    measuring.sink.row(case, "ours", "µs", [max(kind[transport] for kind in kinds())])


def host_work(dry: bool) -> list[dict[str, Any]]:
    """Host time of cached calls, from a process of its own: it replaces transports by some without peers."""
    command = [sys.executable, "-m", "shardweave.bench.gpu.host_work", *["--rounds", "1", "--calls", "2"] * dry]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240 if dry else 60)
    if ran.returncode:
        raise RuntimeError((ran.stderr.splitlines() or ["no error text"])[-1])
    found: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def late_peer(measuring: Measuring, case: str) -> None:
    """How much longer than its limit a wait takes."""
    device, limit, seconds = measuring.device, 0.02, []
    pads = torch.zeros(2, 1, SLOT, dtype=torch.int64, device=device)
    channel = Channel(pads[0], [pads[1].data_ptr()], [pack(0, 1, 0)], Failure(device))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2 if measuring.dry else 9):
        channel.failure.error.zero_()
        wait()
        began = time.perf_counter()
        signal(channel, wait=True, limit=wait_limit(limit, device))
        wait()
        seconds.append(time.perf_counter() - began)
        if channel.failure.read() is None:
            raise AssertionError("a signal that nobody sent has arrived")
    measuring.sink.row(case, "ours", "µs", [max(seconds[1:]) * 1e6])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.targets", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="no GPU: run every line on tiny shapes, report no figure")
    parser.add_argument("--go-on", action="store_true", help="measure what is not in FOLDER yet, and keep what is")
    arguments = parser.parse_args(argv)
    if not arguments.dry and not torch.cuda.is_available():
        print("error: no GPU: torch.cuda.is_available() is False; allowed: --dry", file=sys.stderr)
        return 2
    device = torch.device("cpu") if arguments.dry else torch.device("cuda", torch.cuda.current_device())
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "targets.md"
    known = file.read_text(encoding="utf-8") if arguments.go_on and file.exists() else ""
    measuring = Measuring(Sink(SUITE, Results().put), device, 1 if arguments.dry else 9, dry=arguments.dry)
    failed = False
    with file.open("a" if known else "w", encoding="utf-8") as page:
        if known:
            page.write("its process ended first\n" * (not known.endswith("\n")))
        else:
            about = ", ".join(f"{name} {value}" for name, value in described(device).items())
            page.write("\n".join(["# Targets on a GPU", "", *provenance_lines(provenance()), "", about, "", ""]))
        for target in targets(measuring):
            head = f"- {target.case}: "
            if head in known:
                continue
            page.write(head)
            page.flush()  # a run that is killed keeps what it has measured, and another one goes on after this line
            target.run(measuring)
            line = f"{target.shown(arguments.dry)}{target.judged(arguments.dry)}"
            page.write(f"{line}\n")
            page.flush()
            print(f"{head}{line}", flush=True)
            failed |= target.failed
            if target.failed and cuda_is_lost():
                print("  CUDA is unusable for this process, which ends", flush=True)
                os._exit(LOST)  # every later line would fail
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
