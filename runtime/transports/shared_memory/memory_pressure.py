"""Whether the machine, or the container that this process is in, is short of memory."""

from __future__ import annotations

from contextlib import suppress

_MEMINFO, _CGROUPS = "/proc/meminfo", "/sys/fs/cgroup"
_LEFT_FREE = 16  # of the total, a part of this many


def is_short_of_memory(nbytes: int) -> bool:
    """Whether so many bytes more leave less than a sixteenth of the machine's memory, or of the container's."""
    return any(available - nbytes < total // _LEFT_FREE for available, total in _limits())


def _limits() -> list[tuple[int, int]]:
    """What is available, and the total: of the machine and of each control group that bounds this process."""
    found = []
    # What cannot be read bounds nothing that is known.
    with suppress(OSError, KeyError, ValueError):
        machine = {line.split()[0]: int(line.split()[1]) << 10 for line in _lines(_MEMINFO)}
        found.append((machine["MemAvailable:"], machine["MemTotal:"]))
    for folder, most, used, cache in (
        (_CGROUPS, "memory.max", "memory.current", "inactive_file"),
        (f"{_CGROUPS}{_own_group()}", "memory.max", "memory.current", "inactive_file"),
        (f"{_CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, KeyError, ValueError):
            total = int(_lines(f"{folder}/{most}")[0])  # "max": none
            reclaimable = {line.split()[0]: int(line.split()[1]) for line in _lines(f"{folder}/memory.stat")}[cache]
            found.append((total - int(_lines(f"{folder}/{used}")[0]) + reclaimable, total))
    # Of version 1, a limit beyond the machine's memory is none.
    return [(available, total) for available, total in found if not found or total <= found[0][1]]


def _own_group() -> str:
    with suppress(OSError):
        for line in _lines("/proc/self/cgroup"):
            if line.startswith("0::"):
                return line[3:].rstrip("/")
    return ""


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()
