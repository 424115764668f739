"""Runs a function on N ranks, processes of this machine, and gathers the messages that they send.

Ranks are forked, so that their code lies at the same addresses: two ranks on one core share what its branch predictor
has learnt. Processes that each load torch at random addresses lose it at every switch, which doubles a short call.

The parent hosts the store, which therefore survives the death of a rank. If a rank dies or fails, the parent names it
and ends the others; if the parent dies, the kernel ends the ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.environment import requested_timeout
from ...runtime.transports.shared_memory.segments import unlink_names

_GRACE = 3.0  # seconds in which the other ranks may report the loss of a peer before they are ended
_PR_SET_PDEATHSIG = 1

Message = dict[str, Any]
Send = Callable[[Message], None]
RankMain = Callable[[int, int, Message, Send], None]


class RanksFailed(RuntimeError):
    """A rank died or failed, or the ranks were not done in time."""


def timeout_seconds() -> float:
    """How long any wait between ranks may take: `SHARDWEAVE_TIMEOUT` seconds, or two minutes."""
    return requested_timeout() or 120.0


def end_with_parent() -> None:
    """End this process, started by multiprocessing, as soon as its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)


class _Rank:
    """A rank in a process of its own, as the parent sees it."""

    def __init__(self, rank: int, body: Callable[[int, Callable[[object], None]], None]) -> None:
        self.rank, self.finished = rank, False
        fork = get_context("fork")
        self.messages, messages = fork.Pipe(duplex=False)
        self.output, output = os.pipe()
        self.process = fork.Process(target=_become, args=(rank, body, messages, output), daemon=True)
        self.process.start()
        # A pipe ends when its last writer closes it.
        messages.close()
        os.close(output)

    def receive(self, on_message: Callable[[int, Message], None]) -> bool:
        """Pass on the next message; False if there is none left."""
        try:
            message = self.messages.recv()
        except (EOFError, OSError):
            return False
        if message is None:
            self.finished = True
        else:
            on_message(self.rank, message)
        return True

    def forward(self, on_output: Callable[[int, str], None]) -> None:
        """Pass on each line of output when it is printed, until the rank ends."""
        with open(self.output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                on_output(self.rank, line.rstrip("\n"))

    def failure(self) -> str | None:
        """How the process ended, if it did so before its function returned."""
        code = self.process.exitcode
        if code is None or (code == 0 and self.finished):
            return None
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"rank {self.rank} (pid {self.process.pid}) {end}"


def _become(rank: int, body: Callable[[int, Callable[[object], None]], None], messages: Any, output: int) -> None:
    """The forked process."""
    end_with_parent()
    # Ctrl-C reaches only the parent, which ends the ranks. They are no sessions of their own: Linux would schedule each
    # session as a group, and a rank that yields would not yield to its peers.
    os.setpgrp()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    try:
        body(rank, messages.send)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a process group that lost a member may hang when it is destroyed


def supervise(
    main: RankMain,
    size: int,
    config: Message,
    on_message: Callable[[int, Message], None],
    on_output: Callable[[int, str], None] | None = None,
    *,
    progress: Any = None,
    device_type: str = "cpu",
    within: float | None = None,
) -> None:
    """Run `main` on ranks 0 to size - 1 of a gloo process group. Call it before this process starts threads.

    Args:
        on_message: gets each message and the rank that sent it.
        on_output: gets each line that a rank prints. By default lines go to stderr.
        progress: a progress bar of rich, shown meanwhile. It has a thread, so it starts after the ranks.
        device_type: "cuda": each rank has a GPU as its current device, with NCCL. If there are fewer GPUs than ranks,
            ranks share them, without NCCL, which would refuse that. This process may not have used CUDA.
        within: seconds after which ranks that are not done are ended; None: only a wait between ranks is bounded, by
            `timeout_seconds()`.

    Raises:
        RanksFailed: a rank died or failed, or the ranks were not done within the time given.
    """
    wait_limit = timedelta(seconds=within or timeout_seconds())
    listener = socket.create_server(("127.0.0.1", 0))  # before the fork, so that ranks know the port
    host, port = listener.getsockname()

    def body(rank: int, send: Callable[[object], None]) -> None:
        listener.close()
        # One thread a rank, for all contenders: ranks already share the cores.
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore(host, port, is_master=False, timeout=wait_limit)
        backend, device = ("gloo", None) if device_type == "cpu" else _gpu_of(rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait_limit, device_id=device)
        main(rank, size, config, send)
        dist.barrier()
        send(None)
        dist.destroy_process_group()

    on_output = on_output or _show
    import_module("torch.distributed.tensor.debug")  # whose imports are those of the first DTensor, once for all ranks
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = [_Rank(rank, body) for rank in range(size)]
    readers = [threading.Thread(target=rank.forward, args=(on_output,), daemon=True) for rank in ranks]
    try:
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=wait_limit, master_listen_fd=listener.detach()
        )
        for reader in readers:
            reader.start()
        with progress or nullcontext():
            _wait(ranks, on_message, on_output, within)
        del store
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            assert rank.process.pid is not None
            unlink_names(rank.process.pid)
            rank.messages.close()
        for reader in readers:
            reader.join(1.0)


