"""N ranks as processes of this machine, and what happens when one of them dies.

Ranks are forked, so that their code lies at the same addresses: where two of them share a core, what its branch
predictor learnt from one serves the other. Between processes that each load torch at random addresses it starts anew at
every switch, which doubles what a short call takes.

The parent hosts the store, so a rank that dies takes no meeting place with it. Every rank watches the pidfds of its
peers and of the parent in a thread of its own, because the main thread may sit in gloo, which notices a dead peer late
or not at all. The parent watches the ranks, says which one died, and ends the rest. Ranks leave together, when the
parent says so: until then, a peer that is gone is a peer that died.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...runtime.environment import requested_timeout
from ...runtime.transports.shared_memory.segments import unlink_names

DEFAULT_TIMEOUT = 120.0
GRACE = 3.0  # seconds that ranks get to say themselves which peer they lost
PEER_DIED = 70

Send = Callable[[dict[str, Any]], None]
RankMain = Callable[[int, int, dict[str, Any], Send], None]


class RanksFailed(RuntimeError):
    """A rank died, failed or did not arrive."""


def timeout_seconds() -> float:
    """How long any wait between ranks may take: `SHARDWEAVE_TIMEOUT` seconds, or two minutes."""
    return requested_timeout() or DEFAULT_TIMEOUT


class _Child:
    """A rank as the parent sees it: what it sends, what it prints, and how it ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.messages, self.its_messages = get_context("fork").Pipe()
        self.output, self.its_output = os.pipe()
        self.unfinished = b""  # the line it is printing
        self.done = False

    def start(self, body: Callable[[int, Connection], None], others: list[_Child]) -> None:
        self.process = get_context("fork").Process(
            target=self._become, args=(body, others), name=f"rank {self.rank}", daemon=True
        )
        self.process.start()

    def _become(self, body: Callable[[int, Connection], None], others: list[_Child]) -> None:
        # Ctrl-C reaches the parent alone, which ends them. Not a session of its own: Linux would schedule each as a
        # group, and a rank that gives way to its peers would not.
        os.setpgrp()
        # A pipe ends with the last process that has it.
        for other in others:
            other.close()
        self.messages.close()
        os.close(self.output)
        for standard in (1, 2):
            os.dup2(self.its_output, standard)
        os.close(self.its_output)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        try:
            body(self.rank, self.its_messages)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a group that lost a member may never come down by itself

    def close_its_ends(self) -> None:
        self.its_messages.close()
        os.close(self.its_output)

    def close(self) -> None:
        """All ends, in a process that has nothing to do with this rank."""
        self.close_its_ends()
        self.messages.close()
        os.close(self.output)

    def lines(self, data: bytes) -> list[str]:
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    @property
    def has_died(self) -> bool:
        """It ended as it should not."""
        return self.process.exitcode is not None and bool(self.process.exitcode or not self.done)

    def epitaph(self) -> str:
        code = self.process.exitcode
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"rank {self.rank} (pid {self.process.pid}) {how}"


