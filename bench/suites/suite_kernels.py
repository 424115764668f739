"""The kernels, beside a bare copy of as many bytes, the torch references, and kernels of other libraries.

On a GPU calls are timed in CUDA graphs, over buffers that rotate past the L2 cache. Without a GPU the torch references
are timed, which CPU tensors use, and every row says so. Results are checked before they are timed. Bytes are those read
and written; the ceiling is `copy_` of as many, in turns with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardweave.bench.baselines.token_kernels import combining, permuting, routing_and_permuting
from shardweave.bench.gpu.kernel_cases import MIB, Case
from shardweave.bench.gpu.kernel_cases import cases as cases_of_boxes
from shardweave.bench.gpu.measuring import COPY, KERNEL, REFERENCE, Measuring
from shardweave.bench.gpu.token_cases import DRY_FEW, DRY_LARGE, FEW, FEW_SETS, LARGE, Shape, VirtualRank
from shardweave.bench.harness.measure import Sink

SUITE = "kernels"
ROUNDS = {"full": 15, "quick": 9, "dry": 1}
_LEAST_SECONDS = {"full": 0.02, "quick": 0.01, "dry": 0.0}  # of a round, on a CPU
_COMPILED = "torch.compile"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def box_cases(scale: str, device: torch.device) -> list[Case]:
    if scale == "dry":
        return cases_of_boxes(device, 1 << 13, 64)
    if has_gpu():
        return cases_of_boxes(device)
    return cases_of_boxes(device, 64 * MIB, 2048) if scale == "full" else cases_of_boxes(device, 16 * MIB, 1024)


def token_shapes(scale: str) -> tuple[Shape, Shape]:
    """Of training and of decoding."""
    if scale == "dry":
        return DRY_LARGE, DRY_FEW
    if has_gpu():
        return LARGE, FEW
    return Shape(1024 if scale == "full" else 256, 1024, 8, 64, 8), Shape(16, 1024, 8, 64, 8)


def token_cases(scale: str) -> dict[str, tuple[str, ...]]:
    """The contenders beside ours."""
    large, few = token_shapes(scale)
    return {
        f"push_rows, {large}": ("index_select", "torchtitan", _COMPILED, COPY),
        f"combine_rows, {large}": ("index_select + sum", "index_add", "torchtitan", _COMPILED, COPY),
        f"route + push, {large}": ("argsort + index_select", "torchao", "torchtitan", _COMPILED, COPY),
        f"count_pairs, {large}": (COPY,),
        f"decode: route + push + combine, {few}": (COPY,),
    }


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    ours = KERNEL if has_gpu() else REFERENCE
    boxes = (KERNEL, "torch", COPY) if has_gpu() else (REFERENCE, COPY)
    of_boxes = {case.name: boxes for case in box_cases(scale, torch.device("cpu"))}
    return of_boxes | {name: (ours, *others) for name, others in token_cases(scale).items()}


def test_kernels(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    torch.set_num_threads(1)  # as ranks on CPUs have, which share the cores
    dry = scale == "dry"
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")
    measuring = Measuring(sink, device, has_gpu(), ROUNDS[scale], _LEAST_SECONDS[scale], dry)
    for case in box_cases(scale, device):
        if case.name in names:
            measuring.boxes(case, beside_reference=True)
    push, combine, both, route, decode = token_cases(scale)
    if not {push, combine, both, route, decode} & set(names):
        return
    large, few = token_shapes(scale)
    rank = VirtualRank(large, device)
    if push in names:
        measuring.tokens(push, lambda: rank.push(False), large, permuting(rank, dry))
    if combine in names:
        measuring.tokens(combine, rank.combine, large, combining(rank, dry))
    if both in names:
        measuring.tokens(both, lambda: rank.push(True), large, routing_and_permuting(rank, dry))
    if route in names:
        measuring.latency(route, rank.routed, FEW_SETS)
    if decode in names:
        measuring.latency(decode, VirtualRank(few, device).both, measuring.sets(2 * few.moved, 2 * few.buffers))
