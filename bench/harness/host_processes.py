"""The processes inside of `hosts.py`: one for the switch, process 1 of each host, and the ranks.

Each is forked by the one before and passes on messages of the ones after it: of a rank ("report", text) and
("end", RankEnd); of a host the same with the rank's number, and ("ready", host); and ("gone", host) of the switch.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .namespaces import (
    INTERFACE,
    SHARED,
    HostsUnavailable,
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

_PORT = 29500  # of the store, at the host of rank 0
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


def enter_hosts(to_parent: Connection, ranks: list[list[int]], gigabits: float) -> None:
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
    for ours in hosts:
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

    ready: Any
    while True:
        for ready in connection.wait([to_parent, *hosts]):
            try:
                message = ready.recv()
            except (EOFError, OSError):
                if ready is to_parent:
                    return
                to_parent.send(("gone", hosts.pop(ready)))
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
        ready: Any
        while True:
            for ready in connection.wait([self.to_switch, *self.running]):
                if ready is not self.to_switch:
                    self._pass_on(ready)
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
