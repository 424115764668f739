"""N ranks as processes of this machine, and what happens when one of them dies.

The parent hosts the store, so a rank that dies takes no meeting place with it. Every rank watches the pidfds of its
peers and of the parent in a thread of its own, because the main thread may sit in gloo, which notices a dead peer late
or not at all. The parent watches the ranks, says which one died, and ends the rest. Ranks leave together, when the
parent closes their standard input: until then, a peer that is gone is a peer that died.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any, NoReturn

DEFAULT_TIMEOUT = 120.0
GRACE = 3.0  # seconds that ranks get to say themselves which peer they lost
PEER_DIED = 70

Send = Callable[[dict[str, Any]], None]
RankMain = Callable[[int, int, dict[str, Any], Send], None]


class RanksFailed(RuntimeError):
    """A rank died, failed or never came."""


def timeout_seconds() -> float:
    """How long any wait between ranks may take: `SHARDWEAVE_TIMEOUT` seconds, or two minutes."""
    text = os.environ.get("SHARDWEAVE_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"SHARDWEAVE_TIMEOUT is {text!r}: a positive number of seconds is wanted")
    return seconds


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    messages: int  # file descriptor
    buffers: dict[str, bytes] = field(default_factory=lambda: {"message": b"", "output": b""})
    done: bool = False

    def lines(self, channel: str, data: bytes) -> list[bytes]:
        *lines, self.buffers[channel] = (self.buffers[channel] + data).split(b"\n")
        return lines

    def epitaph(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"rank {self.rank} (pid {self.process.pid}) {how}"


def run_ranks(
    main: str,
    size: int,
    config: dict[str, Any],
    on_message: Callable[[int, dict[str, Any]], None],
    on_output: Callable[[int, str], None],
) -> None:
    """Run `main`, a "module:function" of type `RankMain`, as ranks 0..size-1 in a gloo world of their own.

    `on_message` gets what a rank sends, `on_output` the lines it prints. Raises RanksFailed as soon as one rank dies.
    """
    import torch.distributed as dist

    timeout = timeout_seconds()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    spec = {"main": main, "size": size, "port": store.port, "timeout": timeout, "parent": os.getpid(), "config": config}
    children: list[_Child] = []
    try:
        for rank in range(size):
            children.append(_start(rank, spec))
        _supervise(children, on_message, on_output)
    finally:
        _end(children)


def _start(rank: int, spec: dict[str, Any]) -> _Child:
    read, write = os.pipe()
    # One thread a rank, for either side of a comparison: the ranks already share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _rank_process; _rank_process()"]
            + [json.dumps({**spec, "rank": rank, "messages": write})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            env=environment,
        )
    finally:
        os.close(write)
    return _Child(rank, process, read)


def _supervise(
    children: list[_Child],
    on_message: Callable[[int, dict[str, Any]], None],
    on_output: Callable[[int, str], None],
) -> None:
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.messages, selectors.EVENT_READ, (child, "message"))
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, (child, "output"))
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            for key, _ in selector.select(timeout=0.2):
                child, channel = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                for line in child.lines(channel, data):
                    if channel == "output":
                        on_output(child.rank, line.decode(errors="replace"))
                    elif (message := json.loads(line)).get("kind") == "done":
                        child.done = True
                    else:
                        on_message(child.rank, message)
            if all(child.done for child in children):
                for child in children:
                    _close(child.process.stdin)
            if deadline is None and (dead := _dead(children)):
                deadline = time.monotonic() + GRACE
                on_output(dead[0].rank, f"error: {dead[0].epitaph()}; stopping the others")
    while deadline is not None and time.monotonic() < deadline and any(c.process.poll() is None for c in children):
        time.sleep(0.01)
    if deadline is None:
        for child in children:
            child.process.wait()
    if dead := _dead(children):
        raise RanksFailed(dead[0].epitaph())


def _dead(children: list[_Child]) -> list[_Child]:
    """Those that ended as they should not, the cause first: a signal, then an error, then the loss of a peer."""
    gone = [child for child in children if child.process.poll() is not None]
    dead = [child for child in gone if child.process.returncode or not child.done]
    return sorted(dead, key=lambda child: (child.process.returncode == PEER_DIED, child.process.returncode >= 0))


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None and not stream.closed:
        stream.close()


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
    for child in children:
        child.process.wait()
        _close(child.process.stdin)
        _close(child.process.stdout)
        os.close(child.messages)


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


def _rank_process() -> None:
    """What a child runs; its arguments are one JSON object."""
    # Ctrl-C reaches the parent alone, which ends them. Not a session of its own: Linux would schedule each as a group,
    # and a rank that gives way to its peers would not.
    os.setpgrp()
    spec = json.loads(sys.argv[1])
    rank, size = spec["rank"], spec["size"]
    watch = _Watch(rank, spec["parent"])
    with os.fdopen(spec["messages"], "w", encoding="utf-8") as messages:

        def send(message: dict[str, Any]) -> None:
            messages.write(json.dumps(message) + "\n")
            messages.flush()

        status = 0
        try:
            _run_rank(spec, rank, size, watch, send)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        if status:
            os._exit(status)  # a group that lost a member may never come down by itself


def _run_rank(spec: dict[str, Any], rank: int, size: int, watch: _Watch, send: Send) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=spec["timeout"])
    store = dist.TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=timeout)
    store.set(f"pid/{rank}", str(os.getpid()))
    for peer in range(size):
        if peer != rank:
            watch.add(int(store.get(f"pid/{peer}")), f"rank {peer}")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    module, _, function = spec["main"].partition(":")
    main: RankMain = getattr(importlib.import_module(module), function)
    main(rank, size, spec["config"], send)
    dist.barrier()
    watch.stop()
    send({"kind": "done"})
    sys.stdin.read()
    dist.destroy_process_group()
