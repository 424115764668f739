"""The kernels, beside a bare copy of as many bytes, the torch references, and other libraries' ways.

On a GPU in CUDA graphs, over buffers that rotate past the L2 cache. Without one there is no kernel to time: what is
timed then is the torch references, which CPU tensors use, and every row says so. Results are checked before they are
timed. Bytes are those read and written; the ceiling is `copy_` of as many, in turns with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardweave.bench.baselines.libraries import why_absent
from shardweave.bench.baselines.token_kernels import Rival, combining, permuting, routing_and_permuting
from shardweave.bench.gpu.graph_timing import GraphTimer, HostTimer
from shardweave.bench.gpu.kernel_cases import MIB, Case, Made, cases_of, rotation
from shardweave.bench.gpu.token_cases import FEW_SETS, Shape, VirtualRank, verified
from shardweave.bench.harness.machine import available_memory, last_level_cache
from shardweave.bench.harness.measure import Sink

SUITE = "kernels"
KERNEL, REFERENCE, COPY = "ours", "ours, torch reference", "copy"
NO_GPU = "no GPU is here: the torch reference that CPU tensors use, not a kernel"
ROUNDS = {"full": 15, "quick": 9, "dry": 1}
_LEAST_SECONDS = {"full": 0.02, "quick": 0.01, "dry": 0.0}  # of a round, on a CPU
_COMPILED = "torch.compile"
_LITTLE = 1 << 18  # bytes, of a copy beside what has no ceiling


def has_gpu() -> bool:
    return torch.cuda.is_available()


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def box_cases(scale: str, device: torch.device) -> list[Case]:
    if scale == "dry":
        payload, side = 1 << 13, 64
    elif has_gpu():
        payload, side = 256 * MIB, 4096
    else:
        payload, side = (64 * MIB, 2048) if scale == "full" else (16 * MIB, 1024)
    return cases_of(device, payload, side)


def token_shape(scale: str) -> Shape:
    if scale == "dry":
        return Shape(8, 64, 2, 8, 4)
    if has_gpu():
        return Shape(4096, 7168, 8, 256, 8)
    return Shape(1024, 1024, 8, 64, 8) if scale == "full" else Shape(256, 1024, 8, 64, 8)


def few_tokens(scale: str) -> Shape:
    if scale == "dry":
        return Shape(3, 64, 2, 8, 4)
    return Shape(128, 7168, 8, 256, 8) if has_gpu() else Shape(16, 1024, 8, 64, 8)


def token_cases(scale: str) -> dict[str, tuple[str, ...]]:
    """The contenders beside ours, and whether there is a ceiling."""
    large, few = token_shape(scale), few_tokens(scale)
    return {
        f"push_rows, {large}": ("index_select", "torchtitan", _COMPILED, COPY),
        f"combine_rows, {large}": ("index_select + sum", "index_add", "torchtitan", _COMPILED, COPY),
        f"route + push, {large}": ("argsort + index_select", "torchao", "torchtitan", _COMPILED, COPY),
        f"route_tokens, {large}": (COPY,),
        f"decode: route + push + combine, {few}": (COPY,),
    }


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    ours = KERNEL if has_gpu() else REFERENCE
    boxes = (KERNEL, "torch", COPY) if has_gpu() else (REFERENCE, COPY)
    found = {plain_name(case): boxes for case in box_cases(scale, torch.device("cpu"))}
    return found | {name: (ours, *others) for name, others in token_cases(scale).items()}


def plain_name(case: Case) -> str:
    return case.name.removesuffix(" (no target)")


def test_kernels(record: Callable[[], None]) -> None:
    record()


class _Measuring:
    def __init__(self, scale: str, sink: Sink) -> None:
        self.scale, self.sink = scale, sink
        self.timer: GraphTimer | HostTimer = HostTimer(ROUNDS[scale], _LEAST_SECONDS[scale])
        self.cache = 1 if scale == "dry" else last_level_cache()
        torch.set_num_threads(1)  # as ranks on CPUs have, which share the cores
        if has_gpu() and scale != "dry":
            self.timer = GraphTimer(ROUNDS[scale])
            self.cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def time(
        self, case: str, sides: dict[str, Callable[[], Made]], moved: int | None, sets: int, detail: dict[str, Any]
    ) -> None:
        """All sides of a case in turns; with a ceiling where `moved` bytes are read and written."""
        self.sink.begin(case)
        calls: dict[str, Sequence[Callable[[], object]]] = {}
        for contender, make in sides.items():
            try:
                calls[contender] = verified([make() for _ in range(sets)])
            except AssertionError as error:
                self.sink.fault(case, contender, str(error))
            except Exception as error:
                if contender in (KERNEL, REFERENCE, COPY, "torch"):
                    raise
                self.sink.absent(case, contender, why_absent(contender, error))
        times = self.timer.time_in_turns(calls)
        ceiling = times[COPY].seconds if moved is not None else None
        rotating = {"sets": sets, "set_bytes": moved, "cache_bytes": self.cache}
        cold = {"cold": (sets - 1) * moved > self.cache} if moved else {}
        for contender, found in times.items():
            self.sink.row(
                case, contender, "µs", [t * 1e6 for t in found.rounds],
                bytes=moved,
                bound_bytes=moved,
                share_of_ceiling=None if ceiling is None else ceiling / found.seconds,
                note=NO_GPU if contender == REFERENCE else "",
                detail={**detail, "bytes are": "read and written", "rotation": rotating | cold,
                        "threads": torch.get_num_threads()},
            )  # fmt: skip
        del calls
        if has_gpu():
            torch.cuda.empty_cache()

    def sets(self, moved: int, held: int) -> int:
        """How many sets of buffers, so that what a call touches is in no cache when its turn comes again; on a CPU no
        more than a quarter of the memory that is free has room for, `held` bytes a set."""
        if has_gpu():
            return rotation(moved, self.cache)
        return max(2, min(math.ceil(1.5 * self.cache / moved) + 1, available_memory() // (4 * held)))

    def boxes(self, case: Case) -> None:
        assert case.make_reference is not None
        sides: dict[str, Callable[[], Made]] = {KERNEL: case.make, "torch": case.make_reference}
        if not has_gpu():
            sides = {REFERENCE: case.make_reference}
        sides[COPY] = _bare_copy(case.moved)
        sets = self.sets(case.moved, len(sides) * case.moved)
        self.time(plain_name(case), sides, case.moved, sets, {})

    def beside(self, case: str, ours: Callable[[], Made], rivals: Sequence[Rival], shape: Shape) -> None:
        sides: dict[str, Callable[[], Made]] = {KERNEL if has_gpu() else REFERENCE: ours}
        for rival in rivals:
            if rival.needs_gpu and not has_gpu():
                self.sink.absent(case, rival.name, "its kernels run on GPUs alone, and none is here")
            else:
                sides[rival.name] = rival.make
        sides[COPY] = _bare_copy(shape.moved)
        sets = self.sets(shape.moved, shape.buffers + len(sides) * shape.moved)
        self.time(case, sides, shape.moved, sets, {})

    def latency(self, case: str, make: Callable[[], Made], sets: int) -> None:
        """No ceiling: the copy beside it only says how fast the machine is."""
        self.time(case, {KERNEL if has_gpu() else REFERENCE: make, COPY: _bare_copy(_LITTLE)}, None, sets, {})


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    measuring = _Measuring(scale, sink)
    device = here()
    for case in box_cases(scale, device):
        if plain_name(case) in names:
            measuring.boxes(case)
    push, combine, both, route, decode = token_cases(scale)
    if not {push, combine, both, route, decode} & set(names):
        return
    large, few = token_shape(scale), few_tokens(scale)
    rank = VirtualRank(large, device)
    if push in names:
        measuring.beside(push, lambda: rank.push(False), permuting(rank, scale == "dry"), large)
    if combine in names:
        measuring.beside(combine, rank.combine, combining(rank, scale == "dry"), large)
    if both in names:
        measuring.beside(both, lambda: rank.push(True), routing_and_permuting(rank, scale == "dry"), large)
    if route in names:
        measuring.latency(route, rank.routed, FEW_SETS)
    if decode in names:
        measuring.latency(decode, VirtualRank(few, device).both, measuring.sets(2 * few.moved, 2 * few.buffers))


def _bare_copy(moved: int) -> Callable[[], Made]:
    """`copy_` of half as many bytes as are read and written."""

    def make() -> Made:
        device = here()
        source, target = (torch.full((moved // 2,), n, dtype=torch.uint8, device=device) for n in (1, 2))
        return lambda: target.copy_(source), lambda: target.equal(source)

    return make
