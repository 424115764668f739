"""`python -m shardweave doctor`: check the software, the settings and the transports of this machine.

Each problem is reported with a fix.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table

from ..bench.harness.terminal import console_of_tables
from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, UnsupportedError
from ..kernels import why_not_compiled
from ..planner.render.explain import format_bytes
from ..runtime.environment import (
    pretended_node_size,
    requested_flight_records,
    requested_poison,
    requested_timeout,
)
from ..runtime.supported_versions import SUPPORTED, installed_version, is_supported, requirement
from ..runtime.transports.choose_transport import check_name, choose_transport, why_no_memory
from ..runtime.transports.shared_memory import segments
from ..runtime.transports.shared_memory.transport import why_unsupported
from ..runtime.transports.symmetric_memory.memory import unreachable_gpus
from .self_test import self_test

MIN_SHM = 1 << 30  # bytes in /dev/shm, where named segments hold the outputs
MIN_FILES = 1024  # open files: each segment of a peer takes a descriptor while it is opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to FILE")


def main(arguments: argparse.Namespace) -> int:
    return run(arguments.json)


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        problem: the problem and its fix; None: there is none.
    """

    section: str
    name: str
    value: str
    problem: str | None = None


def software() -> Iterator[Finding]:
    yield Finding("software", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in SUPPORTED:
        yield _version_of(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        problem = "kernels run in Triton's interpreter, which is very slow; unset it, except in tests"
        yield Finding("software", "TRITON_INTERPRET", "1", problem)
    yield _loops()


def _loops() -> Finding:
    name, why = "loops on CPUs", why_not_compiled()
    if why is None:
        return Finding("software", name, f"compiled by numba {version('numba')}")
    cost = f"dispatch and combine of tokens on CPUs take several times as long: {why}"
    if importlib.util.find_spec("numba") is None:  # not a problem: GPUs do not need it
        return Finding("software", name, f"none; {cost}")
    return Finding("software", name, "none", cost)


def _version_of(name: str) -> Finding:
    problem = None if is_supported(name) else f'not supported: pip install "{requirement(name)}"'
    return Finding("software", name, installed_version(name), problem)


def settings() -> Iterator[Finding]:
    """The environment variables that shardweave reads, where they are set."""
    checks: dict[str, Callable[[], object]] = {
        "SHARDWEAVE_TIMEOUT": requested_timeout,
        "SHARDWEAVE_TRANSPORT": lambda: check_name(os.environ["SHARDWEAVE_TRANSPORT"]),
        "SHARDWEAVE_SEGMENTS": segments.uses_names,
        "SHARDWEAVE_NODE_SIZE": pretended_node_size,
        "SHARDWEAVE_POISON_ROWS": requested_poison,
        "SHARDWEAVE_FR_BUFFER_SIZE": requested_flight_records,
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
    """GPUs and their links. Called last, since it initialises CUDA, after which this process must not fork."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        # Not a problem, although torch is built for GPUs: the machine may have none.
        value = f"none (torch is built for {built}, and finds none)" if built else "none (torch is built for CPUs)"
        yield Finding("GPUs", "GPUs", value)
        for name in ("peer access", "NCCL", "symmetric memory"):
            yield Finding("GPUs", name, "none: no GPU")
        return
    count = torch.cuda.device_count()
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        yield Finding(
            "GPUs",
            f"GPU {i}",
            f"{properties.name}, {format_bytes(properties.total_memory)}, {properties.multi_processor_count} SMs, "
            f"sm_{properties.major}{properties.minor}",
        )
    unreachable = unreachable_gpus()
    pairs = count * (count - 1)
    value = f"{pairs - len(unreachable)} of {pairs} pairs" if pairs else "none: one GPU"
    yield Finding("GPUs", "peer access", value, _no_peer_access(*unreachable[0]) if unreachable else None)
    has_nccl = dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "missing"  # type: ignore[attr-defined]
    yield Finding("GPUs", "NCCL", nccl, None if has_nccl else "GPU ranks cannot communicate: install a torch with NCCL")
    symmetric = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    yield Finding("GPUs", "symmetric memory", "in this torch" if symmetric else "not in this torch")


def _no_peer_access(i: int, j: int) -> str:
    return (
        f"GPUs {i} and {j} do not reach each other, so transport symmetric_memory cannot join them: name GPUs that do "
        "in CUDA_VISIBLE_DEVICES (`nvidia-smi topo -p2p r` shows them), or leave SHARDWEAVE_TRANSPORT unset to use "
        "NCCL"
    )


def memory() -> Iterator[Finding]:
    """Cores and shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ranks on this machine", "cores", str(cores))
    if obstacle := why_unsupported():
        problem = (
            "CPU ranks exchange through torch.distributed, which is slower: for shared memory run them on Linux and "
            "x86-64"
        )
        yield Finding("ranks on this machine", "shared memory", obstacle, problem)
        return
    try:
        named = segments.uses_names()
    except ArgumentError:  # reported by settings()
        return
    why = "requested" if os.environ.get("SHARDWEAVE_SEGMENTS") else "peers may not access this process"
    value = f"named segments in {segments.NAMED_FOLDER} ({why})" if named else "anonymous segments (memfd)"
    yield Finding("ranks on this machine", "shared memory", value)
    yield from _named_folder(named)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    too_few = not unlimited and files < MIN_FILES
    fix = f"too few: run `ulimit -n {MIN_FILES}` in the shell that starts the ranks"
    yield Finding(
        "ranks on this machine", "open files", "unlimited" if unlimited else str(files), fix if too_few else None
    )


def _named_folder(named: bool) -> Iterator[Finding]:
    """The free space for named segments; anonymous ones need none."""
    folder = segments.NAMED_FOLDER
    try:
        space = shutil.disk_usage(folder)
    except OSError as error:
        problem = "named segments need it: mount a tmpfs there, or unset SHARDWEAVE_SEGMENTS" if named else None
        yield Finding("ranks on this machine", folder, f"cannot be read: {error}", problem)
        return
    value = f"{format_bytes(space.free)} free of {format_bytes(space.total)}"
    if not named:
        yield Finding("ranks on this machine", folder, f"{value}; not used, segments are anonymous")
        return
    problem = (
        f"it holds the outputs of all ranks: give it {format_bytes(MIN_SHM)} or more "
        "(docker run --shm-size=…, mount -o remount,size=…)"
    )
    yield Finding("ranks on this machine", folder, value, problem if space.free < MIN_SHM else None)


def transports() -> Iterator[Finding]:
    """The transports that ranks would choose, by the rule of the library."""
    gloo = dist.is_available() and dist.is_gloo_available()
    problem = None if gloo else "CPU ranks cannot create a process group: install a torch with gloo"
    yield Finding("transports", "gloo", "in this torch" if gloo else "missing", problem)
    requested = os.environ.get("SHARDWEAVE_TRANSPORT") or None
    try:
        node_size = pretended_node_size()
    except ArgumentError:  # reported by settings()
        yield Finding("transports", "ranks", "none: SHARDWEAVE_NODE_SIZE is not allowed")
        return
    devices = [("CPU", torch.device("cpu"), "gloo", gloo)]
    if torch.cuda.is_available():
        devices.append(("GPU", torch.device("cuda"), "nccl", dist.is_nccl_available()))
    per_machine = max(4, min(2 * (node_size or 0), 128))
    for kind, device, backend, has_backend in devices:
        for machines, where in ((1, "of this machine"), (2, f"on 2 machines, {per_machine} on each")):
            ranks = range(per_machine * machines)
            value, problem = chosen(ranks, per_machine, requested, node_size, device, backend, has_backend)
            # Only CPU ranks of this machine are a problem of this machine.
            own = kind == "CPU" and machines == 1
            yield Finding("transports", f"{len(ranks)} {kind} ranks {where}", value, problem if own else None)


def chosen(
    ranks: Sequence[int],
    per_machine: int,
    requested: str | None,
    node_size: int | None,
    device: torch.device,
    backend: str,
    has_backend: bool,
) -> tuple[str, str | None]:
    """The transport that ranks choose with the reason, and the problem with it or None.

    Args:
        per_machine: the number of consecutive ranks on one machine.
        requested: the transport that is requested, if any.
        backend: the backend of process groups for the device; `has_backend`: whether this torch has it.
    """

    def node_of(rank: int) -> tuple[int, int]:
        return rank // per_machine, rank // node_size if node_size else 0

    if not has_backend and device.type == "cpu":  # they cannot create a process group
        return f"none: no {backend}", None
    try:
        name, why = choose_transport(
            requested, ranks, ranks[0], node_of, no_memory=why_no_memory(device, requested),
            no_messages=None if has_backend else f"no {backend}", node_size=node_size,
        )  # fmt: skip
    except (ArgumentError, UnsupportedError) as error:
        return (
            f"refused: {error}",
            "redistributions raise this error: set SHARDWEAVE_TRANSPORT to another one, or unset it",
        )
    if not has_backend and name == "process_group":
        return f"none: no {backend}", None
    if name == "process_group":
        return f"process_group on {backend}: {why}", None
    return (f"{name}, {backend} between machines: {why}" if name.startswith("hierarchical") else f"{name}: {why}"), None


def _self_test_findings(outcomes: list[tuple[str, float, str | None]]) -> Iterator[Finding]:
    working = [name.split()[-1] for name, _, error in outcomes if error is None]
    for name, seconds, error in outcomes:
        value = "failed" if error else f"passed, {seconds:.1f} s"
        fix = (
            f"use another transport: SHARDWEAVE_TRANSPORT={' or '.join(working)}"
            if working
            else "no transport works: fix the other problems first, gloo and the settings above all"
        )
        yield Finding("self-test", name, value, f"{error}. Fix: {fix}" if error else None)


def examine() -> list[Finding]:
    """Run all checks. Forks ranks, so it must be called before this process starts threads or CUDA."""
    tests = list(_self_test_findings(self_test()))
    return [*software(), *settings(), *memory(), *tests, *gpus(), *transports()]


def run(as_json: Path | None = None) -> int:
    """Run all checks and print them. Returns 1 if there is a problem, else 0.

    Raises:
        ArgumentError: the JSON cannot be written.
    """
    check_writable("--json", as_json)
    findings = examine()
    console = console_of_tables(plain_width=120)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    section = None
    for finding in findings:
        if finding.section != section:
            table.add_row(f"[bold]{finding.section}[/bold]")
            section = finding.section
        mark = "[red]problem[/red]" if finding.problem else ""
        table.add_row(f"  {escape(finding.name)}", escape(finding.value), mark)
    console.print(table)
    problems = [finding for finding in findings if finding.problem]
    for finding in problems:
        # Output of ranks may have brackets, as in "[rank0]", which are not markup.
        console.print(f"[red]{escape(finding.name)}[/red]: {escape(finding.problem or '')}")
    console.print("No problems." if not problems else f"{len(problems)} of {len(findings)} checks found a problem.")
    if as_json is not None:
        written: list[dict[str, Any]] = [asdict(finding) for finding in findings]
        as_json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(bool(problems))
