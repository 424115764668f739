"""What the machine of the GPU offers, a line for each fact: `python -m shardweave.bench.gpu.environment`.

It fails where kernels could not be launched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import permutations

import torch
import torch.distributed as dist

from ...runtime.transports.choose_transport import why_no_memory
from ..harness.machine import machine

_QUERIED = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"


def why_no_launcher() -> str | None:
    """Why Triton could not build its launcher: it needs a C compiler that finds Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "neither gcc nor clang is in PATH, and CC is not set"
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", "-o", os.devnull]
    ran = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60)
    return f"{compiler} fails: {ran.stderr[-500:]}" if ran.returncode else None


def facts() -> Iterator[tuple[str, object]]:
    """What is worth knowing of GPUs and links."""
    device = torch.device("cuda", torch.cuda.current_device())
    yield "free memory, GiB", torch.cuda.mem_get_info()[0] / 2**30
    yield "NCCL", torch.cuda.nccl.version() if dist.is_nccl_available() else "none"  # type: ignore[attr-defined]
    yield "symmetric memory", why_no_memory(device, "symmetric_memory") or "supported"
    for number in range(torch.cuda.device_count()):
        yield f"GPU {number}", torch.cuda.get_device_properties(number)
    for pair in permutations(range(torch.cuda.device_count()), 2):
        yield f"GPUs {pair}: peer access", torch.cuda.can_device_access_peer(*pair)
    for command in (["--format=csv", f"--query-gpu={_QUERIED}"], ["topo", "-m"]):
        if shutil.which("nvidia-smi"):
            ran = subprocess.run(["nvidia-smi", *command], capture_output=True, text=True, timeout=20)
            yield " ".join(command), f"\n\n```\n{ran.stdout}```\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.environment", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="no GPU")
    dry, wrong = parser.parse_args(argv).dry, why_no_launcher()
    print(f"- C compiler: {wrong or 'builds what Triton needs'}", flush=True)
    for fact, value in (*machine().items(), *(() if dry else facts())):
        print(f"- {fact}: {value}", flush=True)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
