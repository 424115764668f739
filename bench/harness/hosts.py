"""Hosts on one machine, to run ranks on several: each has its own network address, name, boot id, processes, shared
memory and /tmp, and a link of a chosen rate to a switch.

They are Linux namespaces inside further namespaces of their own, so that nothing shows on the machine itself: with the
last process everything is gone, and the kernel ends all processes with the first of them, which ends with its parent.

    with Hosts([[0, 1], [2, 3]], gigabits=1.0) as hosts:
        values = hosts.run(function, argument)  # function(rank, argument), in a gloo process group

Each host runs its ranks as `torchrun` does: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on are in the environment.
Ranks are forked, so modules that are loaded before are not loaded again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .namespaces import (
    INTERFACE,
    SHARED,
    HostsUnavailable,
    check_programs,
    configure,
    dropped,
    end_with_parent,
    fork_into,
    identify,
    make_switch,
    mount_system,
    plug,
    port_bytes,
    set_link,
    shape,
    unshare_all,
)
from .ranks import RanksFailed

_PORT = 29500  # of the store, at the host of rank 0
_START_LIMIT, _CLOSE_LIMIT = 60.0, 20.0  # seconds
_KEPT_OUTPUT = 4000  # characters of what a rank has printed


@dataclass
class RankEnd:
    """The end of a rank: its value, or the name and text of its exception.

    Attributes:
        exit_code: negative for a signal; None if it is not known.
        output: the last that it printed.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    exit_code: int | None = None
    output: str = ""


_to_parent: list[Connection] = []  # in a rank


def report(text: str) -> None:
    """In a rank: tell the process that started the hosts that this point is reached (`Hosts.wait_for`)."""
    _to_parent[0].send(("report", text))


def why_no_hosts(context: Any = None) -> str | None:
    """The reason why this machine does not allow hosts; None if it does. It starts one."""
    try:
        with Hosts([[0]], context=context):
            return None
    except HostsUnavailable as unavailable:
        return str(unavailable)


