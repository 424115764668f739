"""`python -m shardweave doctor`: what this machine has, which worlds ranks would meet in and why, whether they work.

What is off comes with what to do about it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..errors import ArgumentError
from ..planner.explanation import format_bytes
from ..runtime import segments
from ..runtime.shared_memory import why_not_here
from ..runtime.worlds import NAMES, pretended_node_size, timeout_asked_for
from .self_test import self_test

TESTED_TORCH = ((2, 11), (2, 13))
TESTED_TRITON = ((3, 6), (3, 7))
LEAST_SHM = 1 << 30  # bytes in /dev/shm, where segments have names: outputs are made there
LEAST_FILES = 1024  # open files: peers' segments are a descriptor each while they are opened


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
        off: what is wrong with it, and what to do; None where nothing is.
    """

    section: str
    what: str
    found: str
    off: str | None = None


def software() -> Iterator[Finding]:
    yield Finding("software", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, tested in (("torch", TESTED_TORCH), ("triton", TESTED_TRITON)):
        yield _version_of(name, tested)
    if os.environ.get("TRITON_INTERPRET") == "1":
        off = "kernels run in Triton's interpreter, thousands of times slower; unset it, except in tests"
        yield Finding("software", "TRITON_INTERPRET", "1", off)


def _version_of(name: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    least, most = (".".join(map(str, v)) for v in tested)
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding("software", name, "not installed", f"pip install {name}, {least} to {most}")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdecimal())
    fits = tested[0] <= numbers <= tested[1]
    return Finding("software", name, found, None if fits else f"not tested; versions {least} to {most} are")


def settings() -> Iterator[Finding]:
    """The variables that shardweave reads, where they are set."""

    def timeout() -> None:
        timeout_asked_for()

    def world() -> None:
        if os.environ["SHARDWEAVE_WORLD"] not in NAMES:
            raise ArgumentError(f"allowed: {', '.join(NAMES)}")

    def kind() -> None:
        segments.uses_names()

    def node_size() -> None:
        pretended_node_size()

    checks: dict[str, Callable[[], None]] = {
        "SHARDWEAVE_TIMEOUT": timeout,
        "SHARDWEAVE_WORLD": world,
        "SHARDWEAVE_SEGMENTS": kind,
        "SHARDWEAVE_NODE_SIZE": node_size,
    }
    for name, check in checks.items():
        value = os.environ.get(name)
        if value:
            try:
                check()
                yield Finding("settings", name, value)
            except ArgumentError as error:
                yield Finding("settings", name, value, str(error))


def gpus() -> Iterator[Finding]:
    """Asked last: it starts CUDA in this process, from which nothing may be forked then."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        # A build for GPUs that finds none is off where there should be one; which machine this is, it cannot know.
        found = f"none (torch is built for {built}, and finds none)" if built else "none (torch is built for CPUs)"
        yield Finding("GPUs", "GPUs", found)
        return
    count = torch.cuda.device_count()
    for i in range(count):
        about = torch.cuda.get_device_properties(i)
        yield Finding(
            "GPUs",
            f"GPU {i}",
            f"{about.name}, {format_bytes(about.total_memory)}, {about.multi_processor_count} SMs, "
            f"sm_{about.major}{about.minor}",
        )
    apart = [
        (i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if count > 1:
        found = f"{count * (count - 1) - len(apart)} of {count * (count - 1)} pairs"
        off = f"GPUs {apart[0][0]} and {apart[0][1]} do not reach each other: symmetric memory cannot join them"
        yield Finding("GPUs", "peer access", found, off if apart else None)
    has_nccl = dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"  # type: ignore[attr-defined]
    yield Finding("GPUs", "NCCL", nccl, None if has_nccl else "GPU ranks cannot exchange: a torch with NCCL is needed")
    symmetric = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    yield Finding("GPUs", "symmetric memory", "in this torch" if symmetric else "not in this torch")


def memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ranks on this machine", "cores", str(cores))
    if obstacle := why_not_here():
        off = "CPU ranks exchange through torch.distributed, which is several times slower"
        yield Finding("ranks on this machine", "shared memory", obstacle, off)
        return
    try:
        named = segments.uses_names()
    except ArgumentError:  # which settings() tells
        return
    why = "asked for" if os.environ.get("SHARDWEAVE_SEGMENTS") else "this process may not be looked into"
    found = f"named segments in {segments.NAMED_FOLDER} ({why})" if named else "anonymous segments (memfd)"
    yield Finding("ranks on this machine", "shared memory", found)
    yield from _named_folder(named)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    off = f"few: `ulimit -n {LEAST_FILES}` or more in the shell that starts the ranks"
    unlimited = files == resource.RLIM_INFINITY
    fits = unlimited or files >= LEAST_FILES
    yield Finding(
        "ranks on this machine", "open files", "unlimited" if unlimited else str(files), None if fits else off
    )


def _named_folder(named: bool) -> Iterator[Finding]:
    """Room where named segments go; anonymous ones need none there."""
    what = segments.NAMED_FOLDER
    try:
        space = shutil.disk_usage(what)
    except OSError as error:
        off = "named segments need it: mount a tmpfs there, or unset SHARDWEAVE_SEGMENTS" if named else None
        yield Finding("ranks on this machine", what, f"cannot be read: {error}", off)
        return
    found = f"{format_bytes(space.free)} free of {format_bytes(space.total)}"
    if not named:
        yield Finding("ranks on this machine", what, f"{found}; not used, segments are anonymous")
        return
    off = (
        f"outputs of all ranks are made there: give it {format_bytes(LEAST_SHM)} or more "
        "(docker run --shm-size=…, mount -o remount,size=…)"
    )
    yield Finding("ranks on this machine", what, found, off if space.free < LEAST_SHM else None)


def worlds() -> Iterator[Finding]:
    """Where ranks would meet, by the rule of `worlds.Worlds.choose`."""
    gloo = dist.is_available() and dist.is_gloo_available()
    if not gloo:
        off = "CPU ranks have no process group to start from: a torch with gloo is needed"
        yield Finding("worlds", "gloo", "missing", off)
    asked = os.environ.get("SHARDWEAVE_WORLD")
    obstacle = "asked for" if asked == "collective" else why_not_here()
    if not gloo:
        here = across = "nowhere: no gloo"
    else:
        here = f"collective on gloo: {obstacle}" if obstacle else "shared_memory: all ranks are on this machine"
        across = f"collective on gloo: {obstacle}" if obstacle else "mixed: shared memory inside, gloo between machines"
    yield Finding("worlds", "CPU ranks of this machine", here)
    yield Finding("worlds", "CPU ranks of several machines", across)
    if torch.cuda.is_available():
        found = "collective on nccl: tensors are on cuda" if dist.is_nccl_available() else "nowhere: no NCCL"
        yield Finding("worlds", "GPU ranks", found)


def _tested(outcomes: list[tuple[str, float, str | None]]) -> Iterator[Finding]:
    for name, seconds, error in outcomes:
        found = "wrong, or not at all" if error else f"right, {seconds:.1f} s"
        yield Finding("self-test", name, found, error)


def examine() -> list[Finding]:
    """Everything that the doctor looks at. Forks ranks: call it before this process starts threads or CUDA."""
    tested = list(_tested(self_test()))
    return [*software(), *settings(), *memory(), *tested, *gpus(), *worlds()]


def run(as_json: Path | None = None) -> int:
    """Examine and tell; 1 where something is off.

    Raises:
        ArgumentError: the JSON cannot be written.
    """
    findings = examine()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = None
    for finding in findings:
        if finding.section != section:
            table.add_row(f"[bold]{finding.section}[/bold]")
            section = finding.section
        table.add_row(f"  {finding.what}", finding.found, "[red]off[/red]" if finding.off else "")
    console.print(table)
    off = [finding for finding in findings if finding.off]
    for finding in off:
        console.print(f"[red]{finding.what}[/red]: {finding.off}", markup=True)
    console.print("Nothing is off." if not off else f"{len(off)} of {len(findings)} things are off.")
    if as_json is not None:
        written: list[dict[str, Any]] = [asdict(finding) for finding in findings]
        try:
            as_json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"--json: '{as_json}' cannot be written: {error}; allowed: a file") from None
    return int(bool(off))
