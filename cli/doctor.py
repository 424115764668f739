"""`python -m shardweave doctor`: what this machine has, which transports ranks would meet in and why, whether they
work.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, UnsupportedError
from ..planner.render.explain import format_bytes
from ..runtime.environment import pretended_node_size, requested_poison, requested_pool_limit, requested_timeout
from ..runtime.transports import shared_segments
from ..runtime.transports.select import why_no_memory
from ..runtime.transports.selection_rule import check_name, choose_transport
from ..runtime.transports.shared_memory import why_not_here
from .self_test import self_test

# As pyproject.toml requires them: from this version on, below that one.
SUPPORTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8))}
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
    for name in SUPPORTED:
        yield _version_of(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        off = "kernels run in Triton's interpreter, which is very slow; unset it, except in tests"
        yield Finding("software", "TRITON_INTERPRET", "1", off)


def requirement(name: str) -> str:
    """As pip takes it: torch>=2.11,<2.14."""
    least, below = (".".join(map(str, numbers)) for numbers in SUPPORTED[name])
    return f"{name}>={least},<{below}"


def _version_of(name: str) -> Finding:
    # Of what runs: torch for AMD's GPUs brings triton under another package's name.
    found: str = import_module(name).__version__
    least, below = SUPPORTED[name]
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdecimal())
    off = None if least <= numbers < below else f'not supported: pip install "{requirement(name)}"'
    return Finding("software", name, found, off)


def settings() -> Iterator[Finding]:
    """The variables that shardweave reads, where they are set."""

    checks: dict[str, Callable[[], object]] = {
        "SHARDWEAVE_TIMEOUT": requested_timeout,
        "SHARDWEAVE_TRANSPORT": lambda: check_name(os.environ["SHARDWEAVE_TRANSPORT"]),
        "SHARDWEAVE_SEGMENTS": shared_segments.uses_names,
        "SHARDWEAVE_NODE_SIZE": pretended_node_size,
        "SHARDWEAVE_POISON_ROWS": requested_poison,
        "SHARDWEAVE_POOL_LIMIT": requested_pool_limit,
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
        for what in ("peer access", "NCCL", "symmetric memory"):
            yield Finding("GPUs", what, "none: no GPU")
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
    pairs = count * (count - 1)
    found = f"{pairs - len(apart)} of {pairs} pairs" if pairs else "none: one GPU"
    yield Finding("GPUs", "peer access", found, _without_peers(*apart[0]) if apart else None)
    has_nccl = dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"  # type: ignore[attr-defined]
    yield Finding("GPUs", "NCCL", nccl, None if has_nccl else "GPU ranks cannot exchange: a torch with NCCL is needed")
    symmetric = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    yield Finding("GPUs", "symmetric memory", "in this torch" if symmetric else "not in this torch")


def _without_peers(i: int, j: int) -> str:
    return (
        f"GPUs {i} and {j} do not reach each other, so transport symmetric_memory cannot join them: name GPUs that do "
        "in CUDA_VISIBLE_DEVICES (`nvidia-smi topo -p2p r` shows them), or leave SHARDWEAVE_TRANSPORT unset: they "
        "exchange by NCCL then"
    )


def memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ranks on this machine", "cores", str(cores))
    if obstacle := why_not_here():
        off = (
            "CPU ranks exchange through torch.distributed, which is slower: for shared memory start them "
            "on Linux and x86-64"
        )
        yield Finding("ranks on this machine", "shared memory", obstacle, off)
        return
    try:
        named = shared_segments.uses_names()
    except ArgumentError:  # which settings() tells
        return
    why = "asked for" if os.environ.get("SHARDWEAVE_SEGMENTS") else "this process may not be looked into"
    found = f"named segments in {shared_segments.NAMED_FOLDER} ({why})" if named else "anonymous segments (memfd)"
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
    what = shared_segments.NAMED_FOLDER
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


def transports() -> Iterator[Finding]:
    """Where ranks would meet, by the rule that they go by themselves."""
    gloo = dist.is_available() and dist.is_gloo_available()
    needed = "CPU ranks have no process group to start from: a torch with gloo is needed"
    yield Finding("transports", "gloo", "in this torch" if gloo else "missing", None if gloo else needed)
    asked = os.environ.get("SHARDWEAVE_TRANSPORT") or None
    try:
        node_size = pretended_node_size()
    except ArgumentError:  # which settings() tells, and any rank
        yield Finding("transports", "ranks", "nowhere: SHARDWEAVE_NODE_SIZE is not allowed")
        return
    devices = [("CPU", torch.device("cpu"), "gloo", gloo)]
    if torch.cuda.is_available():
        devices.append(("GPU", torch.device("cuda"), "nccl", dist.is_nccl_available()))
    of_machine = max(4, min(2 * (node_size or 0), 128))
    for kind, device, backend, has_backend in devices:
        for machines, where in ((1, "of this machine"), (2, f"on 2 machines, {of_machine} on each")):
            ranks = range(of_machine * machines)
            found, off = meeting(ranks, of_machine, asked, node_size, device, backend, has_backend)
            # What this machine cannot do is off; what ranks elsewhere could not is said.
            told = off if kind == "CPU" and machines == 1 else None
            yield Finding("transports", f"{len(ranks)} {kind} ranks {where}", found, told)


def meeting(
    ranks: Sequence[int],
    of_machine: int,
    asked: str | None,
    node_size: int | None,
    device: torch.device,
    backend: str,
    has_backend: bool,
) -> tuple[str, str | None]:
    """The transport of ranks with why, and what is off about it.

    Args:
        of_machine: consecutive ranks that are on one machine.
        backend: that carries messages of the device; `has_backend`: whether this torch has it.
    """

    def node_of(rank: int) -> tuple[int, int]:
        return rank // of_machine, rank // node_size if node_size else 0

    if not has_backend and device.type == "cpu":  # they have nothing to start from, whatever they would meet in
        return f"nowhere: no {backend}", None
    try:
        name, why = choose_transport(
            asked, ranks, ranks[0], node_of, no_memory=why_no_memory(device, asked),
            no_messages=None if has_backend else f"no {backend}", node_size=node_size,
        )  # fmt: skip
    except (ArgumentError, UnsupportedError) as error:
        return f"refused: {error}", "name another in SHARDWEAVE_TRANSPORT, or unset it: they raise this error"
    if not has_backend and name == "process_group":
        return f"nowhere: no {backend}", None
    if name == "process_group":
        return f"process_group on {backend}: {why}", None
    return (f"{name}, {backend} between machines: {why}" if name.startswith("hierarchical") else f"{name}: {why}"), None


def _tested(outcomes: list[tuple[str, float, str | None]]) -> Iterator[Finding]:
    right = [name.split()[-1] for name, _, error in outcomes if error is None]
    for name, seconds, error in outcomes:
        found = "wrong, or not at all" if error else f"right, {seconds:.1f} s"
        fix = (
            f"have ranks meet elsewhere: SHARDWEAVE_TRANSPORT={' or '.join(right)}"
            if right
            else "no two ranks met: mend what else is off first, gloo and the settings before all"
        )
        yield Finding("self-test", name, found, f"{error}. What to do: {fix}" if error else None)


def examine() -> list[Finding]:
    """Everything that the doctor looks at. Forks ranks: call it before this process starts threads or CUDA."""
    tested = list(_tested(self_test()))
    return [*software(), *settings(), *memory(), *tested, *gpus(), *transports()]


def run(as_json: Path | None = None) -> int:
    """Examine and tell; 1 where something is off.

    Raises:
        ArgumentError: the JSON cannot be written.
    """
    check_writable("--json", as_json)
    findings = examine()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = None
    for finding in findings:
        if finding.section != section:
            table.add_row(f"[bold]{finding.section}[/bold]")
            section = finding.section
        table.add_row(f"  {escape(finding.what)}", escape(finding.found), "[red]off[/red]" if finding.off else "")
    console.print(table)
    off = [finding for finding in findings if finding.off]
    for finding in off:
        # Ranks' own words may have brackets, "[rank0]" among them, which are no markup.
        console.print(f"[red]{escape(finding.what)}[/red]: {escape(finding.off or '')}")
    console.print("Nothing is off." if not off else f"{len(off)} of {len(findings)} things are off.")
    if as_json is not None:
        written: list[dict[str, Any]] = [asdict(finding) for finding in findings]
        as_json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(bool(off))
