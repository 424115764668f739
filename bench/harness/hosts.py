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

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe, get_context
from typing import Any

from .host_processes import RankEnd, enter_hosts
from .namespaces import HostsUnavailable, check_programs
from .ranks import RanksFailed

_START_LIMIT, _CLOSE_LIMIT = 120.0, 20.0  # seconds


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
            target=enter_hosts, args=(theirs, self.ranks, gigabits), daemon=True
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
