"""Detects whether the machine or the container of this process is short of memory."""

from __future__ import annotations

from contextlib import suppress

_MEMINFO, _CGROUPS = "/proc/meminfo", "/sys/fs/cgroup"
_RESERVED_PART = 16  # a sixteenth of the total is left free


def is_short_of_memory(nbytes: int) -> bool:
    """Whether `nbytes` more leave less than a sixteenth of the machine's or the container's memory available."""
    return any(available - nbytes < total // _RESERVED_PART for available, total in _limits())


def _limits() -> list[tuple[int, int]]:
    """Available and total bytes, of the machine and of each control group that limits this process."""
    limits = []
    # Limits that cannot be read are ignored.
    with suppress(OSError, KeyError, ValueError):
        machine = {line.split()[0]: int(line.split()[1]) << 10 for line in _lines(_MEMINFO)}
        limits.append((machine["MemAvailable:"], machine["MemTotal:"]))
    for folder, most, used, cache in (
        (_CGROUPS, "memory.max", "memory.current", "inactive_file"),
        (f"{_CGROUPS}{_own_group()}", "memory.max", "memory.current", "inactive_file"),
        (f"{_CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, KeyError, ValueError):
            total = int(_lines(f"{folder}/{most}")[0])  # "max" means no limit
            reclaimable = {line.split()[0]: int(line.split()[1]) for line in _lines(f"{folder}/memory.stat")}[cache]
            limits.append((total - int(_lines(f"{folder}/{used}")[0]) + reclaimable, total))
    # In version 1, a limit beyond the machine's memory means no limit.
    return [(available, total) for available, total in limits if not limits or total <= limits[0][1]]


def _own_group() -> str:
    with suppress(OSError):
        for line in _lines("/proc/self/cgroup"):
            if line.startswith("0::"):
                return line[3:].rstrip("/")
    return ""


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()
