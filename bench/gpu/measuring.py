"""Measures contenders on the cases of the kernels: results are checked first, buffers rotate past the cache.

The suite of kernels and the targets of `make gpu` both measure by it. A case has a ceiling if a bare copy of as many
bytes is among its contenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from shardweave.bench.baselines.token_kernels import Rival
from shardweave.bench.gpu.graph_timing import Call, Round, by_the_clock, in_graph
from shardweave.bench.gpu.kernel_cases import Case, Made
from shardweave.bench.gpu.token_cases import Shape, verified
from shardweave.bench.harness.interleaved import in_order
from shardweave.bench.harness.machine import available_memory, last_level_cache
from shardweave.bench.harness.measure import Sink, why_absent

KERNEL, REFERENCE, COPY = "ours", "ours, torch reference", "copy"
NO_GPU = "no GPU is here: the torch reference that CPU tensors use, not a kernel"


class Measuring:
    """Measures cases on one device into a sink.

    Args:
        kernels: measure the kernels. Without: the torch references, which CPU tensors use.
        least_seconds: of a round on a CPU.
        dry: no figure means anything: buffers need not leave the cache, and every failure of a contender that is
            installed is an error.
    """

    def __init__(
        self,
        sink: Sink,
        device: torch.device,
        kernels: bool,
        rounds: int,
        least_seconds: float = 0.0,
        dry: bool = False,
    ) -> None:
        self.sink, self.device, self.dry = sink, device, dry
        self.kernels, self.ours = kernels, KERNEL if kernels else REFERENCE
        self.rounds = rounds
        self.prepare: Callable[[Sequence[Call]], Round] = partial(by_the_clock, least_seconds=least_seconds)
        cache = last_level_cache()
        if device.type == "cuda":
            self.prepare = in_graph
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        self.cache = 1 if dry else cache

    def sets(self, moved: int, held: int) -> int:
        """The number of sets of buffers that take turns, so that a call finds nothing in the cache. On a CPU they take
        at most a quarter of the free memory, `held` bytes a set."""
        if self.device.type == "cuda":
            return rotation(moved, self.cache)
        return max(2, min(math.ceil(1.5 * self.cache / moved) + 1, available_memory() // (4 * held)))

    def time(
        self,
        case: str,
        sides: Mapping[str, Callable[[], Made]],
        moved: int | None,
        sets: int,
        rivals: Sequence[Rival] = (),
        copied: int | None = None,
    ) -> dict[str, list[float]]:
        """Time the contenders of a case in turns, put their rows into the sink, and return the seconds of each round.

        A wrong result is a fault; a rival that is not installed, or fails, is absent.

        Args:
            moved: bytes that a call reads and writes. None: they are not what takes the time.
            sets: of buffers that take turns.
            copied: bytes that a bare copy beside them reads and writes; as many as `moved`: it is the ceiling.
        """
        self.sink.begin(case)
        present = self._present(case, rivals)
        contenders = {**sides, **present, **({COPY: self._bare_copy(copied)} if copied else {})}
        prepared: dict[str, Round] = {}
        for contender, make in contenders.items():
            try:
                prepared[contender] = self.prepare(verified([make() for _ in range(sets)]))
            except AssertionError as error:
                self.sink.fault(case, contender, str(error))
            except Exception as error:
                if contender not in present or (self.dry and not isinstance(error, ImportError)):
                    raise
                self.sink.absent(case, contender, why_absent(contender, error))
        times: dict[str, list[float]] = {side: [] for side in prepared}
        for number in range(self.rounds if prepared else 0):
            for side in in_order(prepared, number):
                times[side].append(prepared[side]())
        rotating: dict[str, Any] = {"sets": sets, "set_bytes": moved, "cache_bytes": self.cache}
        if moved and sets > 1:
            rotating["cold"] = (sets - 1) * moved > self.cache
        for contender, rounds in times.items():
            self.sink.row(
                case, contender, "µs", [t * 1e6 for t in rounds],
                bytes=moved,
                bound_bytes=moved,
                share_of_ceiling=median(times[COPY]) / median(rounds) if moved and copied == moved else None,
                note=NO_GPU if contender == REFERENCE else "",
                detail={"bytes are": "read and written", "rotation": rotating, "threads": torch.get_num_threads()},
            )  # fmt: skip
        del prepared
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return times

    def _present(self, case: str, rivals: Sequence[Rival]) -> dict[str, Callable[[], Made]]:
        """The rivals that can run here; why the others cannot goes into the sink."""
        present = {}
        for rival in rivals:
            if rival.needs_gpu and not self.kernels:
                self.sink.absent(case, rival.name, "its kernels run on GPUs alone, and none is here")
            else:
                present[rival.name] = rival.make
        return present

    def boxes(self, case: Case, beside_reference: bool) -> None:
        """A kernel on boxes, or the torch reference of it, under the ceiling; on request one beside the other."""
        sides = {self.ours: case.make if self.kernels else case.make_reference}
        if beside_reference and self.kernels:
            sides["torch"] = case.make_reference
        sets = self.sets(case.moved, (len(sides) + 1) * case.moved)
        self.time(case.name, sides, case.moved, sets, copied=case.moved)

    def tokens(
        self, case: str, make: Callable[[], Made], shape: Shape, rivals: Sequence[Rival] = (), ceiling: bool = True
    ) -> None:
        """A kernel of token dispatch beside others, on request under the ceiling."""
        sets = self.sets(shape.moved, shape.buffers + (len(rivals) + 2) * shape.moved)
        self.time(case, {self.ours: make}, shape.moved, sets, rivals, copied=shape.moved if ceiling else None)

    def latency(self, case: str, make: Callable[[], Made], sets: int) -> None:
        """A call that has no ceiling, beside a small copy, which only shows how fast the machine is."""
        self.time(case, {self.ours: make}, None, sets, copied=1 << 18)

    def _bare_copy(self, moved: int) -> Callable[[], Made]:
        """`copy_` of half as many bytes as are read and written."""

        def make() -> Made:
            source, target = (torch.full((moved // 2,), n, dtype=torch.uint8, device=self.device) for n in (1, 2))
            return lambda: target.copy_(source), lambda: target.equal(source)

        return make


def rotation(moved: int, cache: int) -> int:
    """The number of sets of buffers that have to take turns so that none is still in the cache at its next turn."""
    return max(2, math.ceil(4 * cache / moved) + 1)
