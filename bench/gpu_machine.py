"""What a result file says of the machine and the code that it comes from."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")


def machine(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": "CPU, a dry run without figures"}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about = {
            "device": found.name,
            "sms": found.multi_processor_count,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "l2_mib": round(getattr(found, "L2_cache_size", 0) / 2**20, 1),
            "gpus": torch.cuda.device_count(),
        }
    at = ["-i", str(device.index)] if device.index is not None else []
    clocks = _said("nvidia-smi", *at, f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader")
    about["driver"] = _said("nvidia-smi", *at, "--query-gpu=driver_version", "--format=csv,noheader")
    about["clocks"] = dict(zip(_CLOCKS, map(str.strip, clocks.split(",")), strict=False))
    about["torch"], about["triton"], about["python"] = torch.__version__, triton.__version__, platform.python_version()
    about["cuda"] = torch.version.cuda
    root = str(Path(__file__).resolve().parents[1])
    about["commit"] = _said("git", "-C", root, "rev-parse", "HEAD")
    about["uncommitted_changes"] = _said("git", "-C", root, "status", "--porcelain", "-uno") or "none"
    return about


def _said(*command: str) -> str:
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
