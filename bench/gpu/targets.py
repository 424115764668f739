"""Targets on a GPU and the figures reached: kernels beside a copy in the same run, whole programs, host work.

`make gpu` runs it after the tests: `python -m shardweave.bench.gpu.targets --out bench/results` writes a JSON file, in
the form that compare and report read, and a page of the targets, into a folder named after the device, again after each
row. The suite
`python -m shardweave bench kernels` measures the same kernels without targets or a limit of time, on CPUs too. The
ceiling of a case is `copy_` of as many bytes, read and written, timed like the case itself: in a CUDA graph, over
buffers that rotate past the L2 cache. Every result is verified before it is timed. With `--dry` every line runs without
a GPU, on tiny shapes, and no figure means anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardweave.bench.gpu.device import clocks, gpu_machine
from shardweave.bench.gpu.kernel_cases import cases
from shardweave.bench.gpu.program_cases import pack_and_unpack, whole_program
from shardweave.bench.gpu.target_bench import Bench
from shardweave.bench.gpu.target_rows import Row, as_markdown, as_results
from shardweave.bench.gpu.token_rows import token_rows
from shardweave.bench.harness.machine import slug
from shardweave.bench.harness.result_file import Results
from shardweave.kernels import SLOT, Channel, Failure, pack, signal
from shardweave.kernels.signal import SHORTEST_POLL

HOST_TARGET_US = 15.0


def host_rows(bench: Bench) -> None:
    """Host time of a cached call, in a process of its own, which replaces transports by some that move nothing."""
    rows = {
        "windows": Row(
            "host work of a cached call through windows, launches excluded, worst kind", "µs", HOST_TARGET_US, False
        ),
        "messages": Row(
            "host work of a cached call by messages, launches and torch.distributed excluded, worst kind",
            "µs", HOST_TARGET_US, False,
        ),
    }  # fmt: skip
    found: list[list[dict[str, Any]]] = []

    def measured(row: Row, name: str) -> None:
        if not found:
            found.extend(_host_cost(bench))
        row.value = max(kind[name] for kind in found[1])
        row.detail = {"kinds": [a | b for a, b in zip(*found, strict=True)]} if name == "windows" else {}

    for name, row in rows.items():
        bench.measure(row, partial(measured, name=name))


def _host_cost(bench: Bench) -> list[list[dict[str, Any]]]:
    command = [sys.executable, "-m", "shardweave.bench.suites.host_cost", "--json", "--device", bench.device.type]
    command += ["--rounds", "1", "--calls", "2"] if bench.dry else ["--rounds", "7"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        raise RuntimeError((ran.stderr.splitlines() or ["no word"])[-1])
    return json.loads(ran.stdout.splitlines()[-1])


def poll_row(bench: Bench) -> None:
    """A wait ends after a number of polls, computed from a lower bound of the time of a poll: this row checks it."""
    row = Row("the shortest poll of a signal that waits: what bounds in seconds take it to be", "ns",
              SHORTEST_POLL * 1e9, True)  # fmt: skip

    def measured(row: Row) -> None:
        pads = torch.zeros(2, 1, SLOT, dtype=torch.int64, device=bench.device)
        channel = Channel(pads[0], [pads[1].data_ptr()], [pack(0, 1, 0)], Failure(bench.device))
        polls, found = 20 if bench.dry else 200_000, []
        for _ in range(2 if bench.dry else 9):
            channel.failure.error.zero_()
            wait_for(bench.device)
            began = time.perf_counter()
            signal(channel, wait=True, polls=polls)
            wait_for(bench.device)
            found.append((time.perf_counter() - began) / polls)
            if channel.failure.read() is None:
                raise AssertionError("a signal that nobody sent has come")
        row.value = min(found[1:]) * 1e9

    bench.measure(row, measured)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def program_rows(bench: Bench) -> None:
    shape = (31, 33) if bench.dry else (8191, 8193)
    row = Row(f"pack + unpack of S0 → S1, {shape[0]}×{shape[1]} bf16, 4 ranks: torch's ops ÷ ours", "×", 2.0, True)
    bench.measure(row, lambda row: pack_and_unpack(row, shape, bench.device, bench.timer, bench.cache))
    side = 32 if bench.dry else 24576
    row = Row(f"whole S0 S1 → S1 S0, 4×4 virtual ranks, {side}² bf16, graph ÷ its kernels' sum", "×", 1.15, False)
    bench.measure(row, lambda row: whole_program(row, side, bench.device, bench.timer, bench.dry))


def run(bench: Bench) -> None:
    """Measure all rows of the page."""
    program_rows(bench)
    host_rows(bench)
    poll_row(bench)
    for case in cases(bench.device, bench.dry):
        row = Row(case.name, "of the ceiling", case.share or None, True)
        bench.measure(row, partial(bench.kernel, case))
    token_rows(bench, Row)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.targets", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder for the device goes there")
    parser.add_argument("--flat", action="store_true", help="write into --out itself")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="report of the tests that ran before")
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no case after these (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="no GPU: run every line on tiny shapes, report no figure")
    arguments = parser.parse_args(argv)
    if not arguments.dry and not torch.cuda.is_available():
        print("error: no GPU: torch.cuda.is_available() is False; allowed: --dry", file=sys.stderr)
        return 2
    device = torch.device("cpu") if arguments.dry else torch.device("cuda", torch.cuda.current_device())
    about = gpu_machine(device)
    if arguments.tests is not None:
        about["tests"] = json.loads(arguments.tests.read_text(encoding="utf-8"))
    folder = arguments.out if arguments.flat else arguments.out / slug(about["device"])
    folder.mkdir(parents=True, exist_ok=True)
    command = "python -m shardweave.bench.gpu.targets" + " --dry" * arguments.dry

    def write() -> Results:
        """Write both files, after every row, so that a run that is killed keeps the rows before."""
        results = as_results(bench.rows, about, arguments.dry, command)
        (folder / "gpu_targets.json").write_text(results.to_json(), encoding="utf-8")
        (folder / "gpu_targets.md").write_text(as_markdown(bench.rows, about, arguments.dry), encoding="utf-8")
        return results

    bench = Bench(device, arguments.dry, arguments.seconds, write)
    run(bench)
    about["clocks_after"] = clocks(device)
    results = write()
    print(f"written: {folder / 'gpu_targets.md'}", file=sys.stderr)
    return int(bool(results.faults))


if __name__ == "__main__":
    sys.exit(main())
