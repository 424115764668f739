"""What the machine of the GPU offers, a line for each fact: `python -m shardweave.bench.gpu.environment`.

It fails where kernels could not be launched.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from shardweave.bench.harness.machine import machine, output_of
from shardweave.runtime.transports.choose_transport import why_no_memory

_QUERIED = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")
# Numbers of cuda.h.
_ATTRIBUTES = {"atomics on host memory": 86, "file descriptors": 103, "fabric handles": 128, "multicast": 132}
_OF_PAIRS = {"performance rank": 1, "access": 2, "atomics": 3}


def why_no_launcher() -> str | None:
    """Why Triton could not build its launcher: it needs a C compiler that finds Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "neither gcc nor clang is in PATH, and CC is not set"
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", "-o", os.devnull]
    ran = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60)
    return f"{compiler} fails: {ran.stderr[-500:]}" if ran.returncode else None


def facts() -> Iterator[tuple[str, object]]:
    """What is worth knowing of GPUs and links; attributes as numbers."""
    device, cuda = torch.device("cuda", torch.cuda.current_device()), ctypes.CDLL("libcuda.so.1")
    yield from described(device).items()
    yield from machine().items()
    yield "free memory, GiB", torch.cuda.mem_get_info()[0] / 2**30
    yield "NCCL", torch.cuda.nccl.version() if dist.is_nccl_available() else "none"  # type: ignore[attr-defined]
    yield "symmetric memory", why_no_memory(device, "symmetric_memory") or "supported"

    def asked(function: Any, number: int, *gpus: int) -> object:
        value = ctypes.c_int()
        failed = function(ctypes.byref(value), number, *gpus)
        return f"unknown: error {failed}" if failed else value.value

    for i in range(torch.cuda.device_count()):
        yield f"GPU {i}: compute capability", torch.cuda.get_device_capability(i)
        yield from ((f"GPU {i}: {name}", asked(cuda.cuDeviceGetAttribute, n, i)) for name, n in _ATTRIBUTES.items())
    for pair in permutations(range(torch.cuda.device_count()), 2):
        yield from ((f"GPUs {pair}: {x}", asked(cuda.cuDeviceGetP2PAttribute, n, *pair)) for x, n in _OF_PAIRS.items())
    if shutil.which("nvidia-smi"):
        yield "links", subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout


def described(device: torch.device) -> dict[str, Any]:
    """The name, multiprocessors, memory, L2 cache, driver, clocks and power limit of a GPU."""
    if device.type != "cuda":
        return {"device": "CPU, a dry run without figures"}
    properties = torch.cuda.get_device_properties(device)
    # By its UUID: nvidia-smi numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES leaves.
    query = ["-i", f"GPU-{properties.uuid}", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory, GiB": round(properties.total_memory / 2**30, 1),
        "L2 cache, MiB": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        **dict(zip(_QUERIED, output_of("nvidia-smi", *query).split(", "), strict=False)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.environment", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="no GPU")
    dry, wrong = parser.parse_args(argv).dry, why_no_launcher()
    print(f"- C compiler: {wrong or 'builds what Triton needs'}", flush=True)
    for fact, value in machine().items() if dry else facts():
        print(f"- {fact}: {value}", flush=True)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