class Hosts:
    """Hosts with a link each to a common switch; a context, in which they exist.

    Args:
        ranks: the ranks of each host: [[0, 1], [2, 3]].
        gigabits: the rate of each link, in 10^9 bits a second and each direction.
        context: of multiprocessing; its processes have to start with one thread. None: fork.

    Raises:
        HostsUnavailable: this machine does not allow them; with the reason.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], gigabits: float = 1.0, context: Any = None) -> None:
        check_programs()
        self.ranks = [list(of_host) for of_host in ranks]
        self.size = sum(map(len, self.ranks))
        self.gone: set[int] = set()  # hosts without processes
        self._ends: dict[int, RankEnd] = {}
        self._reports: set[tuple[int, str]] = set()
        self._replies: list[Any] = []
        self._errors: list[str] = []
        self._ready = 0
        self._connection, theirs = Pipe()
        self._process = (context or get_context("fork")).Process(
            target=_enter, args=(theirs, self.ranks, gigabits), daemon=True
        )
        sys.stdout.flush()
        self._process.start()
        theirs.close()
        try:
            self._until(lambda: self._ready == len(self.ranks), _START_LIMIT, "the start of the hosts")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the hosts. Returns when the kernel has ended them."""
        with suppress(OSError):
            self._connection.send(("quit",))
        self._connection.close()
        self._process.join(_CLOSE_LIMIT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Run `function(rank, *args)` on all ranks and return the values in rank order.

        Raises:
            RanksFailed: a rank raised, died, or was not done within `timeout` seconds.
        """
        self.start(function, *args, environment=environment)
        return values_of(self.ends(timeout))

    def run_on_hosts(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run `function(host, *args)` in one process of each host, without a process group.

        Raises:
            RanksFailed: as `run`, with hosts in place of ranks.
        """
        self._send(("start", function, args, {}, True))
        self._ends = {}
        ends = self._collect(range(len(self.ranks)), timeout)
        return values_of(ends)

    def start(self, function: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None) -> None:
        """Start `function(rank, *args)` on all ranks, without waiting. The ranks before have ended."""
        self._ends, self._reports = {}, set()
        self._send(("start", function, args, dict(environment or {}), False))

    def ends(self, timeout: float = 120.0) -> list[RankEnd]:
        """The end of each rank. Ranks that have not ended after `timeout` seconds have the error "TimeoutError", and
        those of a host that was ended have "HostGone"; neither are waited for any longer."""
        return self._collect(range(self.size), timeout)

    def wait_for(self, text: str, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> None:
        """Wait until ranks (None: all) have called `report(text)`.

        Raises:
            RanksFailed: a rank ended before, or did not report within `timeout` seconds.
        """
        awaited = {(rank, text) for rank in (range(self.size) if ranks is None else ranks)}

        def reached() -> bool:
            if ended := {rank for rank, _ in awaited - self._reports} & self._ends.keys():
                rank = min(ended)
                raise RanksFailed(f"rank {rank} ended before {text!r}: {_text(self._ends[rank])}")
            return awaited <= self._reports

        self._until(reached, timeout, repr(text))

    def bytes(self) -> list[tuple[int, int]]:
        """The bytes that have gone into and out of each host over its link since it exists, headers included."""
        return [self._ask(("bytes", host)) for host in range(len(self.ranks))]

    def dropped(self, host: int) -> int:
        """The packets for a host that the queue of its link has dropped, at the switch."""
        return self._ask(("dropped", host))

    def set_link(self, host: int, up: bool) -> None:
        """Take the link of a host down at the switch: nobody is told; or up again."""
        self._ask(("link", host, up))

    def shape(self, host: int, gigabits: float, queue_bytes: int | None = None) -> None:
        """Change the rate of what a host receives. What waits beyond `queue_bytes` is dropped."""
        self._ask(("shape", host, gigabits, queue_bytes))

    def signal(self, host: int, number: int) -> None:
        """Send a signal to all processes of a host."""
        self._send(("signal", host, number))

    def end_host(self, host: int) -> None:
        """Kill all processes of a host at once; its memory and its link vanish with them."""
        self._send(("kill", host))
        self._until(lambda: host in self.gone, 10.0, f"the end of host {host}")

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise RanksFailed(f"the hosts have ended: {error}") from error

    def _ask(self, message: tuple[Any, ...]) -> Any:
        self._send(message)
        self._until(lambda: bool(self._replies), 30.0, f"a reply to {message[0]!r}")
        return self._replies.pop()

    def _collect(self, numbers: Sequence[int], timeout: float) -> list[RankEnd]:
        with suppress(TimeoutError):
            self._until(lambda: len(self._ends) >= len(numbers), timeout, "the ends")
        late = RankEnd(error="TimeoutError", message=f"not done within {timeout:g} s")
        return [self._ends.get(number, late) for number in numbers]

    def _until(self, reached: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            if not self._connection.poll(max(deadline - time.monotonic(), 0.0)):
                raise _Late(f"{what}: not within {timeout:g} s")
            try:
                kind, *content = self._connection.recv()
            except (EOFError, OSError):
                raise RanksFailed(f"the hosts ended while waiting for {what}") from None
            self._receive(kind, *content)

    def _receive(self, kind: str, *content: Any) -> None:
        if kind == "ready":
            self._ready += 1
        elif kind == "unavailable":
            raise HostsUnavailable(content[0])
        elif kind == "failed":
            raise RanksFailed(f"the hosts failed: {content[0]}")
        elif kind == "reply":
            self._replies.append(content[0])
        elif kind == "report":
            self._reports.add((content[0], content[1]))
        elif kind == "end":
            self._ends[content[0]] = content[1]
        elif kind == "gone":
            self.gone.add(content[0])
            for rank in self.ranks[content[0]]:
                self._ends.setdefault(rank, RankEnd(error="HostGone", message=f"host {content[0]} was ended"))


class _Late(RanksFailed, TimeoutError):
    """A wait for ranks or hosts was too long."""


def values_of(ends: Sequence[RankEnd]) -> list[Any]:
    """
    Raises:
        RanksFailed: a rank did not return a value.
    """
    wrong = [f"rank {rank}: {_text(end)}" for rank, end in enumerate(ends) if end.error]
    if wrong:
        raise RanksFailed("\n".join(wrong))
    return [end.value for end in ends]


def _text(end: RankEnd) -> str:
    return f"{end.error}: {end.message}\n{end.output}"


def _reporting(to_parent: Connection, function: Callable[[], None]) -> None:
    """Run `function`; its error goes to the parent."""
    try:
        function()
    except HostsUnavailable as unavailable:
        with suppress(OSError):
            to_parent.send(("unavailable", str(unavailable)))
    except Exception:
        with suppress(OSError):
            to_parent.send(("failed", traceback.format_exc()))


def _enter(to_parent: Connection, ranks: list[list[int]], gigabits: float) -> None:
    """The process between the one that starts the hosts and the switch, which is process 1 of new namespaces."""
    end_with_parent()

    def enter() -> None:
        unshare_all()
        pid = fork_into(lambda: _reporting(to_parent, lambda: _switch(to_parent, ranks, gigabits)))
        to_parent.close()
        os.waitpid(pid, 0)  # process 1 of a namespace ends after all others there

    _reporting(to_parent, enter)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _switch(to_parent: Connection, ranks: list[list[int]], gigabits: float) -> None:
    """Start the hosts, pass on messages, and set the links. When this returns, the kernel ends all other processes."""
    end_with_parent()
    mount_system()
    SHARED.mkdir()
    make_switch()
    names = {f"host{host}": _address(host) for host in range(len(ranks))}
    master = next(host for host, of_host in enumerate(ranks) if 0 in of_host)
    pids, hosts = [], {}
    for host, of_host in enumerate(ranks):
        ours, theirs = Pipe()
        pid = _fork_host(ours, theirs, _Host(theirs, host, of_host, ranks, names, f"host{master}", gigabits))
        theirs.close()
        plug(f"host{host}", pid)
        shape(f"host{host}", gigabits)
        pids.append(pid)
        hosts[ours] = host
        ours.send("linked")
    by_host = {host: ours for ours, host in hosts.items()}

    def command(kind: str, *content: Any) -> None:
        if kind == "start":
            for ours in hosts:
                ours.send((kind, *content))
        elif kind == "signal":
            by_host[content[0]].send((kind, content[1]))
        elif kind == "kill":
            os.kill(pids[content[0]], signal.SIGKILL)
        else:
            actions: dict[str, Callable[..., Any]] = {
                "bytes": port_bytes,
                "dropped": dropped,
                "link": set_link,
                "shape": shape,
            }
            host, *how = content
            to_parent.send(("reply", actions[kind](f"host{host}", *how)))

    while True:
        for ready in connection.wait([to_parent, *hosts]):
            try:
                message = ready.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                if ready is to_parent:
                    return
                to_parent.send(("gone", hosts.pop(ready)))  # type: ignore[call-overload]
                continue
            if ready is to_parent:
                if message == ("quit",):
                    return
                command(*message)
            else:
                to_parent.send(message)
        _reap({})


def _fork_host(ours: Connection, theirs: Connection, host: _Host) -> int:
    """Start process 1 of a host. Returns its id."""
    reader, writer = os.pipe()

    def between() -> None:
        # A process enters a new process namespace with its children only.
        unshare_all()
        os.write(writer, str(fork_into(lambda: _reporting(theirs, host.main))).encode())

    pid = fork_into(lambda: _reporting(theirs, between))
    os.close(writer)
    os.waitpid(pid, 0)
    text = os.read(reader, 32).decode()
    os.close(reader)
    if not text:
        raise HostsUnavailable(ours.recv()[1])
    return int(text)


def _reap(statuses: dict[int, int]) -> None:
    """Collect the statuses of children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]


class _Host:
    """Process 1 of a host: starts its ranks, and passes on what they send."""

    def __init__(
        self,
        to_switch: Connection,
        host: int,
        own: list[int],
        ranks: list[list[int]],
        names: dict[str, str],
        master: str,
        gigabits: float,
    ) -> None:
        self.to_switch, self.host, self.own, self.names, self.gigabits = to_switch, host, own, names, gigabits
        self.environment = {
            "MASTER_ADDR": master, "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(sum(map(len, ranks))),
            "LOCAL_WORLD_SIZE": str(len(own)), "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": str(len(ranks)),
        }  # fmt: skip
        self.statuses: dict[int, int] = {}
        self.running: dict[Connection, tuple[int, int, list[RankEnd]]] = {}  # number, process id, its end

    def main(self) -> None:
        self.to_switch.recv()  # the link is there
        mount_system(SHARED)
        identify(f"host{self.host}", self.names)
        configure(_address(self.host))
        shape(INTERFACE, self.gigabits)
        self.to_switch.send(("ready", self.host))
        while True:
            for ready in connection.wait([self.to_switch, *self.running]):
                if ready is not self.to_switch:
                    self._pass_on(ready)  # type: ignore[arg-type]
                    continue
                kind, *content = self.to_switch.recv()
                if kind == "start":
                    self._start(*content)
                else:
                    with suppress(ProcessLookupError):
                        os.kill(-1, *content)  # all processes that this one sees, which are the host's
            _reap(self.statuses)

    def _start(self, function: Callable[..., Any], args: tuple, environment: dict[str, str], once: bool) -> None:
        environment = self.environment | environment
        for local, number in enumerate([self.host] if once else self.own):
            receiver, sender = Pipe(duplex=False)
            own = {} if once else {"RANK": str(number), "LOCAL_RANK": str(local)}
            body = _Rank(number, function, args, environment | own, sender, joins=not once)
            pid = fork_into(body.main)
            sender.close()
            self.running[receiver] = number, pid, []

    def _pass_on(self, receiver: Connection) -> None:
        number, pid, end = self.running[receiver]
        try:
            kind, content = receiver.recv()
        except (EOFError, OSError):
            del self.running[receiver]
            last = end[0] if end else RankEnd(error="Died", message="ended without a result")
            status = self.statuses.pop(pid, None)
            last.exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if status is None else status)
            with suppress(OSError):
                last.output = _output_file(number).read_text(errors="replace")[-_KEPT_OUTPUT:]
            self.to_switch.send(("end", number, last))
            return
        if kind == "end":
            end.append(content)
        else:
            self.to_switch.send((kind, number, content))


def _output_file(number: int) -> Path:
    return Path(f"/tmp/output-{number}")


class _Rank:
    """A process of a host that runs the function."""

    def __init__(
        self,
        number: int,
        function: Callable[..., Any],
        args: tuple,
        environment: dict[str, str],
        sender: Connection,
        joins: bool,
    ) -> None:
        self.number, self.function, self.args = number, function, args
        self.environment, self.sender, self.joins = environment, sender, joins

    def main(self) -> None:
        os.setpgrp()
        os.environ.update(self.environment)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the name of the host leads to its address
        with open(_output_file(self.number), "wb", buffering=0) as output:
            for standard in (1, 2):
                os.dup2(output.fileno(), standard)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        _to_parent[:] = [self.sender]
        try:
            self.sender.send(("end", RankEnd(self._call())))
        except BaseException as error:
            message = f"{error}\n{traceback.format_exc()}"
            self.sender.send(("end", RankEnd(error=type(error).__name__, message=message)))
            os._exit(1)  # a process group that lost a member may hang when it is destroyed

    def _call(self) -> Any:
        if not self.joins:
            return self.function(self.number, *self.args)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        value = self.function(self.number, *self.args)
        dist.barrier()  # rank 0 has the store
        dist.destroy_process_group()
        return value
