"""What a rank knows of its machine, for topologies: its device, its NICs, and what `calibrate` measured on its kind."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from ...errors import ArgumentError, shown
from ...planner import MachineFigures
from .calibration_cache import machine_kind, read_calibration

_NETWORKS = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")
_ROUTES = Path("/proc/net/route")
_FASTEST = 1e5
"""1e9 bytes per second that no NIC has: larger rates stand for rates that are not known."""


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
    """The inverse of `to_text`.

    Raises:
        ArgumentError: the text is something else.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError covers numbers of over 4,300 digits
        raise ArgumentError(f"figures: not valid JSON: {error}") from None
    names = {field.name for field in fields(MachineFigures)}
    if not isinstance(values, dict) or set(values) != names:
        raise ArgumentError(f"figures: {shown(values)}; allowed: an object of {', '.join(sorted(names))}")
    for name, allowed in (("device", str), ("network", str), ("measured", dict | None)):
        if not isinstance(values[name], allowed):
            raise ArgumentError(f"figures: {name} {shown(values[name])}; allowed: {allowed}")
    figures = MachineFigures(**values)
    figures.topology()  # checks the numbers
    return figures


def _rdma_bandwidths() -> list[float]:
    """The bandwidths of the active ports of RDMA NICs, in 1e9 bytes per second."""
    found = []
    for port in sorted(_RDMA.glob("*/ports/*")):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text():
                gigabits, _, _ = (port / "rate").read_text().partition(" ")
                found.append(float(gigabits) / 8)
    return [rate for rate in found if 0 < rate < _FASTEST]


def _ethernet_bandwidth(variable: str) -> float | None:
    """The bandwidth of the interface that an environment variable names, or that has the default route, in 1e9 bytes
    per second; None if the kernel does not know it, as for most virtual interfaces."""
    with suppress(OSError, ValueError):
        name = (os.environ.get(variable) or "").split(",")[0].removeprefix("=")
        if name.startswith("^"):  # those that are not used
            name = ""
        if not (_NETWORKS / name / "speed").is_file() or not name:
            name = _default_interface() or ""
        rate = int((_NETWORKS / name / "speed").read_text()) / 8e3 if name else 0
        return rate if 0 < rate < _FASTEST else None  # -1, or 2**32 - 1, if the kernel does not know it
    return None


def _default_interface() -> str | None:
    with suppress(OSError, ValueError):
        for line in _ROUTES.read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 1 and fields[1] == "00000000":
                return fields[0]
    return None
