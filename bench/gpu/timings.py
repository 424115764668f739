"""Times of redistributions and of token dispatch with combine on one GPU, by virtual ranks that share its memory.

`make gpu` runs it after the tests: `python -m shardweave.bench.gpu.timings --out FOLDER` prints a Markdown table, a row
when it is measured, and appends the same as JSON to `timings.jsonl`. A row is the work of all ranks, which wait for
nobody; its result is checked before it is timed. Beside it is a `copy_` of as many bytes as the ranks read and write.
With `--profile` the profiler shows which kernels the time goes to. With `--dry` every call runs without a GPU, on tiny
shapes, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.testing
from torch.profiler import ProfilerActivity, profile

from shardweave.runtime.moe.options import DispatchOptions

from ...errors import UnsupportedError
from ...kernels import QuantizationName
from ...moe import VirtualTokenDispatcher
from ...planner import plan
from ...runtime.executor.simulate import bind_in_process
from ...runtime.transports.in_process import InProcessTransport
from ..baselines.stock_dtensor import held
from ..harness.machine import provenance
from ..harness.markdown import figure, provenance_lines, table

LAYOUTS = (
    ((8,), "S0", "R"),
    ((8,), "S0", "S1"),
    ((8,), "P", "S0"),
    ((8,), "P", "R"),
    ((4, 4), "S0 S1", "S1 S0"),
)
SHAPES = {False: ((8192, 8192), (8191, 8193)), True: ((32, 32), (31, 33))}  # in a dry run: the second
RANKS, TOP_K = 8, 8
TOKENS = {False: ((4096, 7168, 256), (128, 7168, 256)), True: ((12, 128, 16), (3, 128, 16))}  # of each rank, H, E
TOLERANCE: dict[QuantizationName | None, float] = {
    None: 0.0,
    "fp8_128": 0.1,
}  # of the largest element: sums here are exact, elements in float8 are not
_ROWS = 15  # of a profile
Made = tuple[Callable[[], object], Callable[[], bool], int]
"""A call, whether its result is right, and the bytes that it has to read and write."""


def small_numbers(*shape: int, device: torch.device) -> torch.Tensor:
    """bfloat16, whole numbers whose sums are exact in any order."""
    return torch.randint(-8, 9, shape, dtype=torch.int8, device=device).bfloat16()


def redistribution(
    mesh: tuple[int, ...], source: str, target: str, shape: tuple[int, ...], device: torch.device
) -> Made:
    program = plan(mesh, shape, "bfloat16", source, target)
    whole = small_numbers(*shape, device=device)
    coordinates = [program.mesh.coordinate(rank) for rank in range(program.mesh.size)]
    shards = [whole[tuple(held(source, mesh, c, shape))].clone() for c in coordinates]
    run = bind_in_process(program, shards, InProcessTransport())
    terms = math.prod(n for n, token in zip(mesh, source.split(), strict=True) if token == "P")

    def right() -> bool:
        outputs = zip(coordinates, run(shards), strict=True)
        return all(out.equal(whole[tuple(held(target, mesh, c, shape))] * terms) for c, out in outputs)

    return partial(run, shards), right, sum(x.nbytes for x in (*shards, *run(shards)))


def dispatch(tokens: int, hidden: int, experts: int, quantize: QuantizationName | None, device: torch.device) -> Made:
    """Dispatch and combine, with experts that do nothing."""
    dispatcher = VirtualTokenDispatcher(
        RANKS,
        num_experts=experts,
        top_k=TOP_K,
        hidden=hidden,
        max_tokens=tokens,
        device=device,
        options=DispatchOptions(quantize=quantize),
    )
    xs = [small_numbers(tokens, hidden, device=device) for _ in range(RANKS)]
    ids = [torch.rand(tokens, experts, device=device).topk(TOP_K).indices for _ in range(RANKS)]
    weights = [2.0 ** -torch.randint(0, 3, (tokens, TOP_K), device=device).float() for _ in range(RANKS)]

    def call() -> list[torch.Tensor]:
        routed = dispatcher.dispatch(xs, ids, weights)
        return dispatcher.combine([r.x if r.scale is None else r.dequantized() for r in routed], routed)

    def right() -> bool:
        wanted = [(x.double() * w.double().sum(1, keepdim=True)).bfloat16() for x, w in zip(xs, weights, strict=True)]
        off = [float((y - want).abs().max() / want.abs().max()) for y, want in zip(call(), wanted, strict=True)]
        return all(share <= TOLERANCE[quantize] for share in off)

    return call, right, 2 * RANKS * (1 + TOP_K) * xs[0].nbytes


def cases(device: torch.device, dry: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    """The names of rows, and what makes their calls; nothing is allocated yet."""
    for shape in SHAPES[dry]:
        for mesh, source, target in LAYOUTS:
            name = f"{source} → {target}, {'×'.join(map(str, shape))} bf16, {math.prod(mesh)} ranks"
            yield name, partial(redistribution, mesh, source, target, shape, device)
    for sizes in TOKENS[dry]:
        for quantize in TOLERANCE:
            name = "dispatch + combine, T {}, H {}, E {}, ".format(*sizes) + f"K {TOP_K}, {quantize or 'bf16'}"
            yield f"{name}, {RANKS} ranks", partial(dispatch, *sizes, quantize, device)


def microseconds(call: Callable[[], object], nbytes: int, device: torch.device) -> dict[str, float]:
    """The medians of a call, of the call in a CUDA graph, and of a bare copy."""
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return {
        "call": 1e3 * triton.testing.do_bench(call, return_mode="median"),
        "in a CUDA graph": 1e3 * triton.testing.do_bench_cudagraph(call, return_mode="median"),
        "copy": 1e3 * triton.testing.do_bench(lambda: target.copy_(source), return_mode="median"),
    }


def measured(make: Callable[[], Made], device: torch.device, dry: bool) -> dict[str, Any]:
    """The figures of a row, or why there are none. "failed": not only because the device does not support it."""
    try:
        call, right, nbytes = make()
        if not right():
            return {"failed": True, "why": "the result is wrong"}
        return {"failed": False, "bytes": nbytes, **({} if dry else microseconds(call, nbytes, device))}
    except Exception as error:
        why = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        return {"failed": dry or not isinstance(error, UnsupportedError), "why": why}


def print_profiles(device: torch.device, dry: bool) -> None:
    calls, order = (1, "self_cpu_time_total") if dry else (10, "self_cuda_time_total")
    for name, make in cases(device, dry):
        call, _, _ = make()
        call()  # kernels are compiled
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(calls):
                call()
            if not dry:
                torch.cuda.synchronize()
        text = profiled.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=60)
        print(f"{name}, calls: {calls}\n\n```\n{text}\n```\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.timings", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="of timings.jsonl (default: here)")
    parser.add_argument("--profile", action="store_true", help="show the kernels of each call")
    parser.add_argument("--dry", action="store_true", help="no GPU: run every call on tiny shapes, time nothing")
    arguments = parser.parse_args(argv)
    if not arguments.dry and not torch.cuda.is_available():
        print("error: no GPU: torch.cuda.is_available() is False; allowed: --dry", file=sys.stderr)
        return 2
    device = torch.device("cpu") if arguments.dry else torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    if arguments.profile:
        print_profiles(device, arguments.dry)
        return 0
    about, failed = provenance(), False
    heads = ("call", "µs", "in a CUDA graph, µs", "copy of as many bytes, µs", "MiB read and written")
    print("\n".join([*provenance_lines(about), "", *table(heads, ())]))
    with (arguments.out / "timings.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(about) + "\n")
        for name, make in cases(device, arguments.dry):
            row = measured(make, device, arguments.dry)
            file.write(json.dumps({"case": name, **row}) + "\n")
            file.flush()  # a run that is killed keeps what it has measured
            times = [figure(row[side]) if side in row else "" for side in ("call", "in a CUDA graph", "copy")]
            shown = [row["why"], "", "", ""] if "why" in row else [*times, f"{row['bytes'] / 2**20:,.1f}"]
            print(*table((name, *shown), ())[:1], flush=True)
            failed |= row["failed"]
            if not arguments.dry:
                torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
