"""Measures contenders on the cases of the kernels: results are checked first, buffers rotate past the cache.

A case has a ceiling if a bare copy of as many bytes is among its contenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from shardweave.bench.baselines.token_kernels import Rival
from shardweave.bench.gpu.graph_timing import Call, Round, by_the_clock, in_graph
from shardweave.bench.gpu.kernel_cases import Case, Made
from shardweave.bench.gpu.token_cases import Shape, verified
from shardweave.bench.harness.interleaved import in_order
from shardweave.bench.harness.measure import Sink, why_absent

OURS, COPY = "ours", "copy"


class Measuring:
    """Measures cases on one device into a sink.

    Args:
        dry: no figure means anything: buffers need not leave the cache, and every failure of a contender that is
            installed is an error.
    """

    def __init__(self, sink: Sink, device: torch.device, rounds: int, dry: bool = False) -> None:
        self.sink, self.device, self.rounds, self.dry = sink, device, rounds, dry
        self.prepare: Callable[[Sequence[Call]], Round] = by_the_clock if dry else in_graph
        self.cache = 1 if dry else getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)

    def sets(self, moved: int) -> int:
        """The number of sets of buffers that take turns, so that a call finds nothing in the cache."""
        return rotation(moved, self.cache)

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
        present = {rival.name: rival.make for rival in rivals}
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
                detail={"bytes are": "read and written", "rotation": rotating, "threads": torch.get_num_threads()},
            )  # fmt: skip
        del prepared
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return times

    def boxes(self, case: Case) -> None:
        """A kernel on boxes, under the ceiling."""
        self.time(case.name, {OURS: case.make}, case.moved, self.sets(case.moved), copied=case.moved)

    def tokens(
        self, case: str, make: Callable[[], Made], shape: Shape, rivals: Sequence[Rival] = (), ceiling: bool = True
    ) -> None:
        """A kernel of token dispatch beside others, on request under the ceiling."""
        copied = shape.moved if ceiling else None
        self.time(case, {OURS: make}, shape.moved, self.sets(shape.moved), rivals, copied=copied)

    def latency(self, case: str, make: Callable[[], Made], sets: int) -> None:
        """A call that has no ceiling, beside a small copy, which only shows how fast the machine is."""
        self.time(case, {OURS: make}, None, sets, copied=1 << 18)

    def _bare_copy(self, moved: int) -> Callable[[], Made]:
        """`copy_` of half as many bytes as are read and written."""

        def make() -> Made:
            source, target = (torch.full((moved // 2,), n, dtype=torch.uint8, device=self.device) for n in (1, 2))
            return lambda: target.copy_(source), lambda: target.equal(source)

        return make


def rotation(moved: int, cache: int) -> int:
    """The number of sets of buffers that have to take turns so that none is still in the cache at its next turn."""
    return max(2, math.ceil(4 * cache / moved) + 1)
