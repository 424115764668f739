"""The GPU that results were measured on."""

from __future__ import annotations

from typing import Any

import torch

from ..harness.machine import machine, output_of

_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")


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
    at = ["-i", str(device.index)] if device.index is not None else []
    about["driver"] = output_of("nvidia-smi", *at, "--query-gpu=driver_version", "--format=csv,noheader")
    return {**about, "clocks": clocks(device), **machine()}


def clocks(device: torch.device) -> dict[str, str]:
    """The current and maximum clocks, and the power limit."""
    at = ["-i", str(device.index)] if device.index is not None else []
    output = output_of("nvidia-smi", *at, f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader")
    return dict(zip(_CLOCKS, map(str.strip, output.split(",")), strict=False))
