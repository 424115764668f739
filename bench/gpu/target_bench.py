"""A run of measurements against targets on one device, bounded in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from shardweave.bench.gpu.graph_timing import GraphTimer, HostTimer, Times
from shardweave.bench.gpu.kernel_cases import Case, rotation
from shardweave.bench.gpu.target_rows import COPY, Row, shown


class Bench:
    """All measurements of one run on one device, in the order of the report."""

    def __init__(
        self, device: torch.device, dry: bool, seconds: float, on_row: Callable[[], object] = lambda: None
    ) -> None:
        self.device, self.dry, self.on_row = device, dry, on_row
        self.timer: GraphTimer | HostTimer = HostTimer() if dry else GraphTimer()
        self.cache = 1 if dry else int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
        self.until = time.monotonic() + seconds
        self._ceilings: dict[int, Times] = {}
        self.rows: list[Row] = []

    def left(self) -> float:
        """Seconds until no case begins."""
        return self.until - time.monotonic()

    def measure(self, row: Row, how: Callable[[Row], None]) -> None:
        """Fill in a row and report it by `on_row`; an error becomes its note and does not end the run."""
        self.rows.append(row)
        if self.left() < 0:
            row.note = "not measured: no time was left"
            self.on_row()
            return
        try:
            how(row)
        except Exception as error:
            row.value, row.note = None, f"not measured: {type(error).__name__}: {error}".splitlines()[0]
        if not self.dry:
            torch.cuda.empty_cache()
        print(f"{row.name}: {shown(row, self.dry)}", file=sys.stderr, flush=True)
        self.on_row()

    def kernel(self, case: Case, row: Row) -> None:
        """The share of the ceiling that a kernel reaches."""
        made = [case.make() for _ in range(rotation(case.moved, self.cache))]
        for call, right in made:
            call()
            if not right():
                raise AssertionError("the result is wrong")
        times = self.timer.time([call for call, _ in made])
        del made
        ceiling = self.ceiling(case.moved)
        row.rounds, row.moved = {"ours": times, COPY: ceiling}, case.moved
        row.value = ceiling.seconds / times.seconds
        row.detail = {
            "moved_bytes": case.moved,
            "gigabytes_per_s": case.moved / times.seconds / 1e9,
            "ceiling_gigabytes_per_s": case.moved / ceiling.seconds / 1e9,
            "microseconds": times.seconds * 1e6,
            "spread": times.spread,
        }

    def ceiling(self, moved: int) -> Times:
        """`copy_` of half as many bytes as are read and written."""
        if moved not in self._ceilings:
            made = []
            for _ in range(rotation(moved, self.cache)):
                source, target = (torch.zeros(moved // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
                made.append(lambda source=source, target=target: target.copy_(source))
            self._ceilings[moved] = self.timer.time(made)
        return self._ceilings[moved]
