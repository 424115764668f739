"""The file in which `calibrate` keeps what it measured, by kind of machine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError
from ...planner import MachineFigures
from ..text_files import write_whole

_logger = logging.getLogger(__name__)
_VERSION = 1
_FIGURES = {"node", "network", "memory_gigabytes_per_s", "call_us"}


def calibration_file() -> Path:
    """The file: `shardweave/calibration.json` in XDG_CACHE_HOME, by default in `~/.cache`.

    Raises:
        FileNotFoundError: XDG_CACHE_HOME is not set, and the user has no home directory, as in some containers.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(f"no folder for calibration.json: {error} Set XDG_CACHE_HOME") from error
    return folder / "shardweave" / "calibration.json"


def machine_kind(device: torch.device) -> str:
    """A name for machines on which the same figures hold: the processor or GPU, and how many there are."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(device)}"
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{device.type}: {model}, {os.cpu_count()} cores"


def read_calibration(kind: str) -> dict[str, Any] | None:
    """The figures of a kind of machine; None if there are none.

    A file that cannot be read, is of another version, belongs to another user or has figures that are not allowed is
    ignored with a warning.
    """
    try:
        path = calibration_file()
        return _machines(path).get(kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, ArgumentError) as error:
        _logger.warning("%s is ignored: %s; python -m shardweave calibrate writes a new one", path, error)
        return None


def keep_calibration(kind: str, figures: Mapping[str, Any]) -> Path:
    """Add the figures of a kind of machine to the file, in place of earlier ones. Atomic: readers see the old file or
    the new one. A file that `read_calibration` ignores is replaced.

    Returns:
        The file.

    Raises:
        ArgumentError: a figure that is not allowed.
        OSError: the file cannot be written.
    """
    _check(kind, figures)
    path = calibration_file()
    try:
        machines = _machines(path)
    except (OSError, ValueError, RecursionError, ArgumentError):
        machines = {}
    text = json.dumps({"version": _VERSION, "machines": {**machines, kind: dict(figures)}}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, f"{text}\n".encode())


def _machines(path: Path) -> dict[str, dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner != os.getuid():
            raise ArgumentError(f"it belongs to user {owner}; allowed: user {os.getuid()}")
        content = json.load(file)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        found = content.get("version") if isinstance(content, dict) else None
        raise ArgumentError(f"version {found!r}; allowed: {_VERSION}")
    machines = content.get("machines")
    if not isinstance(machines, dict):
        raise ArgumentError("it has no object of machines")
    for kind, figures in machines.items():
        _check(kind, figures)
    return machines


def _check(kind: str, figures: Any) -> None:
    if not isinstance(figures, Mapping) or not figures or not set(figures) <= _FIGURES:
        raise ArgumentError(f"{kind}: its figures; allowed: an object of {', '.join(sorted(_FIGURES))}")
    MachineFigures("cpu", measured=dict(figures)).topology()
