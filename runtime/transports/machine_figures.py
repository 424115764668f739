"""What a rank knows of its machine, for topologies: its device, its NICs, and what `calibrate` measured on its kind."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ...planner import MachineFigures
from .calibration_cache import machine_kind, read_calibration

_NETWORKS = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")
_ROUTES = Path("/proc/net/route")


def machine_figures(device: torch.device) -> MachineFigures:
    """The figures of this machine for tensors on a device. Reads small files; does not wait for the device."""
    return replace(_known_figures(device), measured=read_calibration(machine_kind(device)))


def _known_figures(device: torch.device) -> MachineFigures:
    if device.type == "cpu":
        return MachineFigures("cpu", "TCP", 1, _ethernet_bandwidth("GLOO_SOCKET_IFNAME"))
    name = device.type
    if device.type == "cuda":
        with suppress(RuntimeError):
            name = torch.cuda.get_device_name(device)
    rates = _rdma_bandwidths()
    if rates:
        return MachineFigures(name, "RDMA", len(rates), min(rates))
    return MachineFigures(name, "TCP", 1, _ethernet_bandwidth("NCCL_SOCKET_IFNAME"))


def to_text(figures: MachineFigures) -> str:
    """The figures as text for the store."""
    return json.dumps(asdict(figures))


def from_text(text: str) -> MachineFigures:
    """The inverse of `to_text`."""
    return MachineFigures(**json.loads(text))


def _rdma_bandwidths() -> list[float]:
    """The bandwidths of the active ports of RDMA NICs, in 1e9 bytes per second."""
    found = []
    for port in sorted(_RDMA.glob("*/ports/*")):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text():
                found.append(float((port / "rate").read_text().split()[0]) / 8)
    return [rate for rate in found if rate > 0]


def _ethernet_bandwidth(variable: str) -> float | None:
    """The bandwidth of the interface that an environment variable names, or that has the default route, in 1e9 bytes
    per second; None if the kernel does not know it, as for most virtual interfaces."""
    name = (os.environ.get(variable) or "").split(",")[0].lstrip("^=")
    if not (_NETWORKS / name / "speed").is_file() or not name:
        name = _default_interface() or ""
    with suppress(OSError, ValueError):
        megabits = int((_NETWORKS / name / "speed").read_text()) if name else -1
        return megabits / 8e3 if megabits > 0 else None
    return None


def _default_interface() -> str | None:
    with suppress(OSError):
        for line in _ROUTES.read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 1 and fields[1] == "00000000":
                return fields[0]
    return None
