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

_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")
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
    yield from gpu_machine(device).items()
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


def gpu_machine(device: torch.device) -> dict[str, Any]:
    """`machine()` with the name, multiprocessors, memory, L2 cache, driver and clocks of the device."""
    about: dict[str, Any] = {"device": "CPU, a dry run without figures"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about = {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        }
    return {**about, "driver": nvidia_smi(device, "driver_version")[0], "clocks": clocks(device), **machine()}


def clocks(device: torch.device) -> dict[str, str]:
    """The current and maximum clocks, and the power limit."""
    return dict(zip(_CLOCKS, nvidia_smi(device, *_CLOCKS), strict=False))


def nvidia_smi(device: torch.device, *names: str) -> list[str]:
    # By its UUID: nvidia-smi numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES leaves.
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else None
    at = [] if uuid is None else ["-i", f"GPU-{uuid}"]
    output = output_of("nvidia-smi", *at, f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    return [value.strip() for value in output.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.gpu.environment", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="no GPU")
    dry, wrong = parser.parse_args(argv).dry, why_no_launcher()
    print(f"- C compiler: {wrong or 'builds what Triton needs'}", flush=True)
    for fact, value in gpu_machine(torch.device("cpu")).items() if dry else facts():
        print(f"- {fact}: {value}", flush=True)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
