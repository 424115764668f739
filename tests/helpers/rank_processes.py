"""Rank processes for tests: starts them, runs a function on each, and collects results or errors."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interpreter import patch_triton_once
from offered_memory import OfferedMemory
from rank_preload import rank_context
from warm_python import run_python

from shardweave import stats

patch_triton_once()  # in ranks too

KNOWN_DELEGATIONS = re.compile(
    "|".join(
        [
            # Modes that report collectives, or have no memory to move, get torch's own collectives.
            "torch.compile is tracing",
            r"(CommDebugMode|DebugMode) reports torch's own collectives",
            r"(FakeTensorMode|FunctionalTensorMode|ProxyTorchDispatchMode|LocalTensorMode) replaces tensors",
            r"\w+ is a dispatch mode not known",
            r"\w+ recomputes what torch carried out",
            r"local tensor is a (FakeTensor|FunctionalTensor|LocalTensor)",
            # Arguments of install().
            r"a mesh that install\(only=\) leaves out",
            r"an axis of a mesh that install\(only=\) leaves out",
            # spmd_types refuses these, or carries them out itself.
            "spmd_types: .*",
            # Torch refuses these and raises the error.
            "shard or another op to partial, which torch refuses",
            # Torch has two behaviours, of which the caller gets one.
            r"shards along mesh dim \d, whose ranks do not ascend: .*",
            # No program can run.
            "world size 1",
            r"process group backend '\w+'",
            # Programs do not have these reductions.
            r"placement P\((band|bor|bxor)\) on mesh dim \d; allowed: .*",
            "placements .*; allowed: one kind of partial where norms are reduced",
            "price: .*",
        ]
    )
)
"""All known delegations: a test in which another one occurs fails."""

BACKEND = "SHARDWEAVE_TEST_BACKEND"
ONE_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    BACKEND: "cpu:gloo,cuda:gloo",
}
"""The environment of ranks that share the first GPU."""
OWN_GPUS = {BACKEND: "cpu:gloo,cuda:nccl"}
"""The environment of ranks that have a GPU each."""
_NOT_CONNECTED = "Gloo connectFullMesh failed"


@dataclass
class Ended:
    """The end of a rank: its value, or the name and text of its exception. `exit_code` is negative for a signal."""

    value: Any = None
    error: str | None = None
    message: str = ""
    exit_code: int | None = None


def _rank_main(pipe: Connection, function: Callable, rank: int, size: int, port: int, environment: dict, args: tuple):
    os.environ.update(environment)
    torch.set_num_threads(1)
    memory = OfferedMemory()
    memory.watch()
    try:
        backend = os.environ.get(BACKEND, "gloo")
        if "cuda" in backend:  # before anything asks for the current device
            torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        # A rank must not exit while others still connect to it.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(size)])
        value = function(rank, *args)
        unlisted = [reason for reason in stats().delegations if not KNOWN_DELEGATIONS.fullmatch(reason)]
        assert not unlisted, f"left to torch for reasons that are not listed: {unlisted}"
        assert not memory.freed, f"freed while peers could still use it: {memory.freed[:4]}"
        pipe.send(Ended(value))
        pipe.recv()  # others may still map memory that ends with the process group
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(Ended(error=type(error).__name__, message=f"{error}\n{traceback.format_exc()}"))
        pipe.close()
        os._exit(1)


def end_ranks(
    function: Callable, size: int, *args: Any, environment: dict[str, str] | None = None, timeout: float = 120
) -> list[Ended]:
    """Run `function(rank, *args)` on `size` processes and return how each ended.

    Gloo at times fails to connect the ranks of a new group on a busy machine: its listener drops a connection, which
    one rank reports and for which another waits. Ranks are then started once more, with a warning.
    """
    ends = _end_once(function, size, args, environment or {}, timeout)
    if any(_NOT_CONNECTED in end.message for end in ends):
        warnings.warn(f"gloo did not connect the ranks of {function.__name__}, which start again", stacklevel=2)
        ends = _end_once(function, size, args, environment or {}, timeout)
    return ends


def _end_once(function: Callable, size: int, args: tuple, environment: dict[str, str], timeout: float) -> list[Ended]:
    context = rank_context()
    # The store is in this process, so that it outlives every rank.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_rank_main, args=(theirs, function, rank, size, server.port, environment, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    ends = [Ended(error="TimeoutError", message=f"no result within {timeout} s") for _ in range(size)]
    open_pipes = dict(zip(pipes, range(size), strict=True))
    while open_pipes:
        ready = wait(list(open_pipes), timeout)
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[index]
            try:
                ends[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ends[rank] = Ended(error="Died", message="ended without a result")
            if _NOT_CONNECTED in ends[rank].message:
                timeout = min(timeout, 5)
    for pipe in pipes:
        with suppress(OSError):  # it has ended
            pipe.send(None)
    for process, end in zip(processes, ends, strict=True):
        if end.error != "TimeoutError":
            process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        end.exit_code = process.exitcode
    return ends


def interpreted(module: str, expression: str) -> str:
    """The output of an expression over a test module, imported as t, with interpreted kernels. Triton decides when a
    kernel is decorated, so this takes a new process."""
    here = Path(__file__).parent
    ours = (
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        str(here),
        *map(str, (here.parent / "runtime").iterdir()),
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, ours))}
    done = run_python(
        [sys.executable, "-c", f"import {module} as t; print({expression})"], env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.rstrip("\n").split("\n")[-1]


def run_ranks(function: Callable, size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `function(rank, *args)` on `size` processes and return the results. Fails the test if any raised."""
    ends = end_ranks(function, size, *args, **options)
    wrong = [f"rank {rank}: {end.error}: {end.message}" for rank, end in enumerate(ends) if end.error]
    assert not wrong, "\n".join(wrong)
    return [end.value for end in ends]
