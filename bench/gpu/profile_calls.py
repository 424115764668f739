"""`python -m shardweave.bench.gpu.profile_calls`: which kernels the time of a GPU goes to, by torch's profiler: in a
redistribution by virtual ranks, and in a dispatch with its combine by one of several.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from shardweave.bench.gpu.program_cases import virtual_program
from shardweave.bench.gpu.token_cases import DRY_FEW, DRY_LARGE, FEW, LARGE, VirtualRank

CALLS = 10
_ROWS = 15


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.profile_calls", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="no GPU: tiny shapes")
    dry = parser.parse_args(argv).dry
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    side, shapes = (32, (DRY_LARGE, DRY_FEW)) if dry else (24576, (LARGE, FEW))
    calls: dict[str, Callable[[], object]] = {
        f"S0 S1 → S1 S0, 4×4 virtual ranks, {side}² bf16": virtual_program(device, side)[0]
    }
    calls |= {f"route + push + combine, {shape}": VirtualRank(shape, device).both()[0] for shape in shapes}
    for name, call in calls.items():
        call()  # kernels are compiled
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(CALLS):
                call()
            if not dry:
                torch.cuda.synchronize()
        print(f"{name}: {CALLS} calls")
        order = "self_cpu_time_total" if dry else "self_cuda_time_total"
        print(profiled.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=60))


if __name__ == "__main__":
    main()
