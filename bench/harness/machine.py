"""Where figures come from: the command, the time, the machine, GPUs or none."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

_DEFAULT_CACHE = 64 << 20  # if the system does not say


def provenance() -> dict[str, Any]:
    """What results begin with, of JSON's types: this process's command, the time (UTC) and the machine. It starts CUDA
    if there are GPUs, so ranks are forked before."""
    return {"command": command_line(), "date": now(), "machine": machine()}


def command_line() -> str:
    """As this process was started: `python -m shardweave demo --ranks 4`."""
    words = sys.orig_argv[1:]
    is_module = bool(words) and words[0].startswith("-")
    return shlex.join(["python", *words] if is_module else [Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """CPU, memory, GPUs, system, versions and commit; of JSON's types."""
    root = Path(__file__).resolve().parents[2]
    # Results that one command writes are no change for the next.
    changes = output_of("git", "-C", root, "status", "--porcelain", "-uno", "--", ".", ":!bench/results")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(_memory() / 2**30, 1),
        "last_level_cache_mib": last_level_cache() / 2**20,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": output_of("git", "-C", root, "rev-parse", "HEAD"),
        "uncommitted_changes": changes or "none",
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    with suppress(OSError):
        if model := re.search(r"^model name\s*:[^\S\n]*(\S.*)$", cpuinfo.read_text(encoding="utf-8"), re.M):
            return model[1]
    return platform.processor() or platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(meminfo: Path = Path("/proc/meminfo"), limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes may still take without swapping: of the machine, or of the container, if that is less."""
    least = _memory()
    # KiB of the machine; bytes of cgroups v2 and v1, whose files have "max" if there is no limit.
    for path, pattern, unit in (
        (meminfo, r"^MemAvailable:\s*(\d+)", 1 << 10),
        (limits / "memory.max", r"(\d+)", 1),
        (limits / "memory/memory.limit_in_bytes", r"(\d+)", 1),
    ):
        with suppress(OSError):
            if match := re.search(pattern, path.read_text(encoding="ascii"), re.M):
                least = min(least, int(match[1]) * unit)
    return least


def last_level_cache(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all caches of the last level together: buffers that take turns have to be more than these."""
    caches: dict[tuple[int, str], int] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        with suppress(OSError, ValueError):
            level, shared, size = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "shared_cpu_list", "size")
            )
            caches[int(level), shared] = int(size.removesuffix("K")) << 10  # always KiB
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last) or _DEFAULT_CACHE


def output_of(*command: str | Path) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return next(iter(done.stdout.splitlines()), "")
