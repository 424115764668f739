"""Where figures come from: the command, the time, the machine, GPUs or none; and which machines are of one kind."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

_CACHES = Path("/sys/devices/system/cpu")
_GUESSED_CACHE = 64 << 20  # where the system does not say


def provenance() -> dict[str, Any]:
    """What results begin with: this process's command, the time (UTC) and the machine; of JSON's types.

    It starts CUDA where there are GPUs, so ranks are forked before.
    """
    return {"command": command_line(), "date": now(), "machine": machine()}


def command_line() -> str:
    """As this process was started: `python -m shardweave demo --ranks 4`."""
    words = sys.orig_argv[1:]
    if words and words[0].startswith("-"):
        return shlex.join(["python", *words])
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """CPU, memory, GPUs, system and versions; of JSON's types."""
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "last_level_cache_mib": last_level_cache() / 2**20,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        **commit(),
    }


def kind(about: Mapping[str, Any]) -> str:
    """A folder's name, for machines whose figures may be compared: `nvidia-h200`, `amd-epyc-2-cores`."""
    gpus = about["gpus"]
    if gpus:
        return slug(gpus[0]) + (f"-x{len(gpus)}" if len(gpus) > 1 else "")
    return slug(f"{about['cpu']} {about['cores']} cores")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found and found[0] else platform.processor() or platform.machine()


def available_memory(meminfo: Path = Path("/proc/meminfo"), limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes may still take without swapping: of the machine, or of the container, if that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups v2 and v1; "max" where there is none
        with suppress(OSError, ValueError):
            found.append(int((limits / name).read_text(encoding="ascii")))
    return min(found)


def last_level_cache(cpus: Path = _CACHES) -> int:
    """Bytes of all caches of the last level together: buffers that take turns have to be more than these."""
    levels: dict[int, dict[str, int]] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, shared = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "size", "shared_cpu_list")
            )
            scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1])
            levels.setdefault(int(level), {})[shared] = int(size[:-1]) * scale if scale else int(size)
        except (OSError, ValueError):
            continue
    return sum(levels[max(levels)].values()) if levels else _GUESSED_CACHE


def commit() -> dict[str, str]:
    """Of the clone that this is a part of; "unknown" where it is installed."""
    root = str(Path(__file__).resolve().parents[2])
    # What a command measures goes to the folder of results, and does not change what the next one measures.
    changes = output_of("git", "-C", root, "status", "--porcelain", "-uno", "--", ".", ":!bench/results")
    return {
        "commit": output_of("git", "-C", root, "rev-parse", "HEAD"),
        "uncommitted_changes": changes or "none",
    }


def output_of(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if ran.returncode:
        return "unknown"
    return next(iter(ran.stdout.splitlines()), "")


def slug(name: str) -> str:
    """A folder's name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