def _wait(
    ranks: list[_Rank],
    on_message: Callable[[int, Message], None],
    on_output: Callable[[int, str], None],
    within: float | None,
) -> None:
    """Pass on messages until all ranks have ended, or one has failed and `_GRACE` is over."""
    deadline = None if within is None else time.monotonic() + within
    failed: list[_Rank] = []
    sources: dict[Any, _Rank] = {rank.messages: rank for rank in ranks}
    sources |= {rank.process.sentinel: rank for rank in ranks}
    while sources:
        left = None if deadline is None else deadline - time.monotonic()
        ready = connection.wait(list(sources), left) if left is None or left > 0 else []
        if not ready and not failed:
            raise RanksFailed(f"not done within {within:.0f} s")
        if not ready:
            break
        for source in ready:
            rank = sources.get(source)
            if rank is None:
                continue
            if source is rank.messages:
                if not rank.receive(on_message):
                    del sources[source]
                continue
            while rank.messages.poll() and rank.receive(on_message):
                pass
            rank.process.join()
            del sources[source]
            sources.pop(rank.messages, None)
            if failure := rank.failure():
                failed.append(rank)
                if len(failed) == 1:
                    on_output(rank.rank, f"error: {failure}; stopping the others")
                    deadline = time.monotonic() + _GRACE
    if failed:
        # A signal comes from outside; an error may be the loss of that peer.
        raise RanksFailed(min(failed, key=lambda rank: (rank.process.exitcode or 0) >= 0).failure())


def run_ranks(
    main: RankMain, size: int, config: Message, on_case: Callable[[str, list[Message]], None], **options: Any
) -> None:
    """Run `main` on ranks that each send one message for each case, whose name is the message's "case".

    Args:
        on_case: gets the name of a case and its messages in rank order, once all ranks have sent theirs.
        options: of `supervise`.
    """
    waiting: dict[str, dict[int, Message]] = {}

    def on_message(rank: int, message: Message) -> None:
        by_rank = waiting.setdefault(message["case"], {})
        by_rank[rank] = message
        if len(by_rank) == size:
            on_case(message["case"], [by_rank[r] for r in range(size)])

    supervise(main, size, config, on_message, **options)


def messages_of(main: RankMain, size: int, config: Message) -> list[list[Message]]:
    """Run `main` on ranks; returns all messages of each rank."""
    by_rank: list[list[Message]] = [[] for _ in range(size)]
    supervise(main, size, config, lambda rank, message: by_rank[rank].append(message))
    return by_rank


def _show(rank: int, line: str) -> None:
    if line.strip() and not line.startswith("[Gloo]"):
        print(f"rank {rank}: {line}", file=sys.stderr, flush=True)


def _gpu_of(rank: int, size: int) -> tuple[str, torch.device | None]:
    """Set the current GPU of this rank. Returns the backends of the process group and the device that it is for."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if size <= gpus:
        return "cpu:gloo,cuda:nccl", device
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return "gloo", None