class Ranks:
    """`main` as ranks 0..size-1 in a gloo transport of their own, forked from this process as it is.

    A context manager, to be entered before this process starts threads; leaving it ends whoever still runs.

    Args:
        device_type: "cuda": each rank has a GPU, as its current one, and NCCL for it; where there are fewer GPUs than
            ranks, several ranks have the same one, and no NCCL, which would refuse them. This process may not have
            used CUDA.
    """

    def __init__(
        self,
        main: RankMain,
        size: int,
        config: dict[str, Any],
        timeout: float | None = None,
        device_type: str = "cpu",
    ) -> None:
        self._main, self._config, self._parent, self._device_type = main, config, os.getpid(), device_type
        self._timeout = timeout or timeout_seconds()
        sys.stdout.flush()
        sys.stderr.flush()
        self._children = [_Child(rank) for rank in range(size)]
        for child in self._children:
            child.start(self._run_rank, [other for other in self._children if other is not child])
        for child in self._children:
            child.close_its_ends()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.process.exitcode is None:
                child.process.kill()
            child.process.join()
            assert child.process.pid is not None
            unlink_names(child.process.pid)
            child.messages.close()
            os.close(child.output)

    def supervise(
        self,
        on_message: Callable[[int, dict[str, Any]], None],
        on_output: Callable[[int, str], None],
        within: float | None = None,
    ) -> None:
        """Let them run. `on_message` gets what a rank sends, `on_output` the lines it prints; `within` is seconds.

        Raises:
            RanksFailed: a rank died or failed; at once, but for the seconds that the others get to say so. Or they are
                not done within the seconds given.
        """
        limit = None if within is None else time.monotonic() + within
        self._start()
        children, deadline = self._children, None
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.messages, selectors.EVENT_READ, child)
                selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                if deadline is None and limit is not None and time.monotonic() >= limit:
                    raise RanksFailed(f"not done within {within:.0f} s")
                for key, _ in selector.select(timeout=0.2):
                    child = key.data
                    if key.fd == child.output:
                        data = os.read(child.output, 1 << 16)
                        for line in child.lines(data):
                            on_output(child.rank, line)
                        if not data:
                            selector.unregister(child.output)
                            if child.unfinished:
                                on_output(child.rank, child.unfinished.decode(errors="replace"))
                        continue
                    try:
                        message = child.messages.recv()
                    except (EOFError, OSError):
                        selector.unregister(child.messages)
                        continue
                    if message is None:
                        child.done = True
                        if all(c.done for c in children):
                            self._tell(None)
                    else:
                        on_message(child.rank, message)
                if deadline is None and (dead := self._dead()):
                    deadline = time.monotonic() + GRACE
                    on_output(dead[0].rank, f"error: {dead[0].epitaph()}; stopping the others")
        end = limit if deadline is None else deadline
        for child in children:
            child.process.join(None if end is None else max(0.0, end - time.monotonic()))
        if dead := self._dead():
            raise RanksFailed(dead[0].epitaph())

    def _start(self) -> None:
        """Tell each rank where the store is, and the process ids of all."""
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout)
        )
        self._tell({"port": self._store.port, "pids": [child.process.pid for child in self._children]})

    def _tell(self, message: object) -> None:
        for child in self._children:
            with suppress(OSError):  # one that died is noticed elsewhere
                child.messages.send(message)

    def _dead(self) -> list[_Child]:
        """Those that ended as they should not, the cause first: a signal, then an error, then the loss of a peer."""
        dead = [child for child in self._children if child.has_died]
        return sorted(dead, key=lambda child: (child.process.exitcode == PEER_DIED, (child.process.exitcode or 0) >= 0))

    def _run_rank(self, rank: int, messages: Connection) -> None:
        """What a child does."""
        watch = _Watch(rank, self._parent)
        start = messages.recv()
        for peer, pid in enumerate(start["pids"]):
            if peer != rank:
                watch.add(pid, f"rank {peer}")
        # One thread a rank, for either side of a comparison: the ranks already share the cores.
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        size, timeout = len(self._children), timedelta(seconds=self._timeout)
        store = dist.TCPStore("127.0.0.1", start["port"], is_master=False, timeout=timeout)
        backend, device = ("gloo", None) if self._device_type == "cpu" else _gpu_of(rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
        self._main(rank, size, self._config, messages.send)
        dist.barrier()
        watch.stop()
        messages.send(None)
        messages.recv()
        dist.destroy_process_group()


def _gpu_of(rank: int, size: int) -> tuple[str, torch.device | None]:
    """Makes a GPU the current one of this rank; the backends of the process group, and the device that it is for."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if size <= gpus:
        return "cpu:gloo,cuda:nccl", device
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return "gloo", None


class _Watch:
    """A thread that ends this process as soon as the parent or a peer does."""

    def __init__(self, rank: int, parent: int) -> None:
        self._rank = rank
        self._poll = select.poll()
        self._names: dict[int, str] = {}
        self._stopped = False
        self.add(parent, "the parent")
        if os.getppid() != parent:
            self._leave("the parent")
        threading.Thread(target=self._run, name="peer-watch", daemon=True).start()

    def add(self, pid: int, name: str) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._leave(f"{name} (pid {pid})")
        self._names[descriptor] = f"{name} (pid {pid})"
        self._poll.register(descriptor, select.POLLIN)

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        while True:
            # Descriptors added meanwhile are seen on the next turn.
            for descriptor, _ in self._poll.poll(100):
                if self._stopped and "parent" not in self._names[descriptor]:
                    self._poll.unregister(descriptor)
                    continue
                self._leave(self._names[descriptor])

    def _leave(self, name: str) -> NoReturn:
        try:
            os.write(2, f"error: rank {self._rank} stops: {name} has died\n".encode())
        finally:
            os._exit(PEER_DIED)
